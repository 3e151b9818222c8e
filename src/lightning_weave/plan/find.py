"""Find a model's config.json: its directory, this package (the paper's models), the hub's cache, or the hub."""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError
from lightning_weave.hub import use_hub, why_not
from lightning_weave.plan.architecture import Shape, read_shape


def find_shape(model: str, revision: str | None = None, known: bool = True) -> Shape:
    """Read the sizes of a model without any of its weights; `known` says that a name of the paper means its model."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if known and (shipped := _shipped(model)) is not None:
            return read_shape(shipped, model)
        folder = _fetch(model, revision)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():  # of a LoRA: its updates are small
        return find_shape(str(_read(adapter).get("base_model_name_or_path")))
    return read_shape(_read(folder / "config.json"), model)


@cache
def shipped_shape(model: str) -> Shape:
    """Read the sizes of one of the paper's models, whose configs come with the package."""
    config = _shipped(model)
    assert config is not None, model
    return read_shape(config, model)


def _shipped(model: str) -> dict[str, Any] | None:
    file = files("lightning_weave.plan") / "configs" / f"{model.replace('/', '--')}.json"
    if not file.is_file():
        return None
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _fetch(model: str, revision: str | None) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(f"model {model!r}: no such directory. Give the path of a checkpoint directory or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    use_hub()
    try:
        patterns = ["config.json", "adapter_config.json"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = why_not(error)
        raise InputError(
            f"model {model!r}: no directory of that name, and the hub did not give its config.json ({reason}). "
            "Give a directory that holds one"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: not a JSON object")
    return config
