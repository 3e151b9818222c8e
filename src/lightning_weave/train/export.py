"""final/: a complete Hugging Face directory in the student's own dtype, with a card that says how it was made."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_weave.config import Lora
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.maths import reverse_kl
from lightning_weave.models.adapters import Update
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.files import weight_files
from lightning_weave.models.layout import Layout
from lightning_weave.store import whole_directory, write_json
from lightning_weave.store.identity import TOKENIZER_FILES
from lightning_weave.train.data import Batch
from lightning_weave.train.objectives import Trainee, whole_vocabulary
from lightning_weave.train.parallel import Ranks, own_part, whole_weight

# Taken from the student as they are: training changes none of them, and other programs read what they read before.
KEPT_FILES = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "*.safetensors.index.json",
    "*.py",
)
ADAPTED = ".base_layer."  # how peft names what it puts an adapter beside


def check_lora(student: Checkpoint, lora: Lora) -> None:
    """Refuse LoRA settings that do not fit a model, from its configuration alone."""
    with torch.random.fork_rng(devices=[]):
        with_lora(student.skeleton(), lora, seed=0)


def with_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Wrap a model for low-rank training; only the adapters have gradients."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise InputError("train.lora needs the package peft: pip install peft") from None
    names = [f".{name}" for name, _ in model.named_modules()]
    named = [] if isinstance(lora.targets, str) else lora.targets
    for target in named:  # peft itself accepts one that matches nothing, if another matches
        if not any(name.endswith(f".{target}") for name in names):
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
        if isinstance(layer, LoraLayer):  # where the model has no memory yet, adapters have: alike on all ranks
            for adapter in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
                adapter.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return wrapped


def student_weights(trainee: Trainee, trained: bool = False) -> dict[str, Tensor]:
    """All weights of the student, or those that training changes, under the names that they have in its architecture.

    Adapters are none of them; a weight that has an adapter is changed when they are merged.
    """
    model = trainee.model.get_base_model() if hasattr(trainee.model, "get_base_model") else trainee.model
    state = model.state_dict()
    if trained:
        weights = model.named_parameters(remove_duplicate=False)
        changed = {name for name, weight in weights if weight.requires_grad or ADAPTED in name}
        state = {name: tensor for name, tensor in state.items() if name in changed}
    return {name.replace(ADAPTED, "."): tensor for name, tensor in state.items() if ".lora_" not in name}


@torch.no_grad()
def read_weights(trainee: Trainee, layout: Layout, updates: Mapping[str, Update]) -> None:
    """Read the student's weights from its files, each rank its own rows of them; an adapter is added to its base."""
    parts = {name: own_part(tensor) for name, tensor in student_weights(trainee).items()}
    slices = {name: rows for name, (part, rows) in parts.items() if part.numel()}
    for name, tensor in layout.read(slices):
        parts[name][0].copy_(tensor)
    for name in slices.keys() & updates.keys():
        part, rows = parts[name]
        part.copy_(part.float() + updates[name].rows(rows, part.device))


@torch.no_grad()
def round_weights(trainee: Trainee, dtypes: Mapping[str, torch.dtype], batches: Sequence[Batch]) -> float:
    """Merge adapters and round the weights to the dtypes of the export, in place, and say what that cost.

    All ranks do so together, each with its own part. Returns KL(exported || trained) as the trainer computes both:
    whole vocabulary, mean over the batches' decisions.
    """

    def log_probs() -> Tensor:
        return torch.cat([trainee(batch, whole_vocabulary, 1.0)[1] for batch in batches])  # a row at a time

    trainee.eval()
    trained_NV = log_probs()
    if hasattr(trainee.model, "merge_adapter"):
        trainee.model.merge_adapter()
    for name, weight in student_weights(trainee, trained=True).items():
        if name in dtypes:
            weight.copy_(weight.to(dtypes[name]))
    return reverse_kl(log_probs(), trained_NV, 1.0).mean().item() if len(trained_NV) else 0.0


@dataclass(frozen=True)
class Adapter:
    """A trained low-rank update under the names that peft knows, with its peft settings."""

    weights: dict[str, Tensor]
    settings: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write it as peft does, so that engines can serve it over the student."""
        folder.mkdir()
        weights = {name.replace(".default.", "."): tensor.contiguous() for name, tensor in self.weights.items()}
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        write_json(folder / "adapter_config.json", self.settings)


def trained_adapter(trainee: Trainee, student: Checkpoint) -> Adapter | None:
    """Gather the trained adapters, if there are any; all ranks ask together.

    One over a student that is an adapter itself has no base that an engine could load, and is not written.
    """
    if not hasattr(trainee.model, "peft_config") or student.base is not None:
        return None
    weights = {name: tensor for name, tensor in trainee.model.state_dict().items() if ".lora_" in name}
    settings = trainee.model.peft_config["default"].to_dict() | {
        "base_model_name_or_path": student.name,
        "inference_mode": True,
    }
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return Adapter({name: whole_weight(tensor, torch.float32) for name, tensor in weights.items()}, plain)


def write_model(
    folder: Path,
    trainee: Trainee,
    layout: Layout,
    card: str,
    ranks: Ranks,
    merged: Collection[str] = (),
    adapter: Adapter | None = None,
    beside: bool = False,
) -> list[Path]:
    """Write the student's directory with the trained weights in their places; whole or not at all.

    Of weights that were not trained, those are written into which the student's own adapter was `merged`. What training
    has not touched, such as the vision tower of a multimodal student, is the student's to the bit. Adapters that lie
    `beside` their weights are added to the student's own. All ranks gather one weight after another, and rank 0 writes.
    """
    weights = student_weights(trainee)
    updates = _trained_updates(trainee, beside)
    changed = {*student_weights(trainee, trained=True), *updates, *merged}
    try:
        with whole_directory(folder) if ranks.first else nullcontext() as unfinished:
            if unfinished:
                _copy_files(layout.folder, unfinished)
                (unfinished / "README.md").write_text(card, encoding="utf-8")
            for piece in (piece for piece in layout.pieces if changed & set(piece.names)):
                ranks.wait()  # for rank 0's disk, without the clock of a GPU's group
                if updates:
                    gathered = _added(layout, piece.names, updates) if unfinished else {}
                else:
                    gathered = {name: whole_weight(weights[name], layout.dtypes[name]) for name in piece.names}
                if unfinished:
                    layout.write(unfinished, piece, gathered)
            if unfinished and adapter is not None:
                adapter.write(unfinished / "adapter")
                (unfinished / "adapter" / "adapter_model.safetensors").chmod(0o644)  # made for its owner only
    except (OSError, SafetensorError) as error:
        raise WeaveError(
            f"{folder}: cannot be written ({error}). The last checkpoint is kept: train again, and only this is done"
        ) from error
    return sorted(path for path in folder.rglob("*") if path.is_file()) if ranks.first else []


def _trained_updates(trainee: Trainee, beside: bool) -> dict[str, Update]:
    """What was trained beside weights, by their names: beside quantised ones, which never take it up, or any."""
    if not hasattr(trainee.model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    updates = {}
    for place, layer in trainee.model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer) and (beside or not layer.get_base_layer().weight.is_floating_point()):
            if "default" not in layer.lora_A:
                raise InputError(
                    f"train.lora.targets: {place} is an embedding, whose adapter cannot be given to vLLM while it is "
                    'trained. Leave it out, or set rollout.engine = "hf"'
                )
            factors = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            a_RI, b_OR = (whole_weight(factor.detach(), torch.float32) for factor in factors)
            updates[f"{place}.weight"] = Update(a_RI, b_OR, layer.scaling["default"], layer.fan_in_fan_out)
    return updates


def _added(layout: Layout, names: Sequence[str], updates: Mapping[str, Update]) -> dict[str, Tensor]:
    """The student's own weights of a piece, with what was trained added in float32."""
    stored = dict(layout.read(dict.fromkeys(names, slice(None))))
    added = {
        name: weight.float() + updates[name].rows(slice(None), "cpu") if name in updates else weight
        for name, weight in stored.items()
    }
    return {name: weight.to(layout.dtypes[name]) for name, weight in added.items()}


def _copy_files(student: Path, folder: Path) -> None:
    files = {file for pattern in KEPT_FILES for file in student.glob(pattern)}
    for file in sorted(files | set(weight_files(student))):
        shutil.copyfile(file, folder / file.name)
