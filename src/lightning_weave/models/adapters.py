"""LoRA adapters (PEFT): check their files, attach them to their base model, merge them into it."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_weave.errors import InputError
from lightning_weave.models.hub import checkpoint_json, explain_fault

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of the names of the layers
MERGE = "Merge it with peft (merge_and_unload), and use the merged checkpoint"
NOT_SUPPORTED = ("lm_head", "embed_tokens", "lora_embedding_", "wte", "embed_out")  # these are read separately


def adapter_config(path: Path) -> Mapping[str, Any] | None:
    """Read the configuration of an adapter; None if the directory holds a full checkpoint, or nothing."""
    is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    return checkpoint_json(path / ADAPTER_CONFIG) if is_adapter else None


def check_adapter(path: Path) -> None:
    """Refuse an adapter that could run code when it is loaded, or that has more than low-rank updates of layers."""
    config = checkpoint_json(path / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type {config.get('peft_type')} is not supported, only LORA. {MERGE}")
    if config.get("modules_to_save") or config.get("trainable_token_indices"):
        raise InputError(f"{path}: has full modules in addition to its low-rank updates. {MERGE}")
    if not (path / ADAPTER_WEIGHTS).is_file():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        if pickled:
            raise InputError(
                f"{path}: {pickled[0]} is pickled, and loading it would run code from the file. If you trust it, "
                "save the adapter again as safetensors (save_pretrained)"
            )
        raise InputError(f"{path}: no weights here ({ADAPTER_WEIGHTS}). Download the adapter again")
    from safetensors import safe_open

    weights = path / ADAPTER_WEIGHTS
    with (
        explain_fault(weights, "cannot be read", "Download the adapter again"),
        safe_open(weights, framework="np") as tensors,
    ):
        names = list(tensors.keys())
    if unsupported := [name for name in names if any(part in name for part in NOT_SUPPORTED)]:
        raise InputError(f"{path}: changes {unsupported[0]}, the head or the embeddings. {MERGE}")


def attach_adapter(model: Any, name: str, path: Path) -> None:
    """Add an adapter to its base model in place, switched off."""
    import torch

    if name in getattr(model, "peft_config", {}):
        return
    check_adapter(path)
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError:
        raise InputError(f"{path}: a LoRA adapter needs the package peft: pip install peft") from None
    with explain_fault(path / ADAPTER_CONFIG, "cannot be used", "Correct it, or download the adapter again"):
        config = LoraConfig.from_pretrained(str(path))
    config.init_lora_weights = False  # all are read from the file; some initialisations change the base
    config.inference_mode = True
    tensors = _read_tensors(path)
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        explain_fault(path, "does not fit its base model", "Is it the right base?"),
    ):
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several on one base are intended
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # only the names are needed
        inject_adapter_in_model(config, model, adapter_name=name)
        try:
            loaded = set_peft_model_state_dict(model, tensors, adapter_name=name)
        except RuntimeError as error:  # the reason is in its last line
            raise ValueError(str(error).splitlines()[-1].strip()) from None
    missing = [key for key in loaded.missing_keys if f".{name}." in key]
    if wrong := [*loaded.unexpected_keys, *missing]:
        raise InputError(f"{path}: does not fit its base model ({wrong[0]}). Is it the right base?")
    model.eval().requires_grad_(False)
    _set_adapter(model, None)


@contextmanager
def using_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Activate one of the attached adapters, or none."""
    _set_adapter(model, name)
    try:
        yield
    finally:
        _set_adapter(model, None)


def merge_adapter(model: Any, path: Path) -> Any:
    """Add an adapter to the weights of its base model, and remove its modules."""
    attach_adapter(model, "merged", path)
    _set_adapter(model, "merged")
    for place, layer in _adapted_layers(model):
        with explain_fault(path, "cannot be merged into its base model", "Use another adapter"):
            layer.merge()
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    return model.requires_grad_(False)


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to one matrix of its base: the product of two small matrices."""

    a_RI: "Tensor"
    b_OR: "Tensor"
    scale: float
    transposed: bool  # the base stores the matrix as inputs x outputs

    def rows(self, rows: slice, device: Any) -> "Tensor":
        """Compute some rows of the product, in float32."""
        left, right = (self.a_RI.t(), self.b_OR.t()) if self.transposed else (self.b_OR, self.a_RI)
        return left[rows].to(device).float() @ right.to(device).float() * self.scale


def read_updates(path: Path, meta_model: Any) -> dict[str, LowRankUpdate]:
    """Read what an adapter adds, by the names of the weights in the model. Only the shapes of the model are needed."""
    attach_adapter(meta_model, "merged", path)
    tensors = _read_tensors(path)
    by_name = {}
    for place, layer in _adapted_layers(meta_model):
        a_RI, b_OR = (tensors.pop(f"{place}.lora_{factor}.weight", None) for factor in "AB")
        if a_RI is None or b_OR is None or layer.lora_variant:
            raise InputError(f"{path}: has more than a low-rank update of {place}. {MERGE}")
        by_name[f"{place}.weight"] = LowRankUpdate(a_RI, b_OR, layer.scaling["merged"], layer.fan_in_fan_out)
    if tensors:
        raise InputError(f"{path}: {next(iter(tensors))} is not a low-rank update of a matrix. {MERGE}")
    return by_name


def _read_tensors(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    return {key.removeprefix(PEFT_PREFIX): value for key, value in load_file(path / ADAPTER_WEIGHTS).items()}


def _set_adapter(model: Any, name: str | None) -> None:
    for _, layer in _adapted_layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name, inference_mode=True)


def _adapted_layers(model: Any) -> list[tuple[str, Any]]:
    if not hasattr(model, "peft_config"):  # peft may not be installed
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
