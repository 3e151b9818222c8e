"""How a recipe enters fingerprints: settings that came later, users' own functions, data by content."""

import hashlib
from pathlib import Path
from typing import Any

from lightning_weave.config import Eval, Reference, Rollout, Score
from lightning_weave.errors import InputError
from lightning_weave.store import file_identities, file_identity

# Keys of [train] that came later than the first runs, with the values that change nothing.
LATER = {"warmup": 0, "decay": "constant", "lora.stabilised": False, "lora.base": "own"}
LATER_ASKED = ("template", "system", "problems")  # keys of [prompts] and [eval] that came later, unset where unused
SHIFT_RULES = {"shift_clip", "only_above", "mass_floor", "temperature"}
TRAIN_EXECUTION = {
    "shard_ranks",
    "token_budget",
    "checkpoint_every",
    "keep",
    "gradient_checkpointing",
    "compile",
    "validate_every",
    "eval_every",
    "eval_problems",
    "agreement",
    "allow_disagreement",
    "trackers",
    "keep_anchors",
    "objective",  # the composition's own, resolved
}


def engine_settings(section: Reference | Score) -> dict[str, Any]:
    """What an engine other than transformers changes in the numbers; steps of earlier versions stay the same."""
    if section.engine == "hf":
        return {}
    return {"engine": section.engine, "quantization": section.options.get("quantization")}


def quantization(section: Rollout | Eval) -> dict[str, Any]:
    """The option of a sampling engine that changes its numbers; without it, steps of earlier versions stay the same."""
    chosen = section.options.get("quantization") if section.engine != "hf" else None
    return {} if chosen is None else {"quantization": chosen}


def without_unset(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what came later where the recipe does not say it: steps of earlier versions stay the same."""
    return {key: value for key, value in settings.items() if key not in LATER_ASKED or value is not None}


def without_defaults(train: dict[str, Any]) -> dict[str, Any]:
    """Leave out what came later than the first runs, where it is not used: they stay done."""
    lora = train["lora"]
    kept = lora and {key: value for key, value in lora.items() if LATER.get(f"lora.{key}", ...) != value}
    return {key: value for key, value in train.items() if LATER.get(key, ...) != value} | {"lora": kept}


def own_content(function: str, where: str) -> dict[str, str]:
    """Name a user's own function by its name and by what is in its file."""
    path, _, name = function.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"{where} = {function!r}: no such file. Give FILE.py:NAME")
    return {"function": name, "content": file_identity(file)}


def template_identity(model: Path) -> str:
    """Name a checkpoint's chat template by the files that can hold it."""
    files = sorted({*model.glob("chat_template*"), *model.glob("tokenizer_config.json")})
    return hashlib.sha256("".join(file_identities(files)).encode()).hexdigest()[:16]


def data_identity(source: str, key: str) -> str:
    """Name data by content where it is a file, by name where it lives on a hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return file_identity(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return hashlib.sha256("".join(file_identities(files)).encode()).hexdigest()
    if path.suffix in {".jsonl", ".json", ".parquet"} or source.startswith((".", "/", "~")):
        raise InputError(f"{key} = {source!r}: no such file. Give a JSONL or Parquet file, a directory or a hub name")
    return source
