"""`lweave doctor`: check models, data and anchors of a recipe before any GPU time is spent."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.findings import Finding, Level, listed, percent, visible
from lightning_weave.checks.pairs import (
    FEW_SURVIVE,
    SAMPLE,
    CheckedRows,
    align_sample,
    judge_ends,
    judge_positions,
    spread,
    take_sample,
)
from lightning_weave.checks.preflight import check_disk, preflight
from lightning_weave.checks.shifts import check_scored, rule_effects, suggestions
from lightning_weave.checks.watch import check_results, check_rollouts
from lightning_weave.config import Dtype
from lightning_weave.errors import InputError, WeaveError, printable
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.weights import find_output_matrix, untrained_special_tokens
from lightning_weave.prompts import CHAT_MODES, detect_chat_mode
from lightning_weave.run import ROLES, Run
from lightning_weave.stages.caches import open_scored
from lightning_weave.stages.forecast import suggest_alpha
from lightning_weave.stages.work import choose_device
from lightning_weave.tokens import atomic_share, same_tokenizer, unmapped_added_tokens, unmapped_candidates

WANTS_BOS = ("gemma",)  # families whose models break without one
SECTIONS = ("student", "prompts", "rollout", "reference", "anchors", "compositions")  # then the rest
STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def run(run: Run, console: Console, as_json: bool = False) -> list[Finding]:
    """Check student, anchors, compositions and disk, and print one line for each finding."""
    findings = examine(run)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(findings, console)
    return findings


def examine(run: Run) -> list[Finding]:
    """Collect all findings. What stops `lweave run` is an error; everything else is still checked where possible."""
    before = preflight(run)
    broken = {finding.about for finding in before if finding.check == "checkpoint"}
    if "student" in broken:
        return before
    try:
        findings = list(describe_student(run))
    except InputError as error:
        return [*before, Finding("student", "checkpoint", "warning", str(error))]
    try:
        sample = take_sample(run)
    except InputError as error:
        sample = CheckedRows("nothing", [], str(error))
    if sample.kind == "nothing" and not any(finding.check == "prompts" for finding in before):
        findings.append(Finding("prompts", "prompts", "warning", sample.description))
    valid: dict[str, NDArray[np.bool_]] = {}
    for name in run.recipe.anchors:
        if not any(about.startswith(f"anchors.{name}.") for about in broken):
            try:
                findings += describe_pair(run, name, sample)
                valid[name] = align_sample(run, name, sample).valid_P
            except InputError as error:
                is_published = run.recipe.anchors[name].cache is not None  # its models are not needed
                verdict: Level = "note" if is_published else "warning"
                findings.append(Finding(f"anchors.{name}", "aliases", verdict, str(error)))
    findings += _check_compositions(run, sample, valid)
    if sample.is_cached:  # repeat the checks of complete stages
        findings += check_rollouts(run)
        with suppress(InputError):  # a model or benchmark is gone, which preflight has reported
            findings += check_results(run)
        findings.append(check_disk(run))
        if text := suggest_alpha(run):
            findings.append(Finding("compositions", "alpha", "note", text))
    # What a stage refuses comes first, and replaces what was found out about the same thing.
    stops = {(finding.about, finding.check) for finding in before if finding.verdict == "error"}
    findings = [finding for finding in findings if (finding.about, finding.check) not in stops]
    seen = {(finding.about, finding.check) for finding in findings if finding.check != "aliases"}
    return [*(finding for finding in before if (finding.about, finding.check) not in seen), *findings]


def _check_compositions(run: Run, sample: CheckedRows, valid: dict[str, NDArray[np.bool_]]) -> list[Finding]:
    """Report what is left where all anchors of a composition, or of one of its tags, must be valid."""
    findings = []
    scored: list[str] = []
    with suppress(WeaveError):  # what is gone or damaged is reported by its own check
        if cache := open_scored(run):
            block, scored = cache.block(spread(len(cache), SAMPLE)), cache.names
    for name, composition in run.recipe.written.items():
        used = {f"{name}.weights.{tag}": [one for one in by if by[one]] for tag, by in composition.by_tag.items()}
        for key, anchors in (used or {name: list(composition.used)}).items():
            if len(anchors) < 2:
                continue
            if is_scored := set(anchors) <= {*scored}:
                left_P = block.kept([one in anchors for one in scored])
            elif any(not len(valid.get(one, ())) or run.recipe.anchors[one].where for one in anchors):
                continue  # where an anchor is silent it masks nothing
            else:
                left_P = np.logical_and.reduce([valid[anchor] for anchor in anchors])
            share = float(left_P.mean())
            most = "" if is_scored or sample.kind == "candidates" else "at most "
            text = f"{most}{percent(share)} of positions survive in all of its {len(anchors)} anchors"
            verdict: Level = "warning" if share < FEW_SURVIVE else "ok" if share == 1 else "note"
            findings.append(Finding(f"compositions.{key}", "positions", verdict, text, {"share": share}))
    return findings


def show(findings: list[Finding], console: Console) -> None:
    """Print findings by what they concern, one line each: what has an error first, then in the order of a recipe."""
    wrong = {finding.about for finding in findings if finding.verdict == "error"}

    order = list(dict.fromkeys(".".join(finding.about.split(".")[:2]) for finding in findings))

    def place(about: str) -> tuple[bool, int, int, int]:
        section, *names = about.split(".")
        rank = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)
        return about not in wrong, rank, order.index(".".join([section, *names[:1]])), len(names)

    for about in sorted(dict.fromkeys(finding.about for finding in findings), key=place):
        console.print(Text(about, style="bold"))
        for finding in findings:
            if finding.about == about:
                # Tokens may look like markup or links: nothing in the text is to be interpreted.
                verdict = Text(f"  {finding.verdict:<8} ", style=STYLES[finding.verdict])
                text = Text(printable(f"{finding.check}: {finding.text}"), overflow="fold")
                if console.is_terminal:
                    line = Table.grid()
                    line.add_row(verdict, text)
                    console.print(line)
                else:
                    console.print(verdict.append_text(text), soft_wrap=True)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in STYLES}
    words = [f"{count} {verdict}{'s' * (count != 1 and verdict != 'ok')}" for verdict, count in counts.items()]
    console.print(", ".join(words))


def describe_student(run: Run) -> Iterator[Finding]:
    """Report the student's dtype, vocabulary, stop tokens, chat template and context."""
    student = run.student
    tokenizer = student.tokenizer
    recipe = run.recipe
    yield from describe_checkpoint(run, "student", student, recipe.engine_of("reference").dtype)
    stops = [visible(tokenizer.convert_ids_to_tokens(id) or f"<id {id}>") for id in sorted(student.stop_ids)]
    yield Finding(
        "student", "stop tokens", "ok" if stops else "warning", listed(stops) or "none: no response ever ends"
    )
    samples = recipe.rollout.from_ is None
    if samples and recipe.prompts.chat and not tokenizer.chat_template and recipe.prompts.format != "livecodebench":
        text = "missing: prompts cannot be rendered. Set prompts.chat = false for plain text"
        yield Finding("student", "chat template", "error", text)
    else:
        kind = detect_chat_mode(tokenizer)
        unused = kind != "base" and not recipe.prompts.chat and samples
        aside = ". The recipe prompts it with plain text (prompts.chat = false)" if unused else ""
        yield Finding("student", "expects", "note" if unused else "ok", CHAT_MODES[kind] + aside, {"kind": kind})
    limit = student.context_limit
    needed = recipe.prompts.max_tokens + recipe.rollout.max_tokens
    if limit is not None and limit < needed and samples:
        text = f"{limit:,} tokens, less than prompts.max_tokens + rollout.max_tokens = {needed:,}: some responses are "
        yield Finding("student", "context", "note", f"{text}cut off", {"limit": limit})


def describe_checkpoint(run: Run, about: str, checkpoint: Checkpoint, setting: Dtype) -> Iterator[Finding]:
    """Report the dtype and the padding of the vocabulary of one checkpoint."""
    saved = str(checkpoint.dtype).removeprefix("torch.")
    used = str(checkpoint.compute_dtype(setting, choose_device(run.recipe))).removeprefix("torch.")
    text = f"saved in {saved}, computed in {used}; logits and what is stored are float32"
    yield Finding(about, "dtype", "note" if used == "float16" else "ok", text, {"saved": saved, "computed": used})
    vocabulary = checkpoint.vocabulary
    matrix = find_output_matrix(checkpoint.path) if checkpoint.is_downloaded else None
    if checkpoint.is_downloaded and matrix is None:
        text = f"{vocabulary:,} tokens; the output matrix was not found by its name"
        yield Finding(about, "vocabulary", "note", text)
        return
    rows = checkpoint.config.get_text_config().vocab_size if matrix is None else matrix.shape[0]
    padding = rows - vocabulary
    text = f"{vocabulary:,} tokens, {rows:,} output rows"
    if padding < 0:
        text += ": the tokenizer belongs to another checkpoint"
    elif padding:
        text += f": {padding:,} belong to no token and are left out"
    yield Finding(about, "vocabulary", "warning" if padding < 0 else "ok", text, {"tokens": vocabulary, "rows": rows})


def describe_pair(run: Run, name: str, sample: CheckedRows) -> Iterator[Finding]:
    """Report on the tokens and weights of one pair, and if it is scored, on its shift."""
    section = run.recipe.anchors[name]
    about = f"anchors.{name}"
    post, pre = (run.anchor(name, role) for role in ROLES)
    for role, checkpoint in zip(ROLES, (post, pre), strict=True):
        yield from describe_checkpoint(run, f"{about}.{role}", checkpoint, run.recipe.engine_of("score").dtype)
    same = same_tokenizer(run.student.tokenizer, post.tokenizer)
    if not same_tokenizer(post.tokenizer, pre.tokenizer):
        text = "post and pre have different tokenizers: they see different prefixes, which the shift then includes"
        yield Finding(about, "tokenizer", "warning", text, {"same": False})
    else:
        other = "differs from the student's: contexts are projected, candidates mapped one to one"
        text = "the same as the student's" if same else other
        yield Finding(about, "tokenizer", "ok" if same else "note", text, {"same": same})
    tokens, rows, mapped, _ = align_sample(run, name, sample)
    share = atomic_share(tokens)
    text = f"{percent(share)} of the student's vocabulary is a single token of the anchor"
    yield Finding(about, "atomic", "ok" if share > FEW_SURVIVE else "note", text, {"share": share})
    yield judge_positions(run, name, sample)
    ids = [row.candidate_ids_TC for row in sample.rows]
    if ids and (breaking := unmapped_candidates(tokens, torch.from_numpy(np.concatenate(ids)))):
        text = "positions with each of these: "
        text += listed(f"'{visible(token)}' {count:,}" for token, count in breaking)
        yield Finding(about, "breaking tokens", "note", text, {"tokens": dict(breaking)})
    if alone := unmapped_added_tokens(tokens):
        text = f"without a counterpart: {listed(map(visible, alone))}"
        yield Finding(about, "special tokens", "note", text, {"tokens": alone})
    else:
        yield Finding(about, "special tokens", "ok", "every special or added token has a counterpart")

    tokenizer = post.tokenizer
    family = post.config.model_type
    bos = tokenizer.bos_token_id
    first = rows[0][0].ids[:1].tolist() if rows else []
    if section.bos or (bos is not None and first == [bos]):
        yield Finding(about, "bos", "ok", "the anchors' contexts begin with their BOS token")
    elif family.startswith(WANTS_BOS):
        text = f"{family} models break without a BOS token. Set bos = true in [{about}]"
        yield Finding(about, "bos", "warning", text, {"family": family})
    elif bos is not None and tokenizer("a")["input_ids"][:1] == [bos]:
        text = f"its tokenizer starts a text with {visible(tokenizer.bos_token)}, but contexts have none, as in the "
        text += f"paper. To add it: bos = true in [{about}]"
        yield Finding(about, "bos", "note", text, {"family": family})
    else:
        yield Finding(about, "bos", "ok", "none needed")

    if not pre.is_downloaded:
        text = f"not checked: the pre-anchor's weights are still on the hub. To fetch them: hf download {pre.name}"
        yield Finding(about, "untrained rows", "note", text)
    elif untrained := untrained_special_tokens(pre):
        texts = [pre.tokenizer.convert_ids_to_tokens(id) for id in sorted(untrained)]
        touched = [
            (np.isin(of_pre.candidate_ids_TC, list(untrained)) & both).any(axis=1)
            for (_, of_pre), both in zip(rows, mapped, strict=True)
        ]
        share = float(np.concatenate(touched).mean()) if touched else 0.0
        text = f"special tokens that pre seems never to have trained: {listed(map(visible, texts))}. "
        text += f"{percent(share)} of positions have one among their candidates, where its shift is arbitrary"
        figures = {"tokens": texts, "share": share}
        yield Finding(about, "untrained rows", "warning" if share else "note", text, figures)
    else:
        yield Finding(about, "untrained rows", "ok", "no special token of the pre-anchor looks untrained")

    if sample.kind == "candidates" and all(stage.complete for stage in run.scores_of(name)):
        yield from check_scored(run, name)
        cached = spread(run.stage("reference").require()["rows"], SAMPLE)
        effects = rule_effects(run, name, cached)
        yield from (Finding(about, one.rule, "note", str(one), one.figures) for one in effects)
        if not effects and (values := suggestions(run, name, cached)):
            text = f"no rule limits its shift. shift.clip = {values['clip']:g} would change one position in 1,000, "
            text += f"shift.mass_floor = {values['mass_floor']:g} one in 100, "
            text += f"shift.only_above = {values['only_above']:g} half of them"
            yield Finding(about, "rules", "ok", text, values)
    elif sample.kind == "candidates":
        finished = [(row, both[-1]) for row, both in zip(sample.rows, mapped, strict=True) if row.finished]
        ends = [(row.response_ids[-1], row.candidate_ids_TC[-1], last) for row, last in finished]
        yield judge_ends(run, name, ends)
