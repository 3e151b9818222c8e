"""What doctor asks of a pair: can its anchors follow the student's tokens, and are their shifts to be trusted?"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.sources import valid_positions
from lightning_weave.checks.end_of_turn import Ends, judge_ends, judge_stops, warn_if_masked
from lightning_weave.checks.findings import Finding, Level, listed, percent, visible
from lightning_weave.checks.leaks import judge_leak
from lightning_weave.checks.length import judge_direction
from lightning_weave.checks.models import check_checkpoint
from lightning_weave.checks.sample import ROWS, CheckedRow, CheckedRows, spread
from lightning_weave.config import Anchor
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.untrained import untrained_specials
from lightning_weave.runs.alignment import Alignment
from lightning_weave.runs.hygiene import rule_effects, suggestions
from lightning_weave.runs.scored import ROLES, Role
from lightning_weave.runs.steps import Steps
from lightning_weave.tokens import TokenMap, added_without_counterpart, atomic_share, breaking_tokens, same_tokenizer

FEW_SURVIVE = 0.5  # share of positions below which a pair teaches little for its cost
WANTS_BOS = ("gemma",)  # families whose models break without one


@dataclass(frozen=True)
class PairSample:
    """The sample as both models of a pair read it."""

    alignments: tuple[Alignment, Alignment]  # post, pre
    mapped: list[NDArray[np.bool_]]  # (T, C) of each row: mapped by both
    first_ids: tuple[int, ...]  # how the first context begins for the post-anchor

    @classmethod
    def of(cls, steps: Steps, name: str, sample: CheckedRows) -> "PairSample":
        """Align a sample with both models."""
        post, pre = (open_alignment(steps, name, role, sample.kind in ("candidates", "rollouts")) for role in ROLES)
        alignments = [(_align(post, row), _align(pre, row)) for row in sample.rows]
        first = tuple(alignments[0][0].ids[:1].tolist()) if alignments else ()
        return cls((post, pre), [one.mapped_TC & other.mapped_TC for one, other in alignments], first)

    def valid(self, validity: str) -> NDArray[np.bool_]:
        """Say at which positions of the sample the pair has a shift."""
        rows = [valid_positions(mapped, validity) for mapped in self.mapped]
        return np.concatenate(rows) if rows else np.zeros(0, bool)


def check_pair(steps: Steps, name: str, sample: CheckedRows) -> tuple[list[Finding], NDArray[np.bool_]]:
    """Check one pair; returns also where it is valid in the sample."""
    section = steps.recipe.anchors[name]
    about = f"anchors.{name}"
    post, pre = (steps.anchor(name, role) for role in ROLES)
    pair = PairSample.of(steps, name, sample)
    tokens = pair.alignments[0].tokens
    findings = [_check_tokenizers(steps, about, post, pre)]
    if not steps.has_shift(name):
        text = "post and pre are the same checkpoint in the same context: every shift is zero"
        findings.append(Finding(about, "checkpoints", "error", text, judged=True))
    for role, checkpoint in zip(ROLES, (post, pre), strict=True):
        findings += check_checkpoint(steps, f"{about}.{role}", checkpoint, steps.recipe.score.dtype)
    share = atomic_share(tokens)
    text = f"{percent(share)} of the student's vocabulary is a single token of the anchor"
    findings.append(Finding(about, "atomic", "ok" if share > FEW_SURVIVE else "note", text, {"share": share}))
    valid = pair.valid(section.validity)
    findings += _check_survival(about, sample, valid, tokens)
    findings += _check_specials(about, tokens)
    findings.append(_check_bos(about, section, pair, post))
    findings += _check_untrained(about, pair, sample, pre)
    if section.prompt == "native":
        findings.append(_check_template(about, post.tokenizer))
    findings.append(_check_end_of_turn(steps, name, sample, pair))
    if sample.kind == "candidates":
        findings += [*judge_direction(steps, name), *_check_rules(steps, name)]
    if leak := judge_leak(steps, name) if sample.kind == "candidates" else None:
        findings.append(leak)
    return findings, valid


def open_alignment(steps: Steps, anchor: str, role: Role, cached: bool) -> Alignment:
    scored = steps.side(anchor, role)
    if not cached:  # then no prompts.jsonl need be there to be rendered
        scored = scored.without_own_prompts()
    checkpoint = scored.checkpoint
    masked: frozenset[int] = frozenset()
    if scored.untrained == "mask":
        targets = {checkpoint.tokenizer.convert_tokens_to_ids(to) for _, to in scored.aliases}
        masked = frozenset(untrained_specials(checkpoint)) & targets
    return Alignment.open(steps, scored, checkpoint.context_limit, masked)


def _align(alignment: Alignment, row: CheckedRow) -> Any:
    return alignment.align(row.prompt, row.prompt_ids, row.response_ids, row.candidate_ids_TC)


def _check_tokenizers(steps: Steps, about: str, post: Checkpoint, pre: Checkpoint) -> Finding:
    if not same_tokenizer(post.tokenizer, pre.tokenizer):
        text = "post and pre have different tokenizers: they see different prefixes, which the shift then includes"
        return Finding(about, "tokenizer", "warning", text, {"same": False})
    same = same_tokenizer(steps.student.tokenizer, post.tokenizer)
    text = (
        "the same as the student's"
        if same
        else "not the student's: contexts are projected, candidates mapped one to one"
    )
    return Finding(about, "tokenizer", "ok" if same else "note", text, {"same": same})


def _check_survival(about: str, sample: CheckedRows, valid: NDArray[np.bool_], tokens: TokenMap) -> list[Finding]:
    if not len(valid):
        return [Finding(about, "positions", "note", f"not measured: {sample.description}")]
    share = float(valid.mean())
    figures = {"share": share, "positions": len(valid), "measured_on": sample.kind}
    most = "" if sample.kind == "candidates" else "at most "
    text = f"{most}{percent(share)} of {len(valid):,} positions survive ({sample.description})"
    verdict: Level = "warning" if share < FEW_SURVIVE else "ok" if share == 1 else "note"
    findings = [Finding(about, "positions", verdict, text, figures)]
    ids_TC = torch.from_numpy(np.concatenate([row.candidate_ids_TC for row in sample.rows]))
    breaking = breaking_tokens(tokens, ids_TC)
    if breaking:
        words = [f"'{visible(text)}' {count:,}" for text, count in breaking]
        text = f"positions that each of these touches: {listed(words)}"
        findings.append(Finding(about, "breaking tokens", "note", text, {"tokens": dict(breaking)}))
    return findings


def _check_specials(about: str, tokens: TokenMap) -> list[Finding]:
    alone = added_without_counterpart(tokens)
    if not alone:
        return [Finding(about, "special tokens", "ok", "every special or added token has a counterpart")]
    text = f"without a counterpart: {listed(map(visible, alone))}"
    return [Finding(about, "special tokens", "note", text, {"tokens": alone})]


def _check_bos(about: str, section: Anchor, pair: PairSample, post: Checkpoint) -> Finding:
    tokenizer = post.tokenizer
    bos = tokenizer.bos_token_id
    family = post.config.model_type
    if section.bos or (bos is not None and pair.first_ids[:1] == (bos,)):
        return Finding(about, "bos", "ok", "the anchors' contexts begin with their beginning-of-sequence token")
    if family.startswith(WANTS_BOS):
        text = f"{family} models break without a beginning-of-sequence token. Set bos = true in [{about}]"
        return Finding(about, "bos", "warning", text, {"family": family})
    if bos is not None and tokenizer("a")["input_ids"][:1] == [bos]:
        text = f"its tokenizer begins a text with {visible(tokenizer.bos_token)}; contexts have none, as in the paper, "
        text += f"unless [{about}] says bos = true"
        return Finding(about, "bos", "note", text, {"family": family})
    return Finding(about, "bos", "ok", "none needed")


def _check_untrained(about: str, pair: PairSample, sample: CheckedRows, pre: Checkpoint) -> list[Finding]:
    """Report rows of the pre-anchor that look untrained, and how often a candidate is scored by one."""
    if not pre.is_here:
        text = "not looked at: the pre-anchor's weights are still on the hub. To fetch them: hf download " + pre.name
        return [Finding(about, "untrained rows", "note", text)]
    untrained = untrained_specials(pre)
    if not untrained:
        return [Finding(about, "untrained rows", "ok", "no special token of the pre-anchor looks untrained")]
    texts = [pre.tokenizer.convert_ids_to_tokens(id) for id in sorted(untrained)]
    touched = [
        np.isin(_align(pair.alignments[1], row).candidate_ids_TC, list(untrained)) & mapped
        for row, mapped in zip(sample.rows, pair.mapped, strict=True)
    ]
    share = float(np.concatenate([row.any(axis=1) for row in touched]).mean()) if touched else 0.0
    text = f"{len(texts):,} special tokens look untrained in the pre-anchor: {listed(map(visible, texts))}. "
    text += f"{percent(share)} of positions have one among their candidates, where its shift is arbitrary"
    return [Finding(about, "untrained rows", "warning" if share else "note", text, {"tokens": texts, "share": share})]


def _check_rules(steps: Steps, name: str) -> list[Finding]:
    """Say what the rules of an anchor's shift change; without any, which values would change little."""
    if any(steps.store.stage(step).state() != "done" for step in steps.scores_of(name)):
        return []
    rows = spread(steps.store.stage(steps.reference).require()["rows"], ROWS)
    effects = rule_effects(steps, name, rows)
    if effects:
        return [Finding(f"anchors.{name}", one.rule, "note", str(one), asdict(one)) for one in effects]
    values = suggestions(steps, name, rows)
    if not values:
        return []
    text = (
        f"no rule cuts its shift. shift_clip = {values['shift_clip']:g} would touch one position in 1,000, "
        f"mass_floor = {values['mass_floor']:g} one in 100, only_above = {values['only_above']:g} half of them"
    )
    return [Finding(f"anchors.{name}", "rules", "ok", text, values)]


def _check_template(about: str, tokenizer: Any) -> Finding:
    if tokenizer.chat_template:
        return Finding(about, "chat template", "ok", "the post-anchor's, for both models")
    return Finding(about, "chat template", "error", 'missing, but prompt = "native" needs one. Use prompt = "student"')


def _check_end_of_turn(steps: Steps, name: str, sample: CheckedRows, pair: PairSample) -> Finding:
    if sample.kind != "candidates":
        return judge_stops(steps, name)
    return warn_if_masked(steps, name) or judge_ends(steps, name, _sampled_ends(steps, name, sample, pair))


def _sampled_ends(steps: Steps, name: str, sample: CheckedRows, pair: PairSample) -> Ends:
    """Take the ends of the sample's finished rows, before anything is scored."""
    rows = [(row, mapped) for row, mapped in zip(sample.rows, pair.mapped, strict=True) if row.finished]
    sampled = [int(row.response_ids[-1]) for row, _ in rows]
    ids = [row.candidate_ids_TC[-1] for row, _ in rows]
    maps = [mapped[-1] for _, mapped in rows]
    return Ends.of(sampled, ids, maps, steps.recipe.reference.candidates)
