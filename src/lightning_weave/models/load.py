"""Load a checkpoint: its tokenizer, configuration and weights, and the ids that end a response."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from lightning_weave.errors import InputError, WeaveError, first_line
from lightning_weave.models.attention import spare_memory
from lightning_weave.models.files import check_weights, checkpoint_json, quantisation
from lightning_weave.models.memory import free_memory, is_out_of_memory

_ENDS_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>")
log = logging.getLogger(__name__)
# The stages show one bar each; a bar per tensor file is noise.
transformers_logging.disable_progress_bar()
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """Load a checkpoint's own tokenizer."""
    if trust_remote_code:
        _warn_of_code(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        _refuse_code(path, trust_remote_code, error)
        raise InputError(
            f"{path}: no usable tokenizer ({first_line(error)}). Put its tokenizer.json beside the weights"
        ) from error


def load_model(path: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Load a causal language model for inference: safetensors only, the dtype that was asked for, no gradients."""
    check_weights(path)
    free_memory()  # of the model before, which nobody uses any more
    if trust_remote_code:
        _warn_of_code(path)
    try:
        with room_for_weights(path, device):
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                device_map={"": device},  # each tensor goes there as it is read
            )
    except (OSError, ValueError, KeyError, ImportError) as error:  # the last for packages that read quantised weights
        _refuse_code(path, trust_remote_code, error)
        raise InputError(
            f"{path}: cannot be loaded as a causal language model ({first_line(error)}). Check its config.json and "
            "files"
        ) from error
    # Transformers fills absent weights with random numbers and only warns: that would be scored silently.
    if absent := sorted(info["missing_keys"]):
        raise InputError(
            f"{path}: the weights lack {len(absent)} tensors of the model, {absent[0]} among them. "
            "Download or export the checkpoint again"
        )
    if method := quantisation(path):
        _finish_quantised(path, method, model, info["unexpected_keys"], dtype)
    spare_memory(model)
    return model.eval().requires_grad_(False)


def load_quantised(path: Path, bits: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """Load a model whose matrices, but for the head, are kept in 4 or 8 bits; what it computes is in `dtype`."""
    check_weights(path)
    if find_spec("bitsandbytes") is None:
        raise InputError(f"train.lora.base = {bits!r} needs bitsandbytes: pip install bitsandbytes")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings = {**four, "bnb_4bit_compute_dtype": dtype} if bits == "nf4" else {"load_in_8bit": True}
    with room_for_weights(path, device):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            quantization_config=BitsAndBytesConfig(**settings),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            device_map={"": device},
        )
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor) and not weight.is_floating_point():
            # A state of its weight alone, which never changes: torch's checkpoints do not know what is beside it.
            module._save_to_state_dict = partial(nn.Module._save_to_state_dict, module)
            module.support_avx512bf16_for_cpu = (
                False  # some CPUs would repack it when it is looked at; that is a change
            )
    return model


@contextmanager
def room_for_weights(path: Path, device: torch.device) -> Iterator[None]:
    """Say so where a device has no room for the weights of a checkpoint."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise WeaveError(
            f"{path}: its weights do not fit on {device}. Use a smaller dtype or a larger device"
        ) from error


def _finish_quantised(path: Path, method: str, model: Any, left_over: set[str], dtype: torch.dtype) -> None:
    """Refuse weights whose scales were not used, and bring those that transformers has dequantised to one dtype."""
    if left_over:
        raise InputError(
            f"{path}: its weights are quantised ({method}), and transformers does not use {len(left_over)} of its "
            f"tensors, {min(left_over)} among them. Give the checkpoint that it was quantised from"
        )
    if not any(weight.dtype.itemsize == 1 for weight in model.parameters()):
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)


def skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """Build a causal language model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)


def without_weights(path: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Build a causal language model whose parameters have no memory yet; what it computes itself (buffers) is there."""
    if trust_remote_code:
        _warn_of_code(path)
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        if weight is not None and not weight.is_meta:
            weight = nn.Parameter(weight.to("meta"), weight.requires_grad)
        register(module, name, weight)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        # A model changes its configuration when it is told how to attend; the next one begins with its own.
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def vocabulary_size(tokenizer: Any) -> int:
    """Give the highest token id plus one; rows of the output matrix beyond it belong to no token."""
    return max(tokenizer.get_vocab().values()) + 1


def stop_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Collect every id that ends a response: all eos ids of the checkpoint, and its end of turn."""
    config = checkpoint_json(path / "config.json")
    ids = {tokenizer.eos_token_id}
    for source in (checkpoint_json(path / "generation_config.json"), config, config.get("text_config") or {}):
        eos = source.get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [eos])
    ids.update(_end_of_turn_ids(tokenizer))
    return frozenset(token for token in ids if token is not None)


def configured_dtype(path: Path) -> torch.dtype | None:
    """Read the dtype that a checkpoint's config says it was saved in; None where it says nothing."""
    config = checkpoint_json(path / "config.json")
    for source in (config, config.get("text_config") or {}):
        named = source.get("dtype") or source.get("torch_dtype")
        dtype = getattr(torch, str(named).removeprefix("torch."), None) if named else None
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def checkpoint_dtype(path: Path) -> torch.dtype:
    """Read the dtype a checkpoint was saved in, from its config or else from the weights themselves."""
    if (configured := configured_dtype(path)) is not None:
        return configured
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                if (dtype := _DTYPES.get(tensors.get_slice(key).get_dtype())) is not None:
                    return dtype
    return torch.float32


def context_limit(config: Any) -> int | None:
    """Give the longest context that a configuration allows, or None where it sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def read_config(path: Path, trust_remote_code: bool = False) -> Any:
    """Read a checkpoint's configuration."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        _refuse_code(path, trust_remote_code, error)
        raise InputError(
            f"{path}: its config.json cannot be used ({first_line(error)}). Download the checkpoint again"
        ) from error


def _refuse_code(path: Path, trusted: bool, error: Exception) -> None:
    """Say where the reason is that a checkpoint brings code of its own, which was not run."""
    configs = [checkpoint_json(path / name) for name in ("config.json", "tokenizer_config.json")]
    if not trusted and any(config.get("auto_map") for config in configs):
        raise InputError(
            f"{path}: needs code of its own (auto_map in its config), which is not run unless the recipe says so. Read "
            "it, then set trust_remote_code = true beside this model (student, anchors.NAME or policies.NAME)"
        ) from error


@cache
def _warn_of_code(path: Path) -> None:
    log.warning("warning: trust_remote_code = true: code that comes with %s is run with your rights", path)


def _end_of_turn_ids(tokenizer: Any) -> Iterator[int]:
    """Yield the special tokens that close an assistant's turn: known ones, and what the chat template puts there."""
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    yield from (special[text] for text in _ENDS_OF_TURN if text in special)
    if not tokenizer.chat_template:
        return
    reply = "a reply of the assistant"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": reply}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):  # a template that wants more than two plain turns
        return
    after = text.rpartition(reply)[2].lstrip()
    yield from (index for content, index in special.items() if content and after.startswith(content))
