"""GPU hours of every stage: one formula each, with at most two constants, fitted to the paper's own table.

A forward pass costs a fixed time per token, plus its operations at a fraction of the peak. Training is a number of
forward passes. Sampling is proportional to the parameters that every token is multiplied with. The paper's online
training repeats all of it in every round at a fraction of those costs, and loses a fixed time per round switching
between sampling, scoring and training; that of `lweave train` samples with the trainer's own model, token by token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_weave.plan.architecture import Shape
from lightning_weave.plan.gpus import CALIBRATED, GPU, Products

HOUR = 3600.0
LAUNCHES = 25  # kernels of one layer for one token
LAUNCH_SECONDS = 10e-6  # that the CPU takes for one of them


@dataclass(frozen=True)
class Workload:
    """How much is sampled, scored and trained on."""

    trajectories: int
    prompt_tokens: float  # mean
    response_tokens: float  # mean
    epochs: int
    rounds: int
    trajectories_per_round: int

    @property
    def tokens(self) -> float:
        return self.trajectories * (self.prompt_tokens + self.response_tokens)

    def forward_work(self, shape: Shape) -> float:
        """Count the operations of one forward pass over the whole cache."""
        return self.trajectories * shape.work(self.prompt_tokens, self.response_tokens)


@dataclass(frozen=True)
class Constants:
    """The constants of the formulas, for the calibrated GPU. `forward_*` hold for reference and anchor scoring."""

    forward_seconds_per_token: float
    forward_utilisation: float  # of the peak
    passes_per_epoch: float  # of training, in forward passes
    sampling_seconds: float  # per token and per parameter
    online_share: float  # of the cost of the same work offline
    online_seconds_per_round: float  # lost, in GPU time


@dataclass(frozen=True)
class PlannedMachine:
    """The GPUs to plan for. `utilisation` replaces the calibrated forward pass, `tokens_per_second` the sampling."""

    gpu: GPU
    gpus: int
    utilisation: float | None = None
    tokens_per_second: float | None = None  # sampled by one GPU


@dataclass(frozen=True)
class Hours:
    """GPU hours of one composition, stage by stage."""

    rollout: float
    reference: float
    score: tuple[float, ...]  # per model
    train: float

    @property
    def cache(self) -> float:
        """The part that all compositions share."""
        return self.rollout + self.reference + sum(self.score)

    @property
    def total(self) -> float:
        return self.cache + self.train


def forward_hours(
    shape: Shape, load: Workload, constants: Constants, machine: PlannedMachine, products: Products = "bfloat16"
) -> float:
    """Predict one forward pass over the cache, with products in some dtype."""
    work = load.forward_work(shape)
    if machine.utilisation is not None:
        return work / machine.gpu.rate(products, machine.utilisation) / HOUR
    fixed = load.tokens * constants.forward_seconds_per_token * CALIBRATED.peak / machine.gpu.peak
    return (fixed + work / machine.gpu.rate(products, constants.forward_utilisation)) / HOUR


def sampling_hours(shape: Shape, tokens: float, constants: Constants, machine: PlannedMachine) -> float:
    """Predict sampling, which is limited by memory bandwidth."""
    if machine.tokens_per_second is not None:
        return tokens / machine.tokens_per_second / HOUR
    slower = CALIBRATED.bandwidth / machine.gpu.bandwidth
    return tokens * shape.multiplied * constants.sampling_seconds * slower / HOUR


def live_sampling_hours(
    shape: Shape, load: Workload, sequences: int, bytes_per_number: int, machine: PlannedMachine
) -> float:
    """Predict sampling with the model that is being trained, a batch of sequences at a time, token by token.

    Every step reads all weights and the caches, and launches every layer's kernels. This is an estimate: nothing of it
    was measured on a GPU.
    """
    tokens = load.prompt_tokens + load.response_tokens / 2
    bytes_read = shape.parameters * bytes_per_number + sequences * shape.cache_bytes(int(tokens), bytes_per_number)
    step = len(shape.layers) * LAUNCHES * LAUNCH_SECONDS + bytes_read / machine.gpu.bandwidth
    return math.ceil(load.trajectories / sequences) * load.response_tokens * step / HOUR


def training_hours(
    shape: Shape, load: Workload, constants: Constants, machine: PlannedMachine, products: Products = "bfloat16"
) -> float:
    """Predict training on the cache."""
    return load.epochs * constants.passes_per_epoch * forward_hours(shape, load, constants, machine, products)


@dataclass(frozen=True)
class StageProducts:
    """The dtype of the products of each stage that computes with torch."""

    reference: Products = "bfloat16"
    score: Products = "bfloat16"
    train: Products = "bfloat16"


def offline_hours(
    student: Shape,
    models: Sequence[Shape],
    load: Workload,
    constants: Constants,
    machine: PlannedMachine,
    products: StageProducts = StageProducts(),
) -> Hours:
    """Predict every stage of one composition; `models` are the distinct checkpoints to score."""
    return Hours(
        rollout=sampling_hours(student, load.trajectories * load.response_tokens, constants, machine),
        reference=forward_hours(student, load, constants, machine, products.reference),
        score=tuple(forward_hours(model, load, constants, machine, products.score) for model in models),
        train=training_hours(student, load, constants, machine, products.train),
    )


def online_work(offline: Hours, load: Workload) -> float:
    """Cost online training at offline rates: every round makes its own cache; the updates are the same."""
    caches = load.rounds * load.trajectories_per_round / load.trajectories
    return caches * offline.cache + offline.train


def live_hours(offline: Hours, load: Workload, sampling: float) -> float:
    """Predict the same composition trained online by `lweave train`, whose `sampling` of all trajectories costs that.

    Every round samples, finds the candidates, reads them with the student as it was, and scores them with all anchors.
    """
    caches = load.rounds * load.trajectories_per_round / load.trajectories
    return caches * (sampling + 2 * offline.reference + sum(offline.score)) + offline.train


def online_hours(offline: Hours, load: Workload, constants: Constants, machine: PlannedMachine) -> float:
    """Predict the same composition trained online by the paper's program, which its table is of."""
    lost = load.rounds * constants.online_seconds_per_round * CALIBRATED.peak / machine.gpu.peak / HOUR
    return lost + constants.online_share * online_work(offline, load)
