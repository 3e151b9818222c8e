"""Small random models of the real architectures, with settings that make their peculiarities matter."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

VOCABULARY = 90
PADDED = 96  # rows of the output matrix: the last six belong to no token
_SHAPE = {
    "vocab_size": PADDED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3.5": lambda: Qwen3_5TextConfig(**_SHAPE, **_LINEAR),
    "llama": lambda: LlamaConfig(**_SHAPE),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "olmo3": lambda: Olmo3Config(
        **_SHAPE, sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    # The longer rows of a batch are rotated by other frequencies than the shorter ones.
    "phi3": lambda: Phi3Config(
        **_SHAPE,
        original_max_position_embeddings=12,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 3.0, 6.0, 9.0],
            "original_max_position_embeddings": 12,
        },
    ),
}
ARCHITECTURES = tuple(CONFIGS)


def small_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """Make a model whose next-token distributions are neither flat nor certain."""
    config = CONFIGS[architecture]()
    for name, value in overrides.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15 if "embed" not in name and "lm_head" not in name else 1.0)
        model.get_output_embeddings().weight.mul_(0.25)
    return model.eval().requires_grad_(False)
