"""Small checkpoints as real ones lie on disk: multimodal, experts one by one, in several files, with own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from train.cached import SHAPE, save_tokenizer

_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_SEES = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
_QWEN_SEES = {
    **_SEES,
    "depth": 3,  # more layers than the text has
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
_GEMMA_SEES = {**_SEES, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16}
_GEMMA_IDS = {"image_token_index": 45, "boi_token_index": 46, "eoi_token_index": 47, "mm_tokens_per_image": 4}
OWN_CODE = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-architecture"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.unused = nn.Linear(4, 4)
"""


def _random(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.3)
    return model.to(torch.bfloat16)


def _plain(config: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        _random(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder)

    return save


def _as(architecture: str, config: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        _random(getattr(transformers, architecture)(config)).save_pretrained(folder)

    return save


def _in_several_files(folder: Path) -> None:
    model = _random(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)))
    model.save_pretrained(folder, max_shard_size="3KB")
    assert (folder / "model.safetensors.index.json").exists()


def _with_more(folder: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def _tied_but_stored_twice(folder: Path) -> None:
    _plain(transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True))(folder)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    _with_more(folder, **{"lm_head.weight": head})


def _of_two_dtypes(folder: Path) -> None:
    _plain(transformers.Qwen3Config(**SHAPE))(folder)
    norm = load_file(folder / "model.safetensors")["model.norm.weight"].float()
    _with_more(folder, **{"model.norm.weight": norm})


def _multimodal_qwen(folder: Path) -> None:
    config = transformers.Qwen3_5Config(text_config={**SHAPE, **_LINEAR}, vision_config=_QWEN_SEES)
    _as("Qwen3_5ForConditionalGeneration", config)(folder)
    _with_more(folder, **{"mtp.norm.weight": torch.randn(16, dtype=torch.bfloat16)})  # predicts further tokens
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}')


def _with_own_code(folder: Path) -> None:
    _plain(transformers.LlamaConfig(**SHAPE))(folder)
    _with_more(folder, **{"unused.weight": torch.randn(4, 4).bfloat16(), "unused.bias": torch.randn(4).bfloat16()})
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config |= {"model_type": "own-architecture", "architectures": ["OwnModel"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(OWN_CODE)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "tied": _plain(transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "tied but stored twice": _tied_but_stored_twice,
    "of two dtypes": _of_two_dtypes,
    "in several files": _in_several_files,
    "OLMo 3": _plain(transformers.Olmo3Config(**SHAPE, **_SLIDING)),
    "Gemma 3": _plain(transformers.Gemma3TextConfig(**SHAPE, **_SLIDING)),
    "multimodal Gemma 3": _as(
        "Gemma3ForConditionalGeneration",
        transformers.Gemma3Config(text_config={**SHAPE, **_SLIDING}, vision_config=_GEMMA_SEES, **_GEMMA_IDS),
    ),
    "multimodal Qwen3.5": _multimodal_qwen,
    "multimodal Qwen3.5 with experts": _as(
        "Qwen3_5MoeForConditionalGeneration",
        transformers.Qwen3_5MoeConfig(
            text_config={**SHAPE, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24},
            vision_config=_QWEN_SEES,
        ),
    ),
    "experts": _plain(transformers.Qwen3MoeConfig(**SHAPE, **_EXPERTS)),
    "own code": _with_own_code,
}


def save_layout(name: str, folder: Path) -> Path:
    """Save a random checkpoint of a layout, with a tokenizer."""
    torch.manual_seed(0)
    LAYOUTS[name](folder)
    save_tokenizer(folder)
    return folder


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's files."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def save_quantised(folder: Path) -> dict[str, torch.Tensor]:
    """Save a checkpoint in FP8 with a scale beside each weight; returns what the weights stand for."""
    torch.manual_seed(0)
    _plain(transformers.Qwen3Config(**SHAPE))(folder)
    save_tokenizer(folder)
    meant = load_file(folder / "model.safetensors")
    stored = dict(meant)
    for key in [key for key in meant if "_proj" in key]:
        scale = meant[key].float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
        stored[key] = (meant[key].float() / scale).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scale.view(1, 1)
        meant[key] = (stored[key].float() * scale).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    return meant


def set_quantisation(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
