"""Bytes of memory on every GPU, and on disk. Only tensors are counted; allocators need somewhat more.

Scoring and training are compared with measurements on a fake device (docs/appendix/plan.md).
"""

from dataclasses import dataclass

from lightning_weave.config import LoraBase, Online, Recipe
from lightning_weave.plan.architecture import Layer, Shape

USABLE = 0.9  # of a GPU's memory: the rest goes to the allocator and the driver
TOKEN_BUDGETS = (16384, 8192, 4096)  # of a micro-batch, the best first
MASTER = 4  # float32 weights, always
OPTIMIZER = 8  # Adam's two moments
GRADIENT = 4
LOGITS = 512 * 2**20  # of a chunk of positions on a GPU (heads/tiles.py)
HEAD_SIZE = 128  # of one attention head, for the rotary tables
QUANTISED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}  # bytes per weight, with the scales of its blocks
BATCH = 450  # bytes per position: candidates, targets and metrics


@dataclass(frozen=True)
class Memory:
    """The memory that one stage needs on one GPU."""

    weights: float
    working: float  # activations, caches, gradients
    loading: float  # peak while the model is loaded

    @property
    def total(self) -> float:
        return self.weights + self.working


def sampling_memory(shape: Shape, tokens: int, sequences: int, bytes_per_number: int) -> Memory:
    """Count the weights and the caches of the sequences in flight."""
    weights = float(shape.parameters * bytes_per_number)
    return Memory(weights, float(sequences * shape.cache_bytes(tokens, bytes_per_number)), weights)


def scoring_memory(shape: Shape, tokens: int, bytes_per_number: int, found: bool = False) -> Memory:
    """Count the weights and the largest activations of a micro-batch: inside a layer, or at the head.

    Logits only exist in chunks; where candidates are to be `found`, a chunk and its exponentials are held.
    """
    size = bytes_per_number
    weights = float(shape.parameters * size)
    widest = 0
    for layer in shape.layers:
        # The residual stream, the output of a block, its norm, and the rotary tables.
        stream = 4 * shape.width * size + 2 * HEAD_SIZE * size
        if layer.experts:  # dispatched, computed, weighted, and in the original order
            widest = max(widest, stream + layer.experts * (4 * shape.width * size + 40))
        else:
            widest = max(widest, stream + 3 * layer.intermediate * size)
    chunk = min(LOGITS, 4 * tokens * shape.vocabulary)
    at_head = tokens * (2 * shape.width * size + BATCH) + chunk * (2.1 if found else 1)
    # Before the first shard the head is compared with the logits of the model, in float32.
    probe = 4 * shape.width * shape.vocabulary if size < 4 else 0
    return Memory(weights, float(max(tokens * widest, at_head)), weights + probe)


def training_memory(
    shape: Shape,
    tokens: int,
    gpus: int,
    checkpointing: bool,
    trained: int | None,
    bytes_per_number: int = 2,
    base: LoraBase = "own",
) -> Memory:
    """Count the tensors held at the moments of an update that can be its peak, and take the largest.

    Master weights, gradients and moments are float32 and sharded over the GPUs (FSDP2), which unshard one layer after
    another in the compute dtype; one GPU in float32 unshards nothing. `trained` is the number of trainable parameters
    if that is not all of them (LoRA): frozen weights keep their dtype, or are quantised (`base`, on one GPU).
    """
    size = bytes_per_number
    learning = shape.parameters if trained is None else trained
    head = shape.width * shape.vocabulary
    root = head * (1 if shape.tied else 2)  # embedding and head: unsharded once for the whole update
    frozen: float = 0 if trained is None else shape.bytes_per_weight * shape.parameters
    if base != "own":
        frozen = QUANTISED[base] * (shape.parameters - root) + size * root
    state = (frozen + (MASTER + OPTIMIZER) * learning) / gpus
    trained_root = root if trained is None else 0
    trained_head = head if trained is None else 0
    stored_as = MASTER if trained is None else shape.bytes_per_weight
    unshards = base == "own" and (gpus > 1 or size != stored_as)  # one GPU only to convert the dtype
    full_root = size * root if unshards else 0
    unit = max(layer.parameters for layer in shape.layers) if unshards else 0
    trained_unit = unit if trained is None else 0
    layers = size * unit + max(size * unit, 5 * trained_unit)  # the last, and the one before it or its gradients

    adapters = size if unshards or trained is None else MASTER  # dtype of the adapters, if nothing converts them
    kept = [_activations(layer, shape.width, size, None if trained is None else adapters) for layer in shape.layers]
    stored = len(kept) * size * shape.width if checkpointing else sum(kept)
    recomputed = max(kept) if checkpointing else 0  # of one layer
    backward = max(  # bytes per token on top of the activations, where a layer is widest in the backward pass
        size * (4 * shape.width + 3 * layer.experts * shape.width)
        if layer.experts
        else size * 4 * shape.width + adapters * 2 * layer.intermediate
        for layer in shape.layers
    )
    layer_gradients = GRADIENT * (learning - trained_root) / gpus
    # Both uses of a tied matrix have a gradient, and their sum is a third.
    root_gradients = (3 if shape.tied else 2) * size * trained_head
    # When the gradients of embedding and head are reduced over several GPUs, their weights have been freed.
    reduced = 0.0
    if unshards:
        reduced = (4 + max(size, 4 / gpus if gpus > 1 else 0)) * trained_root - (full_root if gpus > 1 else 0)
    # All gradients of one layer.
    gradients = 0.6 * tokens * (max(kept) + backward) + size * trained_head + (3 * size + 4) * trained_unit
    share = min(1.0, 2 / len(kept))  # of the layers, when the last but one has its gradients
    # Logits, and the gradient of the head, which is summed in float32; in 16 bits the sum or a chunk is also rounded.
    chunk = min(LOGITS, 4 * tokens * shape.vocabulary)
    at_loss = 4 * trained_head + chunk if size == 4 else max(6 * trained_head + chunk, 4 * trained_head + 1.5 * chunk)
    moments = {
        # Several GPUs all-gather embedding, head and the first layer into buffers, then copy them out.
        "unsharding": full_root + (2 * size * unit if gpus > 1 else 0),
        "loss": tokens * (stored + (8 + 3 * size) * shape.width + BATCH) + size * unit + at_loss,
        "last layer": tokens * (stored + recomputed + backward - 2 * size * shape.width) + size * trained_head + layers,
        # The first to hold the gradients of the layer after it; those before it still have all activations.
        "last but one": tokens * stored * (1 - share) + layer_gradients * share + gradients,
        # Activations are freed while gradients are allocated: most of the one, or all of the other.
        "first layer": (
            tokens * (max(kept) + backward)
            + size * trained_head
            + 2 * size * unit
            + 4.5 * trained_unit
            + layer_gradients
        ),
        "first layer's gradients": gradients + layer_gradients,
        "embedding": root_gradients + 4 * trained_unit + layer_gradients,
        "reduction": reduced + layer_gradients,
        "step": GRADIENT * learning / gpus - full_root,
    }
    # After loading, the head is compared with the logits of the model, in float32. Several GPUs hold embedding and head
    # twice, in the all-gather buffer and copied out, and the layer after them.
    probe = 4 * head if size < 4 else 0
    if gpus == 1:
        checked = max(full_root, 2 * size * unit, probe)
    else:
        checked = size * unit + max(full_root + size * unit, probe)
    if base != "own":  # one matrix at a time is dequantised
        full_root += size * shape.width * max(layer.intermediate for layer in shape.layers)
    loading = (frozen + MASTER * learning) / gpus + full_root + checked
    return Memory(state, float(full_root + max(moments.values())), loading)


def fit_training(
    recipe: Recipe, student: Shape, gpus: int, memory: float, bytes_per_number: int
) -> tuple[bool, int, Memory]:
    """Resolve `auto` in [train] for GPUs with so much memory: whether to checkpoint activations, and the token budget.

    Recomputing activations costs more than small micro-batches do, so it comes last. Online training, which holds other
    models as well, always recomputes.
    """
    train, lora = recipe.train, recipe.train.lora
    longest = recipe.prompts.max_tokens + recipe.rollout.max_tokens
    is_online = any(isinstance(composition, Online) for composition in recipe.compositions.values())
    either = (True,) if is_online else (False, True)
    ways = [
        (checkpointing, budget)
        for checkpointing in (either if train.gradient_checkpointing == "auto" else (train.gradient_checkpointing,))
        for budget in (TOKEN_BUDGETS if train.token_budget == "auto" else (train.token_budget,))
    ]
    for checkpointing, budget in ways:
        needed = training_memory(
            student,
            max(budget, longest),
            gpus,
            checkpointing,
            None if lora is None else lora_parameters(student, lora.rank),
            bytes_per_number=bytes_per_number,
            base="own" if lora is None else lora.base,
        )
        if max(needed.total, needed.loading) <= USABLE * memory:
            break
    return checkpointing, budget, needed


def _activations(layer: Layer, width: int, size: int, adapters: int | None) -> int:
    """Bytes per token that a layer saves for its backward pass: the inputs of norms, matrices and attention.

    Norms compute in float32 and save their input in it; in 16 bits they also save their output. Frozen matrices
    (`adapters` is the bytes per number of LoRA) save nothing, but adapters save their input: in float32 each converts
    its own copy. Experts have no adapters.
    """
    repeated = layer.query if size == 4 else layer.key  # keys and values as the attention kernel reads them
    if adapters is None:
        norm = 4 + size if size < 4 else 2 * size
        norms = 2 * (norm + size) * width + ((layer.query + layer.key) * norm if layer.qk_norm else 0)
        attention = size * (3 * layer.query + 2 * repeated)  # the output twice: also concatenated
        if layer.experts:
            return norms + attention + layer.experts * (size * (2 * width + 4 * layer.intermediate) + 40)
        return norms + attention + size * 4 * layer.intermediate
    norms = 2 * 4 * width + ((layer.query + layer.key) * 4 if layer.qk_norm else 0)
    attention = size * 2 * (layer.query + repeated)
    shared = adapters == size
    inputs = (1 if shared else 3) * width + layer.query
    if layer.experts:
        feed_forward = layer.experts * (size * (width + 3 * layer.intermediate) + 40)
    else:
        feed_forward = size * 3 * layer.intermediate
        inputs += (1 if shared else 2) * width + layer.intermediate
    return norms + attention + feed_forward + adapters * inputs


def online_memory(student: Shape, training: Memory, anchors: float, sampling: Memory) -> Memory:
    """Count training, the initial student (in float32) and the anchors, and what sampling needs."""
    others = 4.0 * student.parameters + anchors
    working = max(training.working, sampling.total)  # it samples with unsharded weights on every GPU
    return Memory(training.weights + others, working, training.loading + others)


def lora_parameters(shape: Shape, rank: int) -> int:
    """Count the parameters of a low-rank update of every matrix: rank x (inputs + outputs)."""
    return sum(rank * layer.adapted for layer in shape.layers)


def cache_bytes(prompt_tokens: float, response_tokens: float, trajectories: int, candidates: int) -> dict[str, float]:
    """Count the bytes on disk of the three caches; `score` is per model."""
    positions = trajectories * response_tokens
    return {
        "rollout": 4 * trajectories * (prompt_tokens + response_tokens),
        "reference": positions * (8 * candidates + 8),
        "score": positions * (5 * candidates + 4),
    }
