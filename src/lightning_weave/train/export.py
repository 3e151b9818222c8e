"""final/: a complete Hugging Face directory in the student's own dtype, with a card that says how it was made."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_weave.config import Lora
from lightning_weave.models.load import load_model
from lightning_weave.store.files import sync_directory
from lightning_weave.store.identity import TOKENIZER_FILES


def with_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Wrap a model for low-rank training; only the adapters have gradients."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        from lightning_weave.errors import InputError

        raise InputError("train.lora needs the package peft: pip install 'lightning-weave[peft]'") from None
    torch.manual_seed(seed)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0)
    return get_peft_model(model, config)


def export(
    folder: Path,
    student: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    lora: Lora | None,
    card: str,
    trust_remote_code: bool = False,
) -> list[Path]:
    """Write the trained student beside its own tokenizer and generation settings; whole or not at all."""
    model = load_model(student, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=trust_remote_code)
    if lora is not None:
        model = with_lora(model, lora, seed=0)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    if lora is not None:
        model = model.merge_and_unload()
    unfinished = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(dtype).save_pretrained(unfinished)
    for pattern in (*TOKENIZER_FILES, "generation_config.json", "*.py"):
        for file in student.glob(pattern):
            shutil.copyfile(file, unfinished / file.name)
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    for file in unfinished.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    sync_directory(folder.parent)
    return sorted(folder.iterdir())
