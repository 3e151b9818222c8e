"""final/: a complete Hugging Face directory in the student's own dtype, with a card that says how it was made."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from lightning_weave.config import Lora
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.maths import reverse_kl
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.store import whole_directory, write_json
from lightning_weave.store.identity import TOKENIZER_FILES
from lightning_weave.train.data import Batch
from lightning_weave.train.objectives import Trainee, whole_vocabulary

# Taken from the student as they are: training changes none of them, and other programs read what they read before.
KEPT_FILES = (*TOKENIZER_FILES, "config.json", "generation_config.json", "*.py")


def check_lora(student: Checkpoint, lora: Lora) -> None:
    """Refuse LoRA settings that do not fit a model, from its configuration alone."""
    with torch.random.fork_rng(devices=[]):
        with_lora(student.skeleton(), lora, seed=0)


def with_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Wrap a model for low-rank training; only the adapters have gradients."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError("train.lora needs the package peft: pip install peft") from None
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in (
        () if isinstance(lora.targets, str) else lora.targets
    ):  # peft itself accepts one that matches nothing, if another matches
        if not any(name.endswith(f".{target}") for name in names):
            layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise InputError(f"train.lora.targets: no layer is called {target!r}; the student has {known}")
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.stabilised,
        target_modules=lora.targets,
        lora_dropout=0.0,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"train.lora.targets = {lora.targets}: {error}") from None


@torch.no_grad()
def round_weights(trainee: Trainee, dtype: torch.dtype, batches: Sequence[Batch]) -> float:
    """Round the weights to the dtype of the export, in place, and say what that cost; all ranks do so together.

    Returns KL(exported || trained) as the trainer computes both: whole vocabulary, mean over the batches' decisions.
    """

    def log_probs() -> Tensor:
        return torch.cat([trainee(batch, whole_vocabulary, 1.0)[1] for batch in batches])  # a row at a time

    trainee.eval()
    trained_NV = log_probs()
    for value in trainee.state_dict().values():
        if value.is_floating_point():
            value.copy_(value.to(dtype))
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


def merged(student: Checkpoint, weights: Mapping[str, Tensor], lora: Lora) -> tuple[Any, Adapter]:
    """Merge trained adapters into the student, in float32 on the CPU; also give them on their own."""
    model = with_lora(student.load(torch.float32, torch.device("cpu")), lora, seed=0)
    model.load_state_dict(weights)
    settings = model.peft_config["default"].to_dict() | {
        "base_model_name_or_path": student.name,
        "inference_mode": True,
    }
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    adapters = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
    return model.merge_and_unload(), Adapter(adapters, plain)


def write_model(
    folder: Path, weights: Mapping[str, Tensor], student: Checkpoint, card: str, adapter: Adapter | None = None
) -> list[Path]:
    """Write weights as the student's were, with its tokenizer, config and generation settings; whole or not at all."""
    model = student.skeleton()
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if (student.path / "generation_config.json").exists():
        model.generation_config = GenerationConfig()  # the student's may be one that transformers refuses to save
    try:
        with whole_directory(folder) as unfinished:
            model.save_pretrained(unfinished)
            for file in (file for pattern in KEPT_FILES for file in student.path.glob(pattern)):
                shutil.copyfile(file, unfinished / file.name)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            if adapter is not None:
                adapter.write(unfinished / "adapter")
            for file in _files(unfinished):
                file.chmod(0o644)  # safetensors makes its files for their owner only
    except (OSError, SafetensorError) as error:
        raise WeaveError(
            f"{folder}: cannot be written ({error}). The last checkpoint is kept: train again, and only this is done"
        ) from error
    return _files(folder)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
