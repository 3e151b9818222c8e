"""Checks of one pair: can its models follow the student's tokens to the end of a turn, and can its shift be trusted?"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Cache
from lightning_weave.cache.shifts import valid_positions
from lightning_weave.checks.direction import judge_direction
from lightning_weave.checks.findings import Bounds, Finding, Level, listed, percent, visible
from lightning_weave.checks.models import describe_checkpoint
from lightning_weave.checks.rules import rule_effects, suggestions
from lightning_weave.checks.sample import SAMPLE, STOP, CheckedRows, spread
from lightning_weave.models.scorer import ScoreRow
from lightning_weave.models.weights import untrained_special_tokens
from lightning_weave.run import ROLES, Role, Run
from lightning_weave.stages.alignment import Alignment, masked_aliases
from lightning_weave.stages.caches import anchor_pair
from lightning_weave.tokens import (
    TokenMap,
    atomic_share,
    same_tokenizer,
    suggest_alias,
    unmapped_added_tokens,
    unmapped_candidates,
)
from lightning_weave.types import Scores

FEW_SURVIVE = 0.5  # share of positions below which a pair teaches little for its cost
WANTS_BOS = ("gemma",)  # families whose models break without one
MASKED_SHARE = 0.05  # of finished rows, above which it is worth a warning
ENDS = 2048  # rows that are looked at
CERTAIN = 0.99  # probability of the likeliest candidate at a decision that is certain
COPIED = 0.9  # share of certain decisions above which a response is copied
ADDED = 0.1  # that the context must have added to the other side's share
FEW = 0.01  # share of decisions whose part of the shift is reported


def open_alignment(run: Run, anchor: str, role: Role, cached: bool) -> Alignment:
    """Align one side of an anchor with the student; without cached prompts, after the student's own."""
    scored = run.side(anchor, role)
    if not cached:
        scored = scored.without_own_prompts()
    masked: frozenset[int] = frozenset()
    if scored.untrained == "mask":
        masked = masked_aliases(scored, untrained_special_tokens(scored.checkpoint))
    return Alignment.open(run, scored, scored.checkpoint.context_limit, masked)


def find_same_model(run: Run, anchor: str, verdict: Level = "error") -> Iterator[Finding]:
    """Report a pair whose two sides are the same model in the same context."""
    if not run.has_shift(anchor):
        text = "post and pre are the same model, so its shift is zero everywhere"
        yield Finding(f"anchors.{anchor}", "checkpoints", verdict, text, judged=True)


class AlignedSample(NamedTuple):
    """A sample of rows as both sides of an anchor read it."""

    tokens: TokenMap
    rows: list[tuple[ScoreRow, ScoreRow]]  # post, pre
    mapped: list[NDArray[np.bool_]]  # of each row: the candidates that both sides have
    valid_P: NDArray[np.bool_]  # positions of all rows where the pair has a shift


@lru_cache  # for one preflight
def align_sample(run: Run, anchor: str, sample: CheckedRows) -> AlignedSample:
    """Let both sides of an anchor read a sample of rows."""
    post, pre = (open_alignment(run, anchor, role, sample.is_cached) for role in ROLES)
    rows = []
    for row in sample.rows:
        asked = row.prompt, row.prompt_ids, row.response_ids, row.candidate_ids_TC
        rows.append((post.align(*asked), pre.align(*asked)))
    mapped = [of_post.mapped_TC & of_pre.mapped_TC for of_post, of_pre in rows]
    validity = run.recipe.anchors[anchor].validity
    valid_P = np.concatenate([valid_positions(one, validity) for one in mapped] or [np.zeros(0, bool)])
    return AlignedSample(post.tokens, rows, mapped, valid_P)


def judge_positions(run: Run, anchor: str, sample: CheckedRows) -> Finding:
    """Judge the share of positions where a pair has a shift; without the student's candidates it is an upper bound."""
    about = f"anchors.{anchor}"
    valid_P = align_sample(run, anchor, sample).valid_P
    if not len(valid_P):
        return Finding(about, "positions", "note", f"not measured: {sample.description}")
    share = float(valid_P.mean())
    bounds = Bounds(*run.recipe.checks.levels("surviving", FEW_SURVIVE), below=True)
    verdict = bounds.judge(share, len(valid_P))
    most = "" if sample.kind == "candidates" else "at most "
    text = f"{most}{percent(share)} of {len(valid_P):,} positions survive ({sample.description})"
    if verdict == "error":
        text += ". The pair has nothing to teach: its tokenizer must be closer to the student's"
    elif verdict == "ok" and share < 1:
        verdict = "note"
    figures = {"share": share, "positions": len(valid_P), "measured_on": sample.kind}
    return Finding(about, "positions", verdict, text, figures, judged=True, bounds=bounds)


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
        other = "not the student's: contexts are projected, candidates mapped one to one"
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
        text = f"{len(texts):,} special tokens look untrained in the pre-anchor: {listed(map(visible, texts))}. "
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


def check_scored(run: Run, anchor: str) -> Iterator[Finding]:
    """Check the shift of a scored pair: none at all, stopping masked, swapped, or copied from a context."""
    if not run.has_shift(anchor):
        yield from find_same_model(run, anchor, "warning")
        return
    cache = Cache(run.stage("rollout"), run.stage("reference"), [anchor_pair(run, anchor)])
    ends = []
    for row in spread(len(cache), ENDS):
        block = cache.block([row])
        if block.rollouts.finish_R[0] == STOP and len(block.sampled_P):
            ends.append((block.sampled_P[-1], block.candidates.ids.flat[-1], block.mapped_KPC[0, -1]))
    yield judge_ends(run, anchor, ends)
    yield from judge_direction(run, anchor)
    yield from judge_leak(run, anchor)


@dataclass(frozen=True)
class SuggestedAlias:
    """Aliases with which an anchor can score the student's end of turn."""

    aliases: dict[str, str]  # its own, and the new one
    is_untrained: bool  # the row of the new one looks untrained in the pre-anchor, and the recipe has to keep it

    @property
    def toml(self) -> str:
        """The lines for the table of the anchor."""
        pairs = (" = ".join(json.dumps(text, ensure_ascii=False) for text in pair) for pair in self.aliases.items())
        return f"aliases = {{ {', '.join(pairs)} }}" + '\nuntrained = "keep"' * self.is_untrained

    def __str__(self) -> str:
        caution = "; but that row looks untrained in the pre-anchor, so its shift is arbitrary" * self.is_untrained
        return self.toml.replace("\n", " and ") + caution


def find_alias(run: Run, anchor: str, sampled: Sequence[int] = ()) -> SuggestedAlias | None:
    """Find an alias that supervises stopping: of the stop token that was sampled most, or of the tokenizer's own."""
    section = run.recipe.anchors[anchor]
    student = run.student.tokenizer
    other = run.anchor(anchor, "post").tokenizer
    aliased = {student.convert_tokens_to_ids(text) for text in section.aliases}
    new = suggest_alias(student, other, [id for id in _stops(run, sampled) if id not in aliased])
    if new is None or new[1] in section.aliases.values():
        return None
    untrained = section.untrained is None and other.eos_token_id in untrained_special_tokens(run.anchor(anchor, "pre"))
    return SuggestedAlias(section.aliases | dict([new]), untrained)


def _stops(run: Run, sampled: Sequence[int] = ()) -> list[int]:
    """The stop tokens, by how often they were sampled, then the tokenizer's own first."""
    drawn = Counter(sampled)
    end = run.student.tokenizer.eos_token_id
    return sorted(run.student.stop_ids, key=lambda id: (-drawn[id], id != end, id))


def judge_stops(run: Run, anchor: str) -> Finding:
    """Before anything is sampled: does the student's end of turn have a counterpart?"""
    about = f"anchors.{anchor}"
    student = run.student.tokenizer
    tokens = TokenMap.between(student, run.anchor(anchor, "post").tokenizer, run.recipe.anchors[anchor].aliases)
    stops = _stops(run)
    mapped = tokens.candidate_map(torch.tensor(stops))[1].tolist()
    alone = [visible(student.convert_ids_to_tokens(id)) for id, found in zip(stops, mapped, strict=True) if not found]
    if not alone:
        return Finding(about, "end of turn", "ok", "every stop token of the student has a counterpart")
    text = f"{listed(alone)} has no counterpart: decisions with it among the candidates are masked"
    alias = find_alias(run, anchor)
    if alias is None:
        return Finding(about, "end of turn", "note", text, {"stops": alone})
    text += f". To supervise stopping, add to [{about}]: {alias}"
    return Finding(about, "end of turn", "note" if mapped[0] else "warning", text, {"alias": alias.toml})


def judge_ends(run: Run, anchor: str, ends: Sequence[tuple[Any, NDArray, NDArray]]) -> Finding:
    """Report how many end-of-turn decisions a pair cannot supervise, what masks them, and the alias that helps.

    Of the last decision of each finished row: the sampled token, the candidates, and which of them the pair maps.
    """
    about = f"anchors.{anchor}"
    section = run.recipe.anchors[anchor]
    if not ends:
        text = "no sampled row ended with a stop token, so there is nothing to learn about stopping"
        return Finding(about, "end of turn", "note", text)
    sampled_R, ids_RC, mapped_RC = (np.array(column) for column in zip(*ends, strict=True))

    def is_masked(mapped_RC: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which decisions have no shift; candidate by candidate, the sampled one must have it."""
        if section.validity == "position":
            return ~valid_positions(mapped_RC, section.validity)
        return ~np.any(mapped_RC & (ids_RC == sampled_R[:, None]), axis=1)

    masked_R = is_masked(mapped_RC)
    share = float(masked_R.mean())
    figures: dict[str, Any] = {"masked": share, "finished": len(ends)}
    text = f"{percent(share)} of the end-of-turn decisions of {len(ends):,} finished rows are masked"
    bounds = Bounds(MASKED_SHARE, False)
    if share <= MASKED_SHARE:
        return Finding(about, "end of turn", "note" if share else "ok", text, figures, bounds=bounds)
    text += ": stopping is not supervised there"
    student = run.student.tokenizer
    other = run.anchor(anchor, "post").tokenizer
    aliases = section.aliases
    if alias := find_alias(run, anchor, sampled_R[masked_R].tolist()):
        aliases = alias.aliases
        aliased_RC = TokenMap.between(student, other, aliases).candidate_map(torch.from_numpy(ids_RC))[1].numpy()
        # Where not one candidate is mapped the context cannot be read, and no alias changes that.
        share = float((masked_R & is_masked(aliased_RC & mapped_RC.any(axis=1, keepdims=True))).mean())
        figures |= {"alias": alias.toml, "masked_with_alias": share}
        text += f". Add to [{about}]: {alias} (then {percent(share)} are masked)"
    if share > MASKED_SHARE:
        breaking = unmapped_candidates(TokenMap.between(student, other, aliases), torch.from_numpy(ids_RC[masked_R]))
        figures["breaking"] = [visible(token) for token, _ in breaking]
        if breaking:
            words = listed(f"'{token}'" for token in figures["breaking"])
            text += f'. These candidates mask them: {words}; validity = "candidate" would mask only them'
        else:
            text += '. An untrained = "mask", a context limit or a token without spelling masks them'
    return Finding(about, "end of turn", "warning", text, figures, bounds=bounds)


def judge_leak(run: Run, anchor: str) -> Iterator[Finding]:
    """Judge a scored anchor whose sides read different contexts: does one side copy from its context?"""
    if run.side(anchor, "post").context == run.side(anchor, "pre").context:
        return
    pair = anchor_pair(run, anchor)
    cache = Cache(run.stage("rollout"), run.stage("reference"), [pair])
    rows = spread(len(cache), SAMPLE)
    block = cache.block(rows)
    sampled_PC = (block.candidates.ids.flat == block.sampled_P[:, None]) & block.valid_KP[0][:, None]
    decided_P = block.decided_P  # a log has context among its responses
    size_P = np.abs(np.where(sampled_PC, block.r_KPC[0], 0)).sum(axis=1)[decided_P]
    nats = float(size_P.sum())
    few = float(np.sort(size_P)[::-1][: max(1, round(FEW * len(size_P)))].sum()) / (nats or 1.0)
    by_token: Counter[int] = Counter()
    for token, size in zip(block.sampled_P[decided_P].tolist(), size_P.tolist(), strict=True):
        by_token[token] += size
    certain = []  # share of decisions at which each side gives one candidate nearly everything
    for stage in pair.stages:
        scores = [stage.open(Scores, shard).read(at, at + 1) for shard, at in map(cache.rows.find, rows)]
        best = [np.where(one.mapped.flat, one.logp.flat, -np.inf).max(axis=1) for one in scores]
        certain.append(float((np.concatenate(best)[decided_P] >= np.log(CERTAIN)).mean()) if best else 0.0)
    is_copied = max(certain) >= COPIED and abs(certain[0] - certain[1]) >= ADDED
    decode = run.student.tokenizer.decode
    words = [f"'{visible(decode([id]))}' {percent(size / (nats or 1.0))}" for id, size in by_token.most_common(4)]
    text = (
        f"post is certain (99 %) at {percent(certain[0])} of decisions, pre at {percent(certain[1])}; of {nats:,.1f} "
        f"nats of shift on sampled tokens {percent(few)} are at one decision in a hundred, by token: {listed(words)}"
    )
    if is_copied:
        text += ". One side nearly copies its context, so its shift teaches that text. Put less into the context"
    figures = {"post": certain[0], "pre": certain[1], "nats": nats, "few": few}
    yield Finding(f"anchors.{anchor}", "leak", "warning" if is_copied else "note", text, figures)
