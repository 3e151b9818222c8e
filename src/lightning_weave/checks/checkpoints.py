"""Is this a checkpoint? If not, say what it is and what to do, without reading weights."""

from pathlib import Path

from lightning_weave.checks.findings import Finding
from lightning_weave.errors import InputError, first_line
from lightning_weave.heads import describe_head
from lightning_weave.models.adapters import check_adapter
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.files import check_weights, checkpoint_json, indexed_files
from lightning_weave.store.identity import TOKENIZER_FILES


def check_usable(about: str, checkpoint: Checkpoint) -> Finding | None:
    """Find out whether a checkpoint can be loaded as a causal language model; None if it can."""
    try:
        if wrong := _not_a_directory(Path(checkpoint.name).expanduser()):
            return Finding(about, "checkpoint", "error", wrong)
        if checkpoint.base is not None and (of_base := check_usable(about, checkpoint.base)):
            text = f"{checkpoint.name}: a LoRA adapter whose base cannot be used: {of_base.text}"
            return Finding(about, "checkpoint", "error", text)
        if checkpoint.is_here:  # else its weights are still on the hub
            if wrong := not_a_checkpoint(checkpoint.path):
                return Finding(about, "checkpoint", "error", wrong)
            check_weights(checkpoint.path)
            if checkpoint.base is not None:
                check_adapter(checkpoint.adapter_path)
        assert checkpoint.config is not None
        assert checkpoint.tokenizer is not None
        checkpoint.skeleton()
    except InputError as error:
        return Finding(about, "checkpoint", "error", str(error))
    except (ValueError, KeyError, OSError, ImportError) as error:  # no causal language model of this architecture
        reason = first_line(error)
        text = f"{checkpoint.light_path}: not a causal language model that transformers can build ({reason})"
        return Finding(about, "checkpoint", "error", text)
    return None


def check_scorable(about: str, checkpoint: Checkpoint) -> Finding | None:
    """Find out whether a usable checkpoint can be scored: its output layer must have a row for every token."""
    try:
        describe_head(checkpoint.skeleton(), checkpoint.vocabulary)
    except InputError as error:
        return Finding(about, "checkpoint", "error", f"{checkpoint.name}: {error}")
    return None


def _not_a_directory(path: Path) -> str | None:
    if not path.is_file():
        return None
    if path.suffix == ".gguf":
        return f"{path}: a GGUF file, for llama.cpp. {_SOURCE}"
    return f"{path}: a file. Give the directory of the checkpoint, with config.json, weights and tokenizer"


_SOURCE = "Give the directory or hub name of the checkpoint that it was converted from (safetensors)"


def not_a_checkpoint(path: Path) -> str | None:
    """Name a directory for what it is, and say what to do; None if it looks like a checkpoint."""
    has_config = (path / "config.json").is_file()
    if (path / "adapter_config.json").is_file() and not has_config:
        base = checkpoint_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        return (
            f"{path}: a LoRA adapter of {base}, and here a whole model is needed. Merge it with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(OUT), put the "
            "tokenizer into OUT, and give OUT"
        )
    if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        return f"{path}: holds GGUF weights, for llama.cpp. {_SOURCE}"
    if not has_config:
        return _without_config(path)
    parts = indexed_files(path)
    if absent := [part for part in parts if not (path / part).is_file()]:
        count = f"{len(absent)} of {len(parts)} weight files"
        return f"{path}: {count} are missing, {absent[0]} among them. Download it again"
    if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return (
            f"{path}: weights without a tokenizer, as a Trainer saves them when it is not given one. Copy the "
            "tokenizer files (tokenizer.json, tokenizer_config.json) of the model that it was trained from into it"
        )
    return None


def _without_config(path: Path) -> str:
    saved = [file for file in path.glob("checkpoint-*") if file.name.removeprefix("checkpoint-").isdigit()]
    if saved:
        last = max(saved, key=lambda file: int(file.name.removeprefix("checkpoint-")))
        return (
            f"{path}: the output directory of a Trainer. Give one of its {len(saved)} checkpoints: {last} is the last"
        )
    if not any(path.iterdir()):
        return f"{path}: an empty directory. Download or export the checkpoint again"
    inside = sorted(file.parent for file in path.glob("*/config.json"))
    hint = f"did you mean {inside[0]}?" if inside else "give the directory that has it"
    return f"{path}: no config.json here, so no checkpoint; {hint}"
