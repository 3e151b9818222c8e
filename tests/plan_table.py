"""The memory that `lweave plan` predicts against that measured on the fake device, as in docs/appendix/plan.md.

`scripts/plan-docs --all` measures all of it again and rewrites file and page.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from fake_runs import Measured, Setting, config_of, read
from lightning_weave.plan.architecture import Shape, read_shape
from lightning_weave.plan.memory import Memory, lora_parameters, scoring_memory, training_memory

FILE = Path(__file__).parent / "plan" / "measured.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "appendix" / "plan.md"
BEGIN, END = "<!-- memory -->\n", "<!-- /memory -->"
MODELS = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B")
LENGTHS = (2048, 8192, 32768)
WORLDS = (1, 8, 64)
DEPTH = 4  # layers of full width: all that a peak can consist of
WHOLE = (  # with all layers
    Setting("train", "Qwen/Qwen3-1.7B", "bfloat16", 1),
    Setting("train", "Qwen/Qwen3-4B", "bfloat16", 8, checkpointing=True),
    Setting("train", "Qwen/Qwen3-8B-Base", "float32", 8),
    Setting("reference", "Qwen/Qwen3-8B-Base", "float32"),
    Setting("train", "Qwen/Qwen3-32B", "bfloat16", 64, checkpointing=True),
    Setting("score", "Qwen/Qwen3-32B", "bfloat16"),
    Setting("train", "Qwen/Qwen3-30B-A3B", "bfloat16", 64, checkpointing=True),
    Setting("score", "Qwen/Qwen3-30B-A3B", "bfloat16"),
)
ADAPTED = tuple(  # with LoRA of rank 16
    Setting("train", model, dtype, world, checkpointing, layers=DEPTH, lora=16)
    for model, dtype, world in (
        ("Qwen/Qwen3-1.7B", "bfloat16", 1),
        ("Qwen/Qwen3-1.7B", "bfloat16", 8),
        ("Qwen/Qwen3-1.7B", "float32", 1),
        ("Qwen/Qwen3-8B-Base", "bfloat16", 1),
        ("Qwen/Qwen3-8B-Base", "bfloat16", 8),
    )
    for checkpointing in (False, True)
)


def settings(models: Sequence[str] = MODELS) -> Iterator[Setting]:
    """All that is measured."""
    for model in models:
        for dtype in ("bfloat16", "float32"):
            for stage in ("score", "reference"):
                yield Setting(stage, model, dtype, layers=DEPTH)
            for world in WORLDS:
                for checkpointing in (False, True):
                    yield Setting("train", model, dtype, world, checkpointing, layers=DEPTH)
        yield from (setting for setting in (*WHOLE, *ADAPTED) if setting.model == model)


def recorded() -> list[Measured]:
    """Read what was measured."""
    return [read(json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def planned(setting: Setting, tokens: int) -> Memory:
    """Predict the same."""
    shape = shape_of(setting)
    size = 4 if setting.dtype == "float32" else 2
    if setting.stage == "train":
        trained = None if setting.lora is None else lora_parameters(shape, setting.lora)
        return training_memory(shape, tokens, setting.world, setting.checkpointing, trained, size)
    return scoring_memory(shape, tokens, size, found=setting.stage == "reference")


def shape_of(setting: Setting) -> Shape:
    """Read the sizes of the model, with as many layers as it was measured with."""
    config = config_of(setting.model)
    return read_shape({**config, "num_hidden_layers": setting.layers or config["num_hidden_layers"]}, setting.model)


def table(measured: Sequence[Measured]) -> str:
    """Write one line per setting: predicted / measured (error) for every length."""
    lengths = " | ".join(f"{tokens // 1024}k tokens" for tokens in LENGTHS)
    lines = [f"| model | layers | stage | dtype | GPUs | {lengths} |", "| --- " * (5 + len(LENGTHS)) + "|"]
    for one in measured:
        setting = one.setting
        stage = (
            setting.stage + (", LoRA" if setting.lora else "") + (", checkpointing" if setting.checkpointing else "")
        )
        layers = str(setting.layers or "all")
        cells = [setting.model.split("/")[1], layers, stage, setting.dtype, str(setting.world)]
        cells += [_cell(planned(setting, tokens).total, one.peaks[tokens]) for tokens in LENGTHS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(predicted: float, found: float) -> str:
    return f"{predicted / 1e9:.1f} / {found / 1e9:.1f} ({predicted / found - 1:+.0%})"
