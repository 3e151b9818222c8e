"""Check a checkpoint on its own, without loading its weights."""

from typing import Any

from lightning_weave.checks.findings import Finding, listed, visible
from lightning_weave.config import Dtype
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.untrained import OutputMatrix
from lightning_weave.prompts import EXPECTS, expected_of
from lightning_weave.runs.machine import choose_device
from lightning_weave.runs.steps import Steps


def check_student(steps: Steps) -> list[Finding]:
    """Check the student's checkpoint and that its prompts can be rendered."""
    student = steps.student
    tokenizer = student.tokenizer
    stops = [visible(tokenizer.convert_ids_to_tokens(id) or f"<id {id}>") for id in sorted(student.stop_ids)]
    findings = [
        *check_checkpoint(steps, "student", student, steps.recipe.reference.dtype),
        Finding("student", "stop tokens", "ok" if stops else "warning", listed(stops) or "none: no response ever ends"),
    ]
    wants_chat = steps.recipe.prompts.chat and steps.recipe.rollout.from_ is None
    if wants_chat and not tokenizer.chat_template and steps.recipe.prompts.format != "livecodebench":
        text = "missing: prompts cannot be rendered. Set prompts.chat = false to give them as plain text"
        findings.append(Finding("student", "chat template", "error", text))
    else:
        findings.append(_check_expectation(steps, tokenizer))
    limit = student.context_limit
    needed = steps.recipe.prompts.max_tokens + steps.recipe.rollout.max_tokens
    if limit is not None and limit < needed and steps.recipe.rollout.from_ is None:
        text = (
            f"{limit:,} tokens, less than prompts.max_tokens + rollout.max_tokens = {needed:,}: some responses are cut"
        )
        findings.append(Finding("student", "context", "note", text, {"limit": limit}))
    return findings


def _check_expectation(steps: Steps, tokenizer: Any) -> Finding:
    """Say what kind of model it is, and whether the recipe asks it that way."""
    section = steps.recipe.prompts
    kind = expected_of(tokenizer)
    unused = kind != "base" and not section.chat and steps.recipe.rollout.from_ is None
    aside = ". The recipe gives it plain text instead (prompts.chat = false)" if unused else ""
    return Finding("student", "expects", "note" if unused else "ok", EXPECTS[kind] + aside, {"kind": kind})


def check_checkpoint(steps: Steps, about: str, checkpoint: Checkpoint, setting: Dtype) -> list[Finding]:
    """Check dtype and vocabulary padding of one checkpoint."""
    saved = str(checkpoint.dtype).removeprefix("torch.")
    used = str(checkpoint.compute_dtype(setting, choose_device(steps.recipe))).removeprefix("torch.")
    text = f"saved in {saved}, computed in {used}; the head's maths and what is stored are float32"
    dtype = Finding(about, "dtype", "note" if used == "float16" else "ok", text, {"saved": saved, "computed": used})
    return [dtype, _check_padding(about, checkpoint)]


def _check_padding(about: str, checkpoint: Checkpoint) -> Finding:
    vocabulary = checkpoint.vocabulary
    matrix = OutputMatrix.of(checkpoint.path) if checkpoint.is_here else None
    if checkpoint.is_here and matrix is None:
        return Finding(about, "vocabulary", "note", f"{vocabulary:,} tokens; the output matrix has a name unknown here")
    rows = checkpoint.config.get_text_config().vocab_size if matrix is None else matrix.rows
    figures = {"tokens": vocabulary, "rows": rows}
    padding = rows - vocabulary
    if padding < 0:
        text = f"{vocabulary:,} tokens but {rows:,} output rows: the tokenizer belongs to another checkpoint"
        return Finding(about, "vocabulary", "warning", text, figures)
    if padding == 0:
        return Finding(about, "vocabulary", "ok", f"{vocabulary:,} tokens, as many output rows", figures)
    text = f"{vocabulary:,} tokens, {rows:,} output rows: {padding:,} belong to no token and are left out"
    return Finding(about, "vocabulary", "ok", text, figures)
