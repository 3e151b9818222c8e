"""Fit the bytes that the kernels of one layer move to what is counted on the fake device, for `plan/costs.py`.

They are sums of a few sizes of a layer. Small synthetic models differ in one size each, so least squares finds the
share of every size; the largest residual is printed with it. `scripts/plan-docs --counts` runs this.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fake_counts import BANDWIDTH, TOKENS, count, total
from fake_runs import QWEN3, Setting, config_of
from lightning_weave.plan.architecture import read_shape
from lightning_weave.plan.costs import MOVED

BUDGETS = Path(__file__).parents[1] / "tests" / "plan" / "budgets.json"

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
FUSED = 455_512  # bytes per token that a compiled layer of Qwen3-4B moves in training (scripts/fused_layer.py)
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


def kinds_table() -> str:
    """Write the microseconds per token of Qwen3-4B by kind of work, from budgets.json."""
    recorded_counts = json.loads(BUDGETS.read_text(encoding="utf-8"))
    model, columns = "Qwen/Qwen3-4B", {"products": ("products",), "attention": ("attention",), "other": ("other",)}
    columns |= {"head": ("head products", "head, other"), "update": ("optimizer", "sharding")}
    lines = [
        "| µs per token | products | attention | norms, rotary, SwiGLU and other | head | optimizer, sharding | all |"
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for stage in ("reference", "score", "train", "train, compiled"):
        counts = recorded_counts[f"{stage.split(',')[0]} {model}"]
        if stage == "train, compiled":  # what depends on the parameters is not fused
            unfused = planned_bytes(model, "train")
            counts["layer"]["other"]["microseconds"] -= 1e6 * (unfused - FUSED) / BANDWIDTH
        times = total(counts, model)
        cells = [sum(times.get(kind, 0.0) for kind in kinds) for kinds in columns.values()]
        cells.append(sum(cells))
        lines.append(f"| {stage} | {' | '.join(f'{cell:.1f}' if cell else '' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def planned_bytes(model: str, kind: str) -> float:
    """Bytes per token that the kernels of one layer move without compiling, products and attention apart."""
    config = config_of(model)
    layer, width = read_shape(config, model).layers[0], config["hidden_size"]
    sizes = (width, layer.query, layer.key, layer.query + layer.key, layer.intermediate)
    return sum(size * each for size, each in zip(sizes, MOVED[kind, 2][:5], strict=True))
