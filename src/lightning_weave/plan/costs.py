"""GPU hours of every stage: what the code does per token, counted, at the rates of a GPU, over one efficiency.

`roofline` adds up matrix products, attention and the bytes that all other kernels move, as the real scorer and trainer
issue them on a simulated device (tests/fake_counts.py; tests/plan/test_budgets.py compares both). A step of sampling
reads the weights and the caches. `scripts/calibration.py` fits the efficiency of each stage to the paper's tab.
training-cost and predicts each setting from the other three (docs/appendix/plan.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_weave.plan.architecture import GPU, MatmulDtype, Shape
from lightning_weave.plan.memory import USABLE

HOUR = 3600.0
PAPER_BYTES = 4  # of a number in the paper's rollouts, as its recipes have them
PAPER_DTYPES: dict[str, MatmulDtype] = {"reference": "tf32", "score": "tf32", "train": "bfloat16"}
FEW_ROWS = 4  # per rank and update: with fewer, ranks wait for the one with the longest (benchmarks/balance.py)
LAUNCHES = {"token": 25, "forward": 54, "train": 168, "checkpointing": 222}  # kernels of one layer; the first: sampling
LAUNCH_SECONDS = 10e-6  # of CPU time for one of them
MAX_SEQUENCES = 256  # vLLM's default for one batch

# Bytes per token that the kernels of one layer move, products and attention apart, by what they are proportional to:
# width, queries, keys, queries and keys that are normalised, intermediate size, and per expert width and intermediate
# size. By kind of work and bytes per number; counted by `scripts/plan-docs --counts`.
MOVED = {
    ("forward", 2): (84.6, 20.2, 20.5, 36.4, 9.9, 6.5, 10.2),
    ("forward", 4): (83.8, 56.4, 28.5, 26.0, 20.1, 13.0, 21.4),
    ("train", 2): (297.3, 56.4, 65.4, 128.9, 27.2, 36.0, 34.4),
    ("train", 4): (324.0, 152.3, 106.4, 116.1, 54.8, 71.5, 68.0),
    ("checkpointing", 2): (375.8, 76.6, 85.7, 165.2, 37.2, 40.1, 44.8),
    ("checkpointing", 4): (394.5, 216.7, 134.8, 142.0, 75.0, 79.4, 88.7),
}
HEAD_MOVED = {"forward": 24, "train": 38}  # bytes per decision and entry of the vocabulary
SHARDED_MOVED = 10  # numbers per parameter that each GPU moves in a micro-batch: two gatherings and the gradients
UPDATE_MOVED = 44  # bytes per parameter and update, all GPUs together: Adam, and the norm of gradients
BANDWIDTH = 0.85  # of the peak, reached by kernels that only move bytes
ATTENTION = {"bfloat16": 0.354, "float32": 0.6}  # of the peak of the dtype: FlashAttention 2, the memory-efficient one


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
        return self.trajectories * sum(shape.flops(self.prompt_tokens, self.response_tokens))


@dataclass(frozen=True)
class Constants:
    """Efficiencies: the counted time over the measured one, by stage."""

    rollout: float
    reference: float
    score: float
    train: float


CONSTANTS = Constants(
    rollout=0.6019534642376706,
    reference=0.551669142377073,
    score=0.5303615752247743,
    train=0.494153151958651,
)


@dataclass(frozen=True)
class PlannedMachine:
    """The GPUs to plan for. `utilisation` replaces the counted forward pass, `tokens_per_second` the sampling."""

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


def roofline(
    shape: Shape,
    prompt: float,
    response: float,
    gpu: GPU,
    dtype: MatmulDtype,
    train: bool = False,
    checkpointing: bool = False,
) -> float:
    """Add up the seconds that a row takes at the rates of a GPU, forward or in training, without the update."""
    matrices, attention, head = shape.flops(prompt, response)
    size = 2 if dtype == "bfloat16" else 4
    kind = "checkpointing" if train and checkpointing else "train" if train else "forward"
    passes, attended, through_head = {"forward": (1, 1, 1), "train": (3, 3.5, 3), "checkpointing": (4, 4.5, 3)}[kind]
    moved = 0.0
    for layer in shape.layers:
        normalised = (layer.query + layer.key) * layer.qk_norm
        dense = 0 if layer.experts else layer.intermediate
        per_expert = (layer.experts * shape.width, layer.experts * layer.intermediate)
        sizes = (shape.width, layer.query, layer.key, normalised, dense, *per_expert)
        moved += sum(each * count for each, count in zip(sizes, MOVED[kind, size], strict=True))
    moved = moved * (prompt + response) + HEAD_MOVED["train" if train else "forward"] * response * shape.vocabulary
    attention_rate = ATTENTION["bfloat16"] * gpu.peak if size == 2 else ATTENTION["float32"] * gpu.float32
    products = (passes * matrices + through_head * head) / gpu.product_rate(dtype)
    return products + attended * attention / attention_rate + moved / (BANDWIDTH * gpu.bandwidth)


def launching(shape: Shape, kind: str) -> float:
    """Add up the seconds in which the CPU launches the kernels of a pass: the least that a small model takes."""
    return len(shape.layers) * LAUNCHES[kind] * LAUNCH_SECONDS


def update_seconds(shape: Shape, gpu: GPU, dtype: MatmulDtype, micro_batches: float, updates: float) -> float:
    """Add up what one GPU needs for its weights and gradients in these micro-batches and its share of updates."""
    moved = SHARDED_MOVED * (2 if dtype == "bfloat16" else 4) * micro_batches + UPDATE_MOVED * updates
    return moved * shape.parameters / (BANDWIDTH * gpu.bandwidth)


def offline_hours(
    student: Shape,
    models: Sequence[Shape],
    load: Workload,
    machine: PlannedMachine,
    constants: Constants = CONSTANTS,
    dtypes: Mapping[str, MatmulDtype] = PAPER_DTYPES,
    sampled_bytes: int = PAPER_BYTES,
    checkpointing: bool = True,
    rows_per_update: float = 64,
    token_budget: int = 8192,
    score_tokens: int = 16384,
) -> Hours:
    """Predict every stage of one composition; `models` are the distinct checkpoints to score.

    `dtypes` are those of the matrix products, by stage. The defaults are those of the paper's runs.
    """
    prompt, response, gpu = load.prompt_tokens, load.response_tokens, machine.gpu

    def forward(shape: Shape, stage: str, efficiency: float) -> float:
        """One forward pass over the cache."""
        if machine.utilisation is not None:
            return load.forward_flops(shape) / gpu.flops_per_second(dtypes[stage], machine.utilisation) / HOUR
        row = roofline(shape, prompt, response, gpu, dtypes[stage]) / efficiency
        rows_at_once = max(1.0, score_tokens / (prompt + response))
        return load.trajectories * max(row, launching(shape, "forward") / rows_at_once) / HOUR

    if machine.utilisation is not None:
        training = (4 if checkpointing else 3) * forward(student, "train", constants.train)
    else:
        row = roofline(student, prompt, response, gpu, dtypes["train"], train=True, checkpointing=checkpointing)
        rows_at_once = max(1.0, min(token_budget / (prompt + response), rows_per_update / machine.gpus))
        update = update_seconds(student, gpu, dtypes["train"], 1 / rows_at_once, 1 / rows_per_update)
        least = launching(student, "checkpointing" if checkpointing else "train") / rows_at_once
        training = load.trajectories * max((row + update) / constants.train, least) / HOUR
    return Hours(
        rollout=sampling_hours(student, load.trajectories, prompt, response, machine, sampled_bytes, constants),
        reference=forward(student, "reference", constants.reference),
        score=tuple(forward(model, "score", constants.score) for model in models),
        train=load.epochs * training * waiting(rows_per_update / machine.gpus),
    )


def waiting(rows_per_rank: float) -> float:
    """Factor on the GPU hours of training, since ranks with short rows wait, and those without rows do nothing.

    >>> waiting(8), waiting(4), waiting(1), waiting(0.5)
    (1.0, 1.0, 2.0, 4.0)
    """
    if rows_per_rank < 1:
        return 2 / rows_per_rank
    return 1 + max(0.0, (FEW_ROWS - rows_per_rank) / (FEW_ROWS - 1))


def sequences_at_once(shape: Shape, tokens: float, gpu: GPU, bytes_per_number: int) -> int:
    """Count the sequences of this length that vLLM holds at once."""
    room = USABLE * gpu.memory - shape.parameters * bytes_per_number
    return max(1, min(MAX_SEQUENCES, int(room // shape.cache_bytes(int(tokens), bytes_per_number))))


def sampling_hours(
    shape: Shape,
    rows: float,
    prompt: float,
    response: float,
    machine: PlannedMachine,
    bytes_per_number: int = PAPER_BYTES,
    constants: Constants = CONSTANTS,
) -> float:
    """Predict sampling with vLLM: a step multiplies with the weights, or reads them, and reads all caches."""
    if machine.tokens_per_second is not None:
        return rows * response / machine.tokens_per_second / HOUR
    gpu = machine.gpu
    context = prompt + response / 2
    bandwidth = BANDWIDTH * gpu.bandwidth
    sequences = sequences_at_once(shape, context, gpu, bytes_per_number)
    products = 2 * shape.active / gpu.product_rate("float32" if bytes_per_number == 4 else "bfloat16")
    weights = shape.parameters * bytes_per_number / sequences / bandwidth
    caches = shape.cache_bytes(int(context), bytes_per_number) / bandwidth
    least = launching(shape, "token") / sequences
    return rows * response * max((max(products, weights) + caches) / constants.rollout, least) / HOUR


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
    step = launching(shape, "token") + bytes_read / machine.gpu.bandwidth
    return math.ceil(load.trajectories / sequences) * load.response_tokens * step / HOUR


def live_hours(offline: Hours, load: Workload, sampling: float) -> float:
    """Predict the same composition trained online by `lweave train`; `sampling` is the cost of all trajectories.

    Every round samples, finds the candidates, scores them with the initial student and with all anchors.
    """
    caches = load.rounds * load.trajectories_per_round / load.trajectories
    return caches * (sampling + 2 * offline.reference + sum(offline.score)) + offline.train
