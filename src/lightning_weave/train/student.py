"""Open the student for training: float32 masters or an adapter, sharded, read from its files."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_weave.config import Lora, Train
from lightning_weave.devices import can_shard, has_bfloat16, memory_left, memory_of
from lightning_weave.errors import InputError
from lightning_weave.models.adapters import LowRankUpdate
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.modules import explain_out_of_memory, find_blocks, free_memory, freeze_all_but_text
from lightning_weave.models.packing import use_efficient_attention
from lightning_weave.models.weights import Layout
from lightning_weave.plan.architecture import find_shape
from lightning_weave.plan.memory import TOKEN_BUDGETS, fit_training
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.train.objectives import Trainee
from lightning_weave.train.parallel import Ranks, local_shard, materialize, ranks_per_copy, reshard, shard

ADAPTED = ".base_layer."  # peft's name for a layer that has an adapter


def compute_dtype(train: Train, device: torch.device) -> torch.dtype:
    """Choose the dtype of the computation: by default bfloat16, where the hardware has it."""
    if train.dtype == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return cast(torch.dtype, getattr(torch, train.dtype))


def fit_memory(run: Run, ranks: Ranks) -> tuple[bool, int]:
    """Decide whether to checkpoint activations, and the token budget: what the recipe says, or what fits the GPUs."""
    train = run.recipe.train
    checkpointing, budget = train.gradient_checkpointing, train.token_budget
    if memory_left(ranks.device) is not None and "auto" in (checkpointing, budget):
        gpus = ranks_per_copy(train.shard_ranks, ranks)
        size = compute_dtype(train, ranks.device).itemsize
        with suppress(InputError):  # an architecture that plan does not know
            shape = find_shape(str(run.student.path), known=False)
            checkpointing, budget, _ = fit_training(run.recipe, shape, gpus, memory_of(ranks.device), size)
        checkpointing, budget = ranks.broadcast((checkpointing, budget))
    return checkpointing is True, TOKEN_BUDGETS[0] if budget == "auto" else budget


@dataclass(frozen=True)
class TrainContext:
    """What every method of training gets besides the recipe."""

    ranks: Ranks
    dtype: torch.dtype  # of the computation; master weights are float32
    progress: Progress


def open_trainee(run: Run, context: TrainContext, start: Checkpoint | None = None) -> Trainee:
    """Open the student with float32 masters (frozen weights: in the dtype of its files), wrapped and sharded.

    It is built and sharded on meta; then each rank reads its own rows, and never holds more than it keeps.
    """
    free_memory()  # of the models that sampled and scored
    section = run.recipe.train
    ranks = context.ranks
    checkpoint = start or run.student
    quantised = is_quantised(section)
    if quantised:
        assert section.lora is not None, "only a frozen student is quantised"
        if ranks.world_size > 1:
            raise InputError(
                f"train.lora.base = {section.lora.base!r}: a quantised student is on one rank, and there are "
                f'{ranks.world_size}. Start one process, or set base = "own"'
            )
        model = checkpoint.load_quantised(section.lora.base, context.dtype, ranks.device).train()
    else:
        layout = checkpoint.layout  # first: it builds the model on meta, which takes memory for a moment
        model = checkpoint.build_without_weights(_kept_dtype(section, checkpoint, context.dtype, ranks.device)).train()
        freeze_all_but_text(model)
    use_efficient_attention(model)
    decoder, others = find_blocks(model)
    if section.lora is not None:
        model = with_lora(model, section.lora, section.seed)
    if fit_memory(run, ranks)[0]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainee = Trainee(model, checkpoint.vocabulary)
    if quantised:
        for weight in trainee.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(ranks.device)
    else:
        if ranks.world_size > 1 or needs_sharding(run, context.dtype, ranks.device):
            shard(trainee, decoder + others, ranks, context.dtype, ranks_per_copy(section.shard_ranks, ranks))
        with explain_out_of_memory(checkpoint.path, ranks.device):
            materialize(trainee, ranks.device)
            read_weights(trainee, layout, checkpoint.updates)
    trainee.look()
    reshard(trainee)
    if section.compile and not quantised:
        for block in decoder:
            block.compile(dynamic=True)  # once for passes with gradients, once without, whatever the lengths of rows
    return trainee


def is_quantised(section: Train) -> bool:
    """Whether the frozen student is kept in fewer bits than its files have."""
    return section.lora is not None and section.lora.base != "own"


def needs_sharding(run: Run, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are kept in another dtype than they compute in, even in one process: FSDP2 converts them."""
    train = run.recipe.train
    if is_quantised(train) or _kept_dtype(train, run.student, dtype, device) == dtype:
        return False  # adapters, which are float32, convert their input themselves
    if not can_shard(device):
        raise InputError(f'train.dtype = {train.dtype!r}: on {device} weights compute as they are kept. Use "float32"')
    return True


def _kept_dtype(train: Train, student: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Trained weights are kept in float32, frozen ones in the dtype of their files where sharding converts them."""
    if train.lora is None:
        return torch.float32
    return student.dtype if can_shard(device) else dtype


def with_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Wrap a model for low-rank training; only the adapters have gradients."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise InputError("train.lora needs the package peft: pip install peft") from None
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in [] if isinstance(lora.targets, str) else lora.targets:
        if not any(name.endswith(f".{target}") for name in names):  # peft accepts it if another target matches
            layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
            listing = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise InputError(f"train.lora.targets: no layer is called {target!r}; the student has {listing}")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.stabilised,
        target_modules=lora.targets,
        lora_dropout=0.0,
    )
    try:
        wrapped = get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"train.lora.targets = {lora.targets}: {error}") from None
    torch.manual_seed(seed)
    for layer in wrapped.modules():
        if isinstance(layer, LoraLayer):  # on the CPU, even where the model is on meta: alike on all ranks
            for adapter in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
                adapter.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return wrapped


def check_lora(student: Checkpoint, lora: Lora) -> None:
    """Refuse LoRA settings that do not fit a model, from its configuration alone."""
    with torch.random.fork_rng(devices=[]):
        with_lora(student.build_meta(), lora, seed=0)


def student_weights(trainee: Trainee, trained: bool = False) -> dict[str, Tensor]:
    """Give all weights of the student, or those that training changes, under their names in its architecture.

    Adapters are left out; a weight that has an adapter is changed when they are merged.
    """
    model = trainee.model.get_base_model() if hasattr(trainee.model, "get_base_model") else trainee.model
    state = model.state_dict()
    if trained:
        weights = model.named_parameters(remove_duplicate=False)
        changed = {name for name, weight in weights if weight.requires_grad or ADAPTED in name}
        state = {name: tensor for name, tensor in state.items() if name in changed}
    return {name.replace(ADAPTED, "."): tensor for name, tensor in state.items() if ".lora_" not in name}


@torch.no_grad()
def read_weights(trainee: Trainee, layout: Layout, updates: Mapping[str, LowRankUpdate]) -> None:
    """Read the student's weights from its files, each rank its own rows; an adapter is added to its base."""
    shards = {name: local_shard(tensor) for name, tensor in student_weights(trainee).items()}
    slices = {name: rows for name, (part, rows) in shards.items() if part.numel()}
    for name, tensor in layout.read(slices):
        shards[name][0].copy_(tensor)
    for name in slices.keys() & updates.keys():
        part, rows = shards[name]
        part.copy_(part.float() + updates[name].rows(rows, part.device))
