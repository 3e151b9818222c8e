"""The student and its loss as one module, opened for training: float32 masters or an adapter, sharded.

The loss runs inside the forward of the root module, where a sharded head weight is unsharded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_weave.config import Lora, Train
from lightning_weave.devices import (
    can_shard,
    explain_out_of_memory,
    free_memory,
    has_bfloat16,
    has_compiler,
    memory_left,
    memory_of,
)
from lightning_weave.errors import InputError
from lightning_weave.heads import (
    Head,
    check_head,
    describe_head,
    fused_log_residual_loss,
    fused_reverse_kl,
    outcome_logprobs,
    separate_sampled,
)
from lightning_weave.maths import (
    direct_opd_loss,
    forward_kl,
    log_residual_loss,
    reverse_kl,
    total_variation,
    with_other,
)
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.packing import (
    VARLEN_DTYPES,
    enable_packing,
    is_recurrent,
    packed_states,
    padded_states,
    use_efficient_attention,
)
from lightning_weave.models.weights import Layout, LowRankUpdate
from lightning_weave.plan.architecture import find_shape
from lightning_weave.plan.memory import TOKEN_BUDGETS, fit_training
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.train.data import Batch
from lightning_weave.train.parallel import Ranks, local_shard, materialize, ranks_per_copy, reshard, shard, unsharded

OwnLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # log_pi_NO, log_b_NO, log_q_NO, alpha -> loss_N
DISTANCES = ("reverse_kl", "forward_kl", "total_variation", "drift", "covered_mass")
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
class Loss:
    """The objective of one composition."""

    objective: str
    alpha: float
    function: OwnLoss | None = None  # of an objective that the user wrote

    def __call__(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        """Sum the loss over the kept decisions, over `normalizer`; also give the student's outcomes, detached."""
        match self.objective:
            case "tilted" | "reverse-kl" as objective if head.plain:
                log_pi_NO = torch.empty_like(batch.log_q_NO)
                inputs = hidden_ND, head.weight_VD, batch.candidate_ids_NC
                options: dict[str, Any] = {
                    "vocabulary": head.vocabulary,
                    "watch_NO": log_pi_NO,
                    "weight_N": batch.weight_N,
                }
                if objective == "tilted":
                    targets = batch.log_b_NO, batch.log_q_NO
                    loss = fused_log_residual_loss(*inputs, *targets, self.alpha, normalizer, **options)
                else:
                    loss = fused_reverse_kl(*inputs, batch.log_q_NO, self.alpha, normalizer, **options)
                return loss, log_pi_NO
            case "tilted":
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
            case "reverse-kl":
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = reverse_kl(log_pi_NO, batch.log_q_NO, self.alpha)
            case "reverse-kl-full":
                log_q_NV = torch.log_softmax(batch.log_q_NO[:, :-1], dim=-1)
                log_pi_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1).gather(1, batch.candidate_ids_NC)
                log_pi_NO = with_other(log_pi_NV)
                loss_N = reverse_kl(log_pi_NV, log_q_NV, self.alpha)
            case "direct-opd":  # the sampled token may or may not be a candidate
                asked_NA = torch.cat([batch.candidate_ids_NC, batch.sampled_ids_N[:, None]], dim=1)
                logp_NO = outcome_logprobs(hidden_ND, head, asked_NA)
                logp_NC, other_N, sampled_N = separate_sampled(logp_NO[:, :-1], logp_NO[:, -1], asked_NA)
                log_pi_NO = torch.cat([logp_NC, other_N[:, None]], dim=1)
                loss_N = direct_opd_loss(log_pi_NO[:, :-1], batch.r_NC, sampled_N, batch.sampled_log_b_N, self.alpha)
            case name:
                assert self.function is not None
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = self.function(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
                if not isinstance(loss_N, Tensor) or loss_N.shape != log_pi_NO.shape[:1]:
                    shape = tuple(loss_N.shape) if isinstance(loss_N, Tensor) else type(loss_N).__name__
                    raise InputError(f"{name} gives {shape} for {len(log_pi_NO)} decisions; give one loss for each")
        return (batch.weight_N * loss_N).sum() / normalizer, log_pi_NO.detach()


LossFunction = Callable[[Tensor, Head, Batch, float], tuple[Tensor, Tensor]]


def full_vocabulary(hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
    """Stand in for a loss where only the student's log-probs of all tokens are wanted."""
    logp_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1)
    return logp_NV.new_zeros(()), logp_NV


class Trainee(nn.Module):
    """The student and its loss as one module."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        super().__init__()
        self.model = model
        head = describe_head(model, vocabulary)
        # On meta: here the weight would stay unsharded after the model is sharded.
        bias_V = None if head.bias_V is None else head.bias_V.detach().to("meta")
        self.head_description = replace(head, weight_VD=head.weight_VD.detach().to("meta"), bias_V=bias_V)
        self.packs = False  # until `look` has seen that packed rows stay apart

    def head(self) -> Head:
        """Give the head with its present weight: in a forward it is unsharded and in compute dtype."""
        described = self.head_description
        output = self.model.get_output_embeddings()
        return Head(output.weight, described.vocabulary, output.bias, described.scale, described.softcap)

    def look(self) -> None:
        """Find out by short passes if the head is as described and if rows can be packed; all ranks together."""
        check_head(self.model, self.head())
        self.packs = enable_packing(self.model, self.head_description.vocabulary)

    def forward(self, batch: Batch, loss: LossFunction, normalizer: float) -> tuple[Tensor, Tensor]:
        """Return the loss and, without gradient, the student's outcomes log_pi_NO."""
        if self.packs:
            hidden_TD = packed_states(self.model, batch.input_ids_T, batch.positions_T, batch.lengths, batch.whole)
        else:
            hidden_TD = padded_states(self.model, batch.input_ids_T, batch.lengths, batch.whole)
        hidden_ND = hidden_TD[batch.states_N]  # (T, D) -> (N, D): only kept decisions go through the head
        return loss(hidden_ND, self.head(), batch, normalizer)


def distances(log_pi_NO: Tensor, batch: Batch) -> Tensor:
    """Sum over the batch how far the student is from its target and from the sampler, and the mass of candidates."""
    summed = (
        reverse_kl(log_pi_NO, batch.log_q_NO, 1.0).sum(),
        forward_kl(batch.log_q_NO, log_pi_NO).sum(),
        total_variation(batch.log_q_NO, log_pi_NO).sum(),
        reverse_kl(log_pi_NO, batch.log_b_NO, 1.0).sum(),  # the drift
        batch.log_b_NO[:, :-1].exp().sum(),
    )
    return torch.stack(summed)


@contextmanager
def as_sampler(trainee: Trainee) -> Iterator[None]:
    """Hold all weights unsharded, without dropout; compiled layers would be compiled for every step of a cache."""
    with without_dropout(trainee), unsharded(trainee), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def without_dropout(trainee: Trainee) -> Iterator[None]:
    """Run the student in eval mode."""
    was_training = trainee.training
    trainee.eval()
    try:
        yield
    finally:
        trainee.train(was_training)


@dataclass(frozen=True)
class TrainContext:
    """What every method of training gets besides the recipe."""

    ranks: Ranks
    dtype: torch.dtype  # of the computation; master weights are float32
    progress: Progress


def open_trainee(
    run: Run, context: TrainContext, composition: str | None = None, start: Checkpoint | None = None
) -> Trainee:
    """Open the student with float32 masters (frozen weights: in the dtype of its files), wrapped and sharded.

    It is built and sharded on meta; then each rank reads its own rows, and never holds more than it keeps. The LoRA
    matrices begin with the seed of the composition.
    """
    free_memory()  # of the models that sampled and scored
    section = run.recipe.train if composition is None else run.recipe.train_section(composition)
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
        # Only what computes the next token of a text is trained.
        text = [model.get_decoder() or model, model.get_input_embeddings(), model.get_output_embeddings()]
        trained = {weight for part in text if part is not None for weight in part.parameters()}
        for weight in model.parameters():
            weight.requires_grad_(weight in trained)
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
    is_auto = section.compile == "auto"
    is_usual = trainee.packs and not is_recurrent(model) and context.dtype in VARLEN_DTYPES
    if not quantised and (is_usual and has_compiler(ranks.device) if is_auto else section.compile):
        context.progress.say("compiling the decoder layers: the first passes take longer")
        torch._dynamo.config.suppress_errors = is_auto  # the layers that it cannot compile run as they are
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


def find_blocks(model: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers of the text decoder (its longest list of modules), and the layers outside of it."""
    decoder = model.get_decoder() or model
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    within = set(decoder.modules())
    outside = [each for each in model.modules() if isinstance(each, nn.ModuleList) and each not in within]
    inner = {each for one in outside for each in one.modules() if each is not one}
    return list(max(lists, key=len, default=[])), [block for one in outside if one not in inner for block in one]


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
