"""What lies in a checkpoint's directory, looked at without loading it."""

import json
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_weights(path: Path) -> None:
    """Refuse a directory that holds no checkpoint, or only one that could run code when it is loaded."""
    if not (path / "config.json").is_file():
        hint = "a LoRA adapter; merge it into its base model" if (path / "adapter_config.json").is_file() else None
        raise InputError(f"{path}: no config.json here, so no checkpoint ({hint or 'give the directory that has it'})")
    if (path / "adapter_config.json").is_file():  # transformers would put it over the weights where peft is installed
        raise InputError(f"{path}: holds a LoRA adapter beside the weights. Merge it into them, or remove its files")
    if any(path.glob("*.safetensors")):
        _check_index(path)
        return
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
    if pickled:
        raise InputError(
            f"{path}: {pickled[0]} is pickled, and loading it would run code from the file. Use a revision with "
            "safetensors (on the hub often refs/pr/1), or convert it once, where you trust it, with save_pretrained"
        )
    raise InputError(f"{path}: no weights here (*.safetensors). Download the checkpoint again")


def quantisation(path: Path) -> str | None:
    """Name the method by which a checkpoint's weights are quantised; None where they are plain numbers."""
    config = checkpoint_json(path / "config.json")
    for source in (config, config.get("text_config") or {}):
        if isinstance(settings := source.get("quantization_config"), dict):
            return str(settings.get("quant_method", "an unnamed method"))
    return None


def check_trainable(path: Path) -> None:
    """Refuse weights that are too coarse for a step of training to show in them."""
    if method := quantisation(path):
        raise InputError(
            f"{path}: its weights are quantised ({method}): it can be scored, but not trained. Give the checkpoint "
            "that it was quantised from as student.model"
        )


def _check_index(path: Path) -> None:
    """Refuse an index that leads out of the directory, or to weights that are pickled."""
    for part in indexed_files(path):
        if not part.endswith(".safetensors") or Path(part).name != part:
            raise InputError(
                f"{path}: model.safetensors.index.json leads to {part!r}; weights are only read from *.safetensors in "
                "the same directory. Download the checkpoint again, or convert it with save_pretrained"
            )


def indexed_files(path: Path) -> list[str]:
    """Name the weight files that the index lists; none where the weights are one file."""
    parts = checkpoint_json(path / "model.safetensors.index.json").get("weight_map")
    return sorted({str(part) for part in parts.values()}) if isinstance(parts, dict) else []


def weight_files(path: Path) -> list[Path]:
    """Give the files that a loader reads: those of the index, or the one of the usual name, or all."""
    if listed := indexed_files(path):
        return [path / name for name in listed]
    whole = path / "model.safetensors"
    return [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))


def checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that came with a checkpoint; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}). Download the checkpoint again") from error
    return content if isinstance(content, dict) else {}
