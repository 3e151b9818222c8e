"""Fit the bytes that the kernels of one layer move to what is counted on the fake device, for `plan/costs.py`.

They are sums of a few sizes of a layer. Small synthetic models differ in one size each, so least squares finds the
share of every size; the largest residual is printed with it. `scripts/plan-docs --counts` runs this.
"""

import json
from typing import Any

import numpy as np

from fake_counts import TOKENS, count
from fake_runs import QWEN3, Setting
from lightning_weave.plan.architecture import read_shape

BASE = {**QWEN3, "max_position_embeddings": 40960, "num_hidden_layers": 2, "tie_word_embeddings": False}
DENSE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 512, "norm_topk_prob": True}
CONFIGS = [
    {**BASE, **DENSE, **change}
    for change in (
        {},
        {"hidden_size": 2048},
        {"num_attention_heads": 16},
        {"num_key_value_heads": 8},
        {"intermediate_size": 6144},
        {"model_type": "llama"},  # no norms of queries and keys
        {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 8},
        {**EXPERTS, "num_experts_per_tok": 2},
        {**EXPERTS, "num_experts_per_tok": 4},
        {**EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 1024},
        {**EXPERTS, "num_experts_per_tok": 4, "hidden_size": 2048},
    )
]
KINDS = {"forward": ("score", False), "train": ("train", False), "checkpointing": ("train", True)}


def print_counts() -> None:
    """Print the table MOVED of `plan/costs.py`, with the bytes per parameter of an update and the largest residual."""
    for kind, (stage, checkpointing) in KINDS.items():
        for size, dtype in ((2, "bfloat16"), (4, "float32")):
            settings = [Setting(stage, json.dumps(one), dtype, checkpointing=checkpointing) for one in CONFIGS]
            rows, bytes_moved = [], []
            for config, found in zip(CONFIGS, count(settings), strict=True):
                layer, width = read_shape(config, "synthetic").layers[0], config["hidden_size"]
                normalised = (layer.query + layer.key) * layer.qk_norm
                dense = 0 if layer.experts else layer.intermediate
                row = [width, layer.query, layer.key, normalised, dense]
                row += [layer.experts * width, layer.experts * layer.intermediate]
                rows.append(row + ([layer.parameters / TOKENS] if stage == "train" else []))
                bytes_moved.append(found["layer"]["other"]["bytes"])
            relative = np.array(rows) / np.array(bytes_moved)[:, None]
            fitted = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)[0]
            residual = np.abs(relative @ fitted - 1).max()
            line = f'("{kind}", {size}): {tuple(round(float(one), 1) for one in fitted[:7])},'
            print(f"{line}  # update: {fitted[7:].round(1)}, largest residual {residual:.1%}", flush=True)
