"""Bytes of memory on every GPU, and on disk. Estimates for choosing a machine; allocators need somewhat more."""

from dataclasses import dataclass

from lightning_weave.plan.architecture import Shape

MASTER = 4  # float32 weights, always
OPTIMIZER = 8  # Adam's two moments
GRADIENT = 4


@dataclass(frozen=True)
class Memory:
    """The memory that one stage needs on one GPU."""

    weights: float
    working: float  # activations, caches, gradients

    @property
    def total(self) -> float:
        return self.weights + self.working


def sampling_memory(shape: Shape, tokens: int, sequences: int, bytes_per_number: int) -> Memory:
    """Count the weights and the caches of the sequences in flight."""
    return Memory(
        float(shape.parameters * bytes_per_number), float(sequences * shape.cache_bytes(tokens, bytes_per_number))
    )


def scoring_memory(shape: Shape, token_budget: int, bytes_per_number: int) -> Memory:
    """Count the weights and one layer's activations for a micro-batch; logits only exist in tiles."""
    widest = max(layer.widest for layer in shape.layers)
    return Memory(
        float(shape.parameters * bytes_per_number), float(token_budget * (widest + 2 * shape.width) * bytes_per_number)
    )


def training_memory(shape: Shape, token_budget: int, gpus: int, checkpointing: bool, trained: int | None) -> Memory:
    """Count a share of the float32 masters, gradients and moments (FSDP), one unsharded unit, and the activations.

    `trained` is the number of trainable parameters if that is not all of them (LoRA): the frozen ones stay as stored.
    """
    learning = shape.parameters if trained is None else trained
    frozen = 0 if trained is None else shape.parameters
    sharded = (shape.bytes_per_weight * frozen + (MASTER + GRADIENT + OPTIMIZER) * learning) / gpus
    largest = max(shape.width * shape.vocabulary, max(layer.parameters for layer in shape.layers))
    gathered = 2 * 2 * largest if gpus > 1 else 0  # bfloat16, this unit and the next
    head = 4 * shape.width * shape.vocabulary  # its gradient comes with the loss, in float32
    stored = [shape.width if checkpointing else layer.widest for layer in shape.layers]
    in_flight = max(layer.widest for layer in shape.layers) if checkpointing else 0
    activations = 2 * token_budget * (sum(stored) + 2 * in_flight)
    return Memory(sharded + gathered, float(head + activations))


def lora_parameters(shape: Shape, rank: int) -> int:
    """Count the parameters of a low-rank update of every matrix: rank x (inputs + outputs)."""
    # The inputs and outputs of a layer's seven matrices add up to `widest` and three more widths.
    return sum(rank * (layer.widest + 3 * shape.width) for layer in shape.layers)


def cache_bytes(prompt_tokens: float, response_tokens: float, trajectories: int, candidates: int) -> dict[str, float]:
    """Count the bytes on disk of the three caches; `score` is per model."""
    positions = trajectories * response_tokens
    return {
        "rollout": 4 * trajectories * (prompt_tokens + response_tokens),
        "reference": positions * (8 * candidates + 8),
        "score": positions * (5 * candidates + 4),
    }


def training_bytes(shape: Shape, keep: int) -> float:
    """Count the bytes on disk of the kept checkpoints (masters and moments) and of the exported model."""
    return float(shape.parameters * (keep * (MASTER + OPTIMIZER) + shape.bytes_per_weight))
