"""GPU hours of every stage: one formula each, with at most two constants, fitted to the paper's tab. training-cost.

A forward pass costs a fixed time per token, plus its FLOPs at a fraction of the peak. Training is a number of forward
passes. Sampling is proportional to the bytes of the active parameters. Online training samples with the model that is
being trained.
`scripts/calibration.py` fits the constants and predicts each setting from the other three (docs/appendix/plan.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_weave.plan.architecture import CALIBRATED, GPU, MatmulDtype, Shape

HOUR = 3600.0
PAPER_BYTES = 4  # of a number in the paper's rollouts, as its recipes have them
KEPT = 0.82  # of the time of an update, if activations are kept, not recomputed: counted on the fake device
FEW_ROWS = 4  # per rank and update: with fewer, ranks wait for the one with the longest (benchmarks/balance.py)
LAUNCHES = 25  # kernels of one layer for one token
LAUNCH_SECONDS = 10e-6  # of CPU time for one of them


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

    def forward_flops(self, shape: Shape) -> float:
        """Count the FLOPs of one forward pass over the whole cache."""
        return self.trajectories * shape.flops(self.prompt_tokens, self.response_tokens)


@dataclass(frozen=True)
class Constants:
    """The constants of the formulas, for the calibrated GPU. `forward_*` hold for reference and anchor scoring."""

    forward_seconds_per_token: float
    forward_utilisation: float  # of the peak
    passes_per_epoch: float  # of training, in forward passes
    sampling_seconds: float  # per token and per byte of the parameters
    online_share: float  # of the cost of the same work offline, in the paper's program
    online_seconds_per_round: float  # lost in the paper's program, in GPU time


CONSTANTS = Constants(
    forward_seconds_per_token=4.5015914944057206e-05,
    forward_utilisation=0.22357212421258316,
    passes_per_epoch=1.9729858564319531,
    sampling_seconds=3.0327648885777335e-14,
    online_share=0.47886406051731273,
    online_seconds_per_round=344.26133561222775,
)


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


def offline_hours(
    student: Shape,
    models: Sequence[Shape],
    load: Workload,
    machine: PlannedMachine,
    constants: Constants = CONSTANTS,
    dtypes: Mapping[str, MatmulDtype] | None = None,
    sampled_bytes: int = PAPER_BYTES,
    checkpointing: bool = True,
    rows_per_update: float | None = None,
) -> Hours:
    """Predict every stage of one composition; `models` are the distinct checkpoints to score.

    `dtypes` are those of the matrix products, by stage; the default is bfloat16. By default rollouts are sampled and
    the student is trained as in the paper's recipes, where no rank waits.
    """

    def forward(shape: Shape, stage: str) -> float:
        """One forward pass over the cache."""
        dtype: MatmulDtype = (dtypes or {}).get(stage, "bfloat16")
        flops = load.forward_flops(shape)
        if machine.utilisation is not None:
            return flops / machine.gpu.flops_per_second(dtype, machine.utilisation) / HOUR
        fixed = load.tokens * constants.forward_seconds_per_token * CALIBRATED.peak / machine.gpu.peak
        return (fixed + flops / machine.gpu.flops_per_second(dtype, constants.forward_utilisation)) / HOUR

    return Hours(
        rollout=sampling_hours(
            student, load.trajectories * load.response_tokens, machine, sampled_bytes, constants=constants
        ),
        reference=forward(student, "reference"),
        score=tuple(forward(model, "score") for model in models),
        train=load.epochs
        * constants.passes_per_epoch
        * forward(student, "train")
        * (1.0 if checkpointing else KEPT)
        * (1.0 if rows_per_update is None else waiting(rows_per_update / machine.gpus)),
    )


def waiting(rows_per_rank: float) -> float:
    """Factor on the GPU hours of training, since ranks with short rows wait, and those without rows do nothing.

    >>> waiting(8), waiting(4), waiting(1), waiting(0.5)
    (1.0, 1.0, 2.0, 4.0)
    """
    if rows_per_rank < 1:
        return 2 / rows_per_rank
    return 1 + max(0.0, (FEW_ROWS - rows_per_rank) / (FEW_ROWS - 1))


def sampling_hours(
    shape: Shape,
    tokens: float,
    machine: PlannedMachine,
    bytes_per_number: int = PAPER_BYTES,
    constants: Constants = CONSTANTS,
) -> float:
    """Predict sampling, which is limited by memory bandwidth."""
    if machine.tokens_per_second is not None:
        return tokens / machine.tokens_per_second / HOUR
    slowdown = CALIBRATED.bandwidth / machine.gpu.bandwidth
    return tokens * shape.active * bytes_per_number * constants.sampling_seconds * slowdown / HOUR


def live_sampling_hours(
    shape: Shape, load: Workload, sequences: int, bytes_per_number: int, machine: PlannedMachine
) -> float:
    """Predict sampling with the model that is being trained, a batch of sequences at a time, token by token.

    Every step reads all weights and the caches, and launches every layer's kernels. This is an estimate: none of it
    was measured on a GPU.
    """
    if machine.tokens_per_second is not None:
        return load.trajectories * load.response_tokens / machine.tokens_per_second / HOUR
    tokens = load.prompt_tokens + load.response_tokens / 2
    bytes_read = shape.parameters * bytes_per_number + sequences * shape.cache_bytes(int(tokens), bytes_per_number)
    step = len(shape.layers) * LAUNCHES * LAUNCH_SECONDS + bytes_read / machine.gpu.bandwidth
    return math.ceil(load.trajectories / sequences) * load.response_tokens * step / HOUR


def live_hours(offline: Hours, load: Workload, sampling: float) -> float:
    """Predict the same composition trained online by `lweave train`; `sampling` is the cost of all trajectories.

    Every round samples, finds the candidates, scores them with the initial student and with all anchors.
    """
    caches = load.rounds * load.trajectories_per_round / load.trajectories
    return caches * (sampling + 2 * offline.reference + sum(offline.score)) + offline.train
