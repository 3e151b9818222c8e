"""What doctor asks of a checkpoint by itself, without loading its weights."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from lightning_weave.checks.findings import Finding, listed, visible
from lightning_weave.config import Dtype
from lightning_weave.errors import InputError
from lightning_weave.models.load import checkpoint_dtype, refuse_code, stop_ids, vocabulary_size
from lightning_weave.models.untrained import OutputMatrix
from lightning_weave.runs.alignment import open_tokenizer, student_tokenizer
from lightning_weave.runs.machine import choose_device, compute_dtype
from lightning_weave.runs.steps import Steps


def check_student(steps: Steps) -> list[Finding]:
    """Check the student's checkpoint and that its prompts can be rendered."""
    path, tokenizer = steps.student_path, student_tokenizer(steps)
    trust = steps.recipe.student.trust_remote_code
    stops = [visible(tokenizer.convert_ids_to_tokens(id) or f"<id {id}>") for id in sorted(stop_ids(path, tokenizer))]
    found = [
        *check_checkpoint(steps, "student", path, trust, steps.recipe.reference.dtype),
        Finding("student", "stop tokens", "ok" if stops else "warning", listed(stops) or "none: no response ever ends"),
    ]
    wants_chat = steps.recipe.prompts.chat and steps.recipe.rollout.from_ is None
    if wants_chat and not tokenizer.chat_template and steps.recipe.prompts.format != "livecodebench":
        said = "missing: prompts cannot be rendered. Set prompts.chat = false to give them as plain text"
        found.append(Finding("student", "chat template", "warning", said))
    elif wants_chat:
        found.append(Finding("student", "chat template", "ok", "there"))
    limit = context_limit_at(path, trust)
    needed = steps.recipe.prompts.max_tokens + steps.recipe.rollout.max_tokens
    if limit is not None and limit < needed and steps.recipe.rollout.from_ is None:
        said = (
            f"{limit:,} tokens, less than prompts.max_tokens + rollout.max_tokens = {needed:,}: some responses are cut"
        )
        found.append(Finding("student", "context", "note", said, {"limit": limit}))
    return found


def check_checkpoint(steps: Steps, about: str, path: Path, trust: bool, setting: Dtype) -> list[Finding]:
    """Check dtype and vocabulary padding of one checkpoint."""
    saved = str(checkpoint_dtype(path)).removeprefix("torch.")
    used = str(compute_dtype(setting, path, choose_device(steps.recipe))).removeprefix("torch.")
    said = f"saved in {saved}, computed in {used}; the head's maths and what is stored are float32"
    dtype = Finding(about, "dtype", "note" if used == "float16" else "ok", said, {"saved": saved, "computed": used})
    return [dtype, _check_padding(about, path, vocabulary_size(open_tokenizer(path, trust)))]


def _check_padding(about: str, path: Path, vocabulary: int) -> Finding:
    matrix = OutputMatrix.of(path)
    if matrix is None:
        return Finding(about, "vocabulary", "note", f"{vocabulary:,} tokens; the output matrix has a name unknown here")
    figures, padding = {"tokens": vocabulary, "rows": matrix.rows}, matrix.rows - vocabulary
    if padding < 0:
        said = f"{vocabulary:,} tokens but {matrix.rows:,} output rows: the tokenizer belongs to another checkpoint"
        return Finding(about, "vocabulary", "warning", said, figures)
    if padding == 0:
        return Finding(about, "vocabulary", "ok", f"{vocabulary:,} tokens, as many output rows", figures)
    said = f"{vocabulary:,} tokens, {matrix.rows:,} output rows: {padding:,} belong to no token and are left out"
    return Finding(about, "vocabulary", "ok", said, figures)


def context_limit_at(path: Path, trust_remote_code: bool) -> int | None:
    """Give the longest context of a checkpoint from its configuration alone."""
    limit = getattr(config_at(path, trust_remote_code).get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def config_at(path: Path, trust_remote_code: bool) -> Any:
    """Read a checkpoint's configuration."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        refuse_code(path, trust_remote_code, error)
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: its config.json cannot be used ({reason}). Fetch the checkpoint again") from error
