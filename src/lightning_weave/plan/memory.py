"""Bytes of memory on every GPU, and on disk. What is counted is what tensors hold; allocators need somewhat more.

The figures for scoring and training are held to those of the fake device (docs/plan.md).
"""

from dataclasses import dataclass

from lightning_weave.config import LoraBase
from lightning_weave.plan.architecture import Layer, Shape

MASTER = 4  # float32 weights, always
OPTIMIZER = 8  # Adam's two moments
GRADIENT = 4
LOGITS = 512 * 2**20  # of a chunk of positions on a GPU (heads/tiles.py)
HEAD_SIZE = 128  # of one head, for the tables of positions
QUANTISED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}  # bytes per weight, with the scales of its blocks
BATCH = 450  # bytes per decision: candidates, targets and what is watched of them


@dataclass(frozen=True)
class Memory:
    """The memory that one stage needs on one GPU."""

    weights: float
    working: float  # activations, caches, gradients
    loading: float  # most, until the model stands ready

    @property
    def total(self) -> float:
        return self.weights + self.working


def sampling_memory(shape: Shape, tokens: int, sequences: int, bytes_per_number: int) -> Memory:
    """Count the weights and the caches of the sequences in flight."""
    weights = float(shape.parameters * bytes_per_number)
    return Memory(weights, float(sequences * shape.cache_bytes(tokens, bytes_per_number)), weights)


def scoring_memory(shape: Shape, tokens: int, bytes_per_number: int, found: bool = False) -> Memory:
    """Count the weights and the widest place that a micro-batch passes: inside a layer, or at the head.

    Logits only exist in chunks; where candidates are to be `found`, a chunk is kept beside its exponentials.
    """
    weights = float(shape.parameters * bytes_per_number)
    head = shape.width * shape.vocabulary
    chunk = min(LOGITS, 4 * tokens * shape.vocabulary)
    layers = tokens * max(_passing(layer, shape.width, bytes_per_number) for layer in shape.layers)
    at_head = tokens * (2 * shape.width * bytes_per_number + BATCH) + chunk * (2.1 if found else 1)
    # Before any work the head is compared with the model's own logits, in float32.
    probe = 4 * head if bytes_per_number < 4 else 0
    return Memory(weights, float(max(layers, at_head)), weights + probe)


def _passing(layer: Layer, width: int, size: int) -> int:
    """Bytes per token where a layer is widest, when nothing is kept for a backward pass."""
    stream = 4 * width * size + 2 * HEAD_SIZE * size  # the row itself, what was added to it, its norm, its positions
    if layer.routed:
        return stream + layer.routed * (4 * width * size + 40)  # sent, answered, weighted, and in order again
    return stream + 3 * layer.inner * size


def training_memory(
    shape: Shape,
    tokens: int,
    gpus: int,
    checkpointing: bool,
    trained: int | None,
    bytes_per_number: int = 2,
    base: LoraBase = "own",
) -> Memory:
    """Count what is held at the moments of an update that can be its peak, and take the largest.

    Masters, gradients and moments are float32 and divided over the GPUs (FSDP), which gather one layer after another in
    the dtype of the computation; one GPU in float32 gathers nothing. `trained` is the number of trainable parameters if
    that is not all of them (LoRA): the frozen ones stay as stored, or are quantised (`base`, on one GPU).
    """
    size = bytes_per_number
    learning = shape.parameters if trained is None else trained
    head = shape.width * shape.vocabulary
    root = head * (1 if shape.tied else 2)  # embedding and head: gathered once, and held from beginning to end
    frozen: float = 0 if trained is None else shape.bytes_per_weight * shape.parameters
    if base != "own":
        frozen = QUANTISED[base] * (shape.parameters - root) + size * root
    state = (frozen + (MASTER + OPTIMIZER) * learning) / gpus
    of_root = root if trained is None else 0  # of these, trained
    of_head = head if trained is None else 0
    stands_as = MASTER if trained is None else shape.bytes_per_weight
    gathered = base == "own" and (gpus > 1 or size != stands_as)  # one GPU gathers only to convert
    whole = size * root if gathered else 0
    unit = max(layer.parameters for layer in shape.layers) if gathered else 0
    of_unit = unit if trained is None else 0
    layers = size * unit + max(size * unit, 5 * of_unit)  # the last, with the one before it or with its gradients

    adapters = size if gathered or trained is None else MASTER  # what adapters compute in, where nothing converts them
    if trained is None:
        kept = [_kept(layer, shape.width, size) for layer in shape.layers]
    else:
        kept = [_kept_beside(layer, shape.width, size, adapters) for layer in shape.layers]
    stored = len(kept) * size * shape.width if checkpointing else sum(kept)
    again = max(kept) if checkpointing else 0  # of the layer that is computed again
    back = max(_going_back(layer, shape.width, size, adapters) for layer in shape.layers)
    of_layers = GRADIENT * (learning - of_root) / gpus
    # Both uses of a tied matrix have a gradient, and their sum is a third.
    of_both = (3 if shape.tied else 2) * size * of_head
    # When embedding and head are reduced over several GPUs, their weights have been given up.
    reduced = (4 + max(size, 4 / gpus if gpus > 1 else 0)) * of_root - (whole if gpus > 1 else 0) if gathered else 0.0
    gradients = 0.6 * tokens * (max(kept) + back) + size * of_head + (3 * size + 4) * of_unit  # of one layer, all there
    share = min(1.0, 2 / len(kept))  # of the layers, when the last but one has its gradients
    moments = {
        # Several GPUs gather embedding and head, and the first layer, beside the places where they are then used.
        "gathering": whole + (2 * size * unit if gpus > 1 else 0),
        "loss": tokens * (stored + (8 + 3 * size) * shape.width + BATCH) + size * unit,
        "last layer": tokens * (stored + again + back - 2 * size * shape.width) + size * of_head + layers,
        # The first to hold the sums of the layer after it; those before it still have all activations.
        "last but one": tokens * stored * (1 - share) + of_layers * share + gradients,
        # Its activations go as its gradients come: most of the one, or all of the other.
        "first layer": tokens * (max(kept) + back) + size * of_head + 2 * size * unit + 4.5 * of_unit + of_layers,
        "its gradients": gradients + of_layers,
        "embedding": of_both + 4 * of_unit + of_layers,
        "reduction": reduced + of_layers,
        "step": GRADIENT * learning / gpus - whole,
    }
    moments["loss"] += _at_loss(shape, tokens, of_head, size)
    # Its head is compared with its own logits, in float32, when its weights have been read. Several GPUs gather
    # embedding and head twice, as they come and in their places, beside the layer after them.
    probe = 4 * head if size < 4 else 0
    looked_at = max(whole, 2 * size * unit, probe) if gpus == 1 else size * unit + max(whole + size * unit, probe)
    if base != "own":  # one matrix at a time is made whole
        whole += size * shape.width * max(layer.inner for layer in shape.layers)
    return Memory(state, float(whole + max(moments.values())), (frozen + MASTER * learning) / gpus + whole + looked_at)


def _at_loss(shape: Shape, tokens: int, of_head: int, size: int) -> float:
    """Bytes of logits and of the head's gradient, which is summed in float32 and then rounded."""
    chunk = min(LOGITS, 4 * tokens * shape.vocabulary)
    if size == 4:
        return 4 * of_head + chunk
    return max(6 * of_head + chunk, 4 * of_head + 1.5 * chunk)  # both are rounded: the sum, and a chunk of logits


def _kept(layer: Layer, width: int, size: int) -> int:
    """Bytes per token that a layer keeps for its backward pass: the inputs of norms, products and attention.

    Norms compute in float32 and keep their input so, and what they scale, in 16 bits beside it.
    """
    norm = 4 + size if size < 4 else 2 * size
    norms = 2 * (norm + size) * width
    heads = (layer.query + layer.key) * norm if layer.normed else 0
    repeated = layer.query if size == 4 else layer.key  # keys and values as attention reads them
    attention = size * (3 * layer.query + 2 * repeated)  # its output once more, put together from rows
    if layer.routed:
        fed = layer.routed * (size * (2 * width + 4 * layer.inner) + 40)
    else:
        fed = size * 4 * layer.inner
    return norms + heads + attention + fed


def _kept_beside(layer: Layer, width: int, size: int, adapters: int) -> int:
    """Bytes per token that a layer with adapters keeps: products with frozen matrices keep nothing, norms their input.

    Adapters keep what they read. Beside 16 bits those in float32 convert it first, each for itself. Experts have none.
    """
    heads = (layer.query + layer.key) * 4 if layer.normed else 0
    repeated = layer.query if size == 4 else layer.key
    attention = size * 2 * (layer.query + repeated)
    one_for_all = adapters == size
    inputs = (1 if one_for_all else 3) * width + layer.query
    if layer.routed:
        fed = layer.routed * (size * (width + 3 * layer.inner) + 40)
    else:
        fed = size * 3 * layer.inner
        inputs += (1 if one_for_all else 2) * width + layer.inner
    return 2 * 4 * width + heads + attention + fed + adapters * inputs


def _going_back(layer: Layer, width: int, size: int, adapters: int) -> int:
    """Bytes per token that a layer holds beside what is kept, where it is widest when there is a backward pass."""
    if layer.routed:
        return size * (4 * width + 3 * layer.routed * width)
    return size * 4 * width + adapters * 2 * layer.inner


def online_memory(student: Shape, training: Memory, anchors: float, sampling: Memory) -> Memory:
    """Count training with the student as it was (in float32) and the anchors beside it, and what sampling holds."""
    beside = 4.0 * student.parameters + anchors
    working = max(training.working, sampling.total)  # it samples with all weights whole on every GPU
    return Memory(training.weights + beside, working, training.loading + beside)


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


def checkpoint_bytes(shape: Shape, trained: int | None) -> float:
    """Count the bytes of what is trained, with its moments: one checkpoint, which is copied to the host first."""
    return float((MASTER + OPTIMIZER) * (shape.parameters if trained is None else trained))


def training_bytes(shape: Shape, keep: int, trained: int | None = None) -> float:
    """Count the bytes on disk of the kept checkpoints and of the exported model, with its adapter if it has one."""
    exported = shape.bytes_per_weight * shape.parameters + MASTER * (trained or 0)
    return keep * checkpoint_bytes(shape, trained) + exported
