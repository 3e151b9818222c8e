"""LoRA adapters (PEFT): what lies in their directory, and how one is put on its base model and taken off."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_weave.errors import InputError
from lightning_weave.models.files import checkpoint_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_OF_THE_MODEL = "base_model.model."  # what PEFT puts before the names of the layers
_MERGE = "Merge it with peft (merge_and_unload), and give the merged checkpoint"
_UNSEEN = ("lm_head", "embed_tokens", "lora_embedding_", "wte", "embed_out")  # the head and embeddings are read apart


def adapter_config(path: Path) -> Mapping[str, Any] | None:
    """Read the configuration of an adapter; None where the directory is a whole checkpoint, or nothing."""
    is_adapter = (path / CONFIG).is_file() and not (path / "config.json").is_file()
    return checkpoint_json(path / CONFIG) if is_adapter else None


def base_name(path: Path, config: Mapping[str, Any]) -> str:
    """Name the checkpoint that an adapter was trained on."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: {CONFIG} does not say base_model_name_or_path. Add the base's directory or hub name")
    return name


def check_adapter(path: Path) -> None:
    """Refuse an adapter that could run code when it is loaded, or that is more than low-rank updates of layers."""
    config = checkpoint_json(path / CONFIG)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: an adapter of the kind {config.get('peft_type')}; only LORA is read. {_MERGE}")
    if config.get("modules_to_save") or config.get("trainable_token_indices"):
        raise InputError(f"{path}: trains whole modules beside its low-rank updates. {_MERGE}")
    if not (path / WEIGHTS).is_file():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        if pickled:
            raise InputError(
                f"{path}: {pickled[0]} is pickled, and loading it would run code from the file. Save the adapter "
                "again as safetensors, where you trust it (save_pretrained)"
            )
        raise InputError(f"{path}: no weights here ({WEIGHTS}). Download the adapter again")
    from safetensors import safe_open

    with safe_open(path / WEIGHTS, framework="np") as tensors:
        names = list(tensors.keys())
    if outside := [name for name in names if any(part in name for part in _UNSEEN)]:
        raise InputError(f"{path}: changes {outside[0]}, the head or the embeddings. {_MERGE}")


def attach(model: Any, name: str, path: Path) -> None:
    """Put an adapter beside the weights of its base, in place and switched off."""
    import torch

    if name in getattr(model, "peft_config", {}):
        return
    check_adapter(path)
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError:
        raise InputError(f"{path}: a LoRA adapter needs the package peft: pip install peft") from None
    config = LoraConfig.from_pretrained(str(path))
    config.init_lora_weights = False  # all of them are read from the file; some ways to begin change the base
    config.inference_mode = True
    tensors = _read(path)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several on one base are meant
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # only the names are wanted
        try:
            inject_adapter_in_model(config, model, adapter_name=name)
            loaded = set_peft_model_state_dict(model, tensors, adapter_name=name)
        except ValueError as error:
            raise InputError(f"{path}: does not fit its base model ({error})") from None
        except RuntimeError as error:
            raise InputError(
                f"{path}: its weights do not fit its base model ({str(error).splitlines()[-1].strip()})"
            ) from None
    absent = [key for key in loaded.missing_keys if f".{name}." in key]
    if wrong := [*loaded.unexpected_keys, *absent]:
        raise InputError(f"{path}: its weights do not fit its base model: {wrong[0]}. Is that the right base?")
    model.eval().requires_grad_(False)
    _switch(model, None)


@contextmanager
def using_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Compute with one of the adapters that are attached, or with none."""
    _switch(model, name)
    try:
        yield
    finally:
        _switch(model, None)


def merged(model: Any, path: Path) -> Any:
    """Add an adapter to the weights of its base, and leave nothing else of it."""
    attach(model, "merged", path)
    _switch(model, "merged")
    for place, layer in _layers(model):
        layer.merge()
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one matrix of its base: a product of two small ones."""

    a_RI: "Tensor"
    b_OR: "Tensor"
    scale: float
    transposed: bool  # the base keeps the matrix as inputs x outputs

    def rows(self, rows: slice, device: Any) -> "Tensor":
        """Some rows of it, in float32."""
        left, right = (self.a_RI.t(), self.b_OR.t()) if self.transposed else (self.b_OR, self.a_RI)
        return left[rows].to(device).float() @ right.to(device).float() * self.scale


def updates(path: Path, skeleton: Any) -> dict[str, Update]:
    """Read what an adapter adds, by the names of the weights in the model, of which only the shapes are needed."""
    attach(skeleton, "merged", path)
    tensors = _read(path)
    by_name = {}
    for place, layer in _layers(skeleton):
        a_RI, b_OR = (tensors.pop(f"{place}.lora_{factor}.weight", None) for factor in "AB")
        if a_RI is None or b_OR is None or layer.lora_variant:
            raise InputError(f"{path}: more than a low-rank update of {place}. {_MERGE}")
        by_name[f"{place}.weight"] = Update(a_RI, b_OR, layer.scaling["merged"], layer.fan_in_fan_out)
    if tensors:
        raise InputError(f"{path}: {next(iter(tensors))} is more than a low-rank update of a matrix. {_MERGE}")
    return by_name


def _read(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    return {key.removeprefix(_OF_THE_MODEL): value for key, value in load_file(path / WEIGHTS).items()}


def _switch(model: Any, name: str | None) -> None:
    for _, layer in _layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name, inference_mode=True)


def _layers(model: Any) -> list[tuple[str, Any]]:
    if not hasattr(model, "peft_config"):  # then peft need not even be installed
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
