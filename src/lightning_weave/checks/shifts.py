"""Checks of a scored pair: does its shift teach what it should, and what do its rules change?

Which responses does the shift of a pair prefer: right ones, or long ones? Post and pre may be swapped. A pair that
learned brevity cannot be judged by right and wrong, only by length. One that prefers long responses, and among
responses of equal length no right ones, has nothing to teach.

For length the summed pull is ranked: r(a) - E[r] of every sampled token, the mean taken over what might have been
sampled at the temperature of the rollout. Its mean is zero at every decision, so it does not grow with the length as
the summed shift does (at temperature 1 log post/pre drifts downwards, however the pair was trained; below that a pair
that makes likely tokens likelier drifts upwards).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu, spearmanr

from lightning_weave.cache.block import Block, Cache, compute_targets
from lightning_weave.cache.shifts import PairSource, ShiftRules, entropy
from lightning_weave.checks.findings import Bounds, Finding, Level, listed, percent, visible
from lightning_weave.checks.pairs import SAMPLE, STOP, find_same_model, judge_ends, spread
from lightning_weave.config import ALPHA, Threshold
from lightning_weave.grading.graders import grade_rollout
from lightning_weave.maths import expected_kl
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair
from lightning_weave.types import Scores

ROWS = 1024
CHANCE = 2.0  # standard errors from one half that are still chance
CERTAIN = 4.0  # standard errors from one half that stop a run
LONGER = 0.6  # share of cases in which a pair that prefers the longer response stops a run
PREFERS = 0.65  # AUC of a pair that prefers right responses; one that may have it is not stopped
STRATA = 10  # of length
COLDEST = 1e-3  # temperature at which only the likeliest token is drawn
ENDS = 2048  # rows that are looked at
CONFIDENT = 0.99  # probability of the likeliest candidate at a decision that is certain
COPIED = 0.9  # share of certain decisions above which a response is copied
ADDED = 0.1  # that the context must have added to the other side's share
TOP = 0.01  # share of decisions whose part of the shift is reported
RARE = 0.001  # share of positions that a suggested clip touches
FEW = 0.01  # share of positions that a suggested floor masks
Floats = NDArray[np.float64]


def check_scored(run: Run, anchor: str) -> Iterator[Finding]:
    """Check the shift of a scored pair: none at all, stopping masked, swapped, or copied from a context."""
    if not run.has_shift(anchor):
        yield from find_same_model(run, anchor, "warning")
        return
    cache = _everywhere(run, anchor)
    ends = []
    for row in spread(len(cache), ENDS):
        block = cache.block([row])
        if block.rollouts.finish_R[0] == STOP and len(block.sampled_P):
            ends.append((block.sampled_P[-1], block.candidates.ids.flat[-1], block.mapped_KPC[0, -1]))
    yield judge_ends(run, anchor, ends)
    yield from judge_direction(run, anchor)
    yield from judge_leak(run, anchor)


@dataclass(frozen=True)
class GradedShifts:
    """Responses with a pair's summed shift, their length and whether they are right."""

    shift_R: Floats
    length_R: Floats
    right_R: NDArray[np.bool_]


@dataclass(frozen=True)
class LengthPreference:
    """How often the longer of two responses to one prompt is preferred; 0.5: no preference."""

    share: float
    error: float  # standard error for a pair without a preference
    pairs: int


def judge_direction(run: Run, anchor: str) -> list[Finding]:
    """Judge a scored pair by right and wrong, and by length, where there is something to compare."""
    about = f"anchors.{anchor}"
    swapped = run.recipe.checks.swapped
    cache = _everywhere(run, anchor)
    findings = []
    equal = 0.5, 0.5
    if (graded := _grade(run, cache)) is not None:
        equal = auc_at_equal_length(graded)
        findings.append(judge_separation(about, graded, equal, swapped))
    section = run.recipe.rollout
    groups = []
    for prompt in spread(len(cache) // section.responses, max(ROWS // section.responses, 1)):
        block = cache.block(range(prompt * section.responses, (prompt + 1) * section.responses))
        log_b_PO = np.column_stack([block.candidates.logp.flat, block.candidates.other_logp.flat]).astype(float)
        r_PC = np.where(block.valid_KP[0][:, None], block.r_KPC[0], 0.0)
        pull_P = pulls(log_b_PO, r_PC, block.candidates.ids.flat == block.sampled_P[:, None], section.temperature)
        before_P = np.concatenate([[0.0], np.cumsum(pull_P)])
        groups.append((np.diff(before_P[block.rollouts.response_ids.offsets]), block.decisions_R.astype(float)))
    if section.responses == 1:  # compare those of different prompts: the summed pull has mean zero after each of them
        groups = [(np.concatenate([pull for pull, _ in groups]), np.concatenate([length for _, length in groups]))]
    preference = prefers_longer(groups)
    if preference.pairs:
        findings.append(judge_preference(about, preference, equal, LONGER if swapped is not False else False))
    return findings


def _everywhere(run: Run, anchor: str) -> Cache:
    """Open the scores of a pair as if it spoke everywhere: silence that the recipe asks for is no fault of the pair."""
    pair = anchor_pair(run, anchor)
    everywhere = replace(pair, rules=replace(pair.rules, where=None))
    return Cache(run.stage("rollout"), run.stage("reference"), [everywhere])


def _grade(run: Run, cache: Cache) -> GradedShifts | None:
    """Grade up to 1024 responses whose answer is known, with the pair's shift summed over their tokens."""
    prompts = read_prompts(run.prompts_file)
    tokenizer = run.student.tokenizer
    rows = []
    for number in spread(len(cache), ROWS):
        answer = prompts[number // run.recipe.rollout.responses].answer
        if answer is not None:
            block = cache.block([number])
            sampled_PC = (block.candidates.ids.flat == block.sampled_P[:, None]) & block.valid_KP[0][:, None]
            text = tokenizer.decode(block.sampled_P.tolist(), skip_special_tokens=True)
            right = grade_rollout(run.grading[0], text, answer)[1]
            rows.append((float(block.r_KPC[0][sampled_PC].sum()), len(block.sampled_P), right))
    if not rows:
        return None
    shift, length, right_ = zip(*rows, strict=True)
    return GradedShifts(np.array(shift, float), np.array(length, float), np.array(right_, bool))


def judge_separation(about: str, graded: GradedShifts, at_equal: tuple[float, float], stops: Threshold) -> Finding:
    """Judge by both areas: one that is low only because wrong responses are short is that of a brevity pair."""
    right = int(graded.right_R.sum())
    wrong = int((~graded.right_R).sum())
    varies = np.ptp(graded.shift_R) > 0 and np.ptp(graded.length_R) > 0
    by_length = float(spearmanr(graded.shift_R, graded.length_R).statistic) if varies else 0.0
    figures = {"right": right, "wrong": wrong, "length_correlation": by_length}
    length = f"rank correlation with length {by_length:+.2f}"
    if not right or not wrong:
        text = (
            f"all {right + wrong:,} graded responses are {'right' if right else 'wrong'}: nothing to separate; {length}"
        )
        return Finding(about, "separation", "note", text, figures)
    auc = area_under_curve(graded.shift_R, graded.right_R)
    error = float(np.sqrt((right + wrong + 1) / (12 * right * wrong)))  # of scores that carry no information
    equal, equal_error = at_equal
    figures |= {"auc": auc, "auc_error": error, "auc_at_equal_length": equal, "equal_error": equal_error}
    verdict: Level
    if abs(auc - 0.5) <= CHANCE * error:
        verdict, words = "note", "does not separate right from wrong"
    elif auc > 0.5:
        verdict, words = "ok", "prefers right ones"
    elif equal >= 0.5 - CHANCE * equal_error:
        verdict, words = "note", "prefers short ones, and wrong ones only where they are shorter"
    else:
        certain = stops is not False and equal < min(stops, 0.5 - CERTAIN * equal_error)
        verdict, words = "error" if certain else "warning", "prefers wrong ones, at equal length too"
    text = f"the summed shift {words}: AUC {auc:.2f} ± {error:.2f} over {right:,} right and {wrong:,} wrong, "
    text += f"{equal:.2f} ± {equal_error:.2f} at equal length; {length}"
    if verdict in ("warning", "error"):
        text += ". Are post and pre swapped?"
    bounds = Bounds(False, stops, below=True, share=False)
    return Finding(about, "separation", verdict, text, figures, judged=True, bounds=bounds)


def area_under_curve(scores_R: Floats, right_R: NDArray[np.bool_]) -> float:
    """The chance that a right response scores above a wrong one; ties count half.

    >>> area_under_curve(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    0.875
    """
    wins = mannwhitneyu(scores_R[right_R], scores_R[~right_R], method="asymptotic").statistic
    return float(wins / (right_R.sum() * (~right_R).sum()))


def auc_at_equal_length(graded: GradedShifts) -> tuple[float, float]:
    """The area under the curve within tenths of length, and its standard error: does length explain it?"""
    edges = np.unique(np.quantile(graded.length_R, np.linspace(0, 1, STRATA + 1)[1:-1]))
    stratum_R = np.searchsorted(edges, graded.length_R)
    wins = variance = 0.0
    pairs = 0
    for stratum in np.unique(stratum_R):
        right_R = graded.right_R[stratum_R == stratum]
        both = int(right_R.sum()) * int((~right_R).sum())
        if both:
            wins += both * area_under_curve(graded.shift_R[stratum_R == stratum], right_R)
            pairs += both
            variance += both * (len(right_R) + 1) / 12
    return (wins / pairs, float(np.sqrt(variance)) / pairs) if pairs else (0.5, 0.5)


def judge_preference(
    about: str, preference: LengthPreference, at_equal: tuple[float, float], stops: Threshold
) -> Finding:
    """Judge by both: long responses are worth it only to a pair that prefers right ones among those of equal length."""
    certain = preference.share > 0.5 + CERTAIN * preference.error
    equal, margin = at_equal[0], CHANCE * at_equal[1]
    swapped = "If it was trained to be brief, post and pre are swapped"
    verdict: Level = "ok"
    words = ""
    if preference.share < 0.5 - CHANCE * preference.error:
        words = ": it makes responses brief"
    elif equal > 0.5 + margin:
        words = ", and right ones among those of equal length"
    elif equal + margin >= PREFERS:  # too few are known to be right or wrong
        if certain:
            verdict, words = "warning", f". {swapped}"
    elif preference.share > 0.5 + CHANCE * preference.error:
        verdict = "error" if certain and stops is not False and preference.share > stops else "warning"
        words = f", but no right ones among those of equal length. {swapped}"
    text = f"of two responses it prefers the longer in {percent(preference.share)} of cases "
    text += f"(± {100 * preference.error:.1f}, {preference.pairs:,} pairs){words}"
    figures = {"share": preference.share, "error": preference.error, "pairs": preference.pairs}
    bounds = Bounds(False, stops, share=False)
    return Finding(about, "length", verdict, text, figures, judged=True, bounds=bounds)


def pulls(log_b_PO: Floats, r_PC: Floats, sampled_PC: NDArray[np.bool_], temperature: float) -> Floats:
    """Subtract from the shift of each sampled token its expectation there; `other` has shift 0."""
    log_b_PO = log_b_PO / max(temperature, COLDEST)
    b_PO = np.exp(log_b_PO - log_b_PO.max(axis=1, keepdims=True, initial=-np.inf))
    b_PC = b_PO[:, :-1] / b_PO.sum(axis=1, keepdims=True)
    return np.asarray(np.where(sampled_PC, r_PC, 0.0).sum(axis=1) - (b_PC * r_PC).sum(axis=1))


def prefers_longer(groups: Sequence[tuple[Floats, Floats]]) -> LengthPreference:
    """Count pairs of one prompt's responses in which the longer has the larger score (Kendall's S over all prompts).

    The error is that of scores in random order, with ties of length.

    >>> found = prefers_longer([(np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 6.0]))])
    >>> found.share, round(found.error, 3), found.pairs
    (1.0, 0.408, 2)
    """
    wins = variance = 0.0
    pairs = 0
    for score_R, length_R in groups:
        one, other = np.triu_indices(len(score_R), 1)
        longer = np.sign(length_R[one] - length_R[other])
        wins += float((longer * np.sign(score_R[one] - score_R[other])).sum())
        pairs += int((longer != 0).sum())
        _, counts = np.unique(length_R, return_counts=True)
        sizes = np.array([len(length_R), *(-counts)])
        variance += float((sizes * (np.abs(sizes) - 1) * (2 * np.abs(sizes) + 5)).sum()) / 18
    if not pairs:
        return LengthPreference(0.5, 0.5, 0)
    return LengthPreference((wins / pairs + 1) / 2, variance**0.5 / pairs / 2, pairs)


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
    few = float(np.sort(size_P)[::-1][: max(1, round(TOP * len(size_P)))].sum()) / (nats or 1.0)
    by_token: Counter[int] = Counter()
    for token, size in zip(block.sampled_P[decided_P].tolist(), size_P.tolist(), strict=True):
        by_token[token] += size
    certain = []  # share of decisions at which each side gives one candidate nearly everything
    for stage in pair.stages:
        scores = [stage.open(Scores, shard).read(at, at + 1) for shard, at in map(cache.rows.find, rows)]
        best = [np.where(one.mapped.flat, one.logp.flat, -np.inf).max(axis=1) for one in scores]
        certain.append(float((np.concatenate(best)[decided_P] >= np.log(CONFIDENT)).mean()) if best else 0.0)
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


@dataclass(frozen=True)
class Effect:
    """What one rule changes by itself, of the anchor alone at weight 1 and the paper's alpha."""

    rule: str
    value: Any
    positions: float  # share of the positions that were valid without it
    decisions: int  # that the anchor has without it
    left: int  # of these
    kl_before: float  # KL(target || behaviour), nats per position
    kl_after: float
    changed_P: NDArray[np.bool_] = field(repr=False)  # decisions that it changes

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers, for a finding."""
        return {name: value for name, value in vars(self).items() if name != "changed_P"} | {"value": str(self.value)}

    @property
    def name(self) -> str:
        """The rule as it is written."""
        return f"{self.rule} = {self.value:g}" if isinstance(self.value, float) else f"{self.rule} = {self.value}"

    def __str__(self) -> str:
        return (
            f"{self.name} changes {100 * self.positions:.2f} % of positions and keeps {self.left:,} of "
            f"{self.decisions:,}, and the KL that the anchor asks for goes from {self.kl_before:.4f} to "
            f"{self.kl_after:.4f} nats"
        )


def rule_effects(run: Run, anchor: str, rows: Sequence[int]) -> list[Effect]:
    """Measure every rule that an anchor has on some rows of its scored cache."""
    pair = anchor_pair(run, anchor)
    if not pair.rules.active:
        return []
    without = _block(run, pair, rows)
    valid_P = without.valid_KP[0]
    effects = []
    for rule, value in pair.rules.active.items():
        ruled = _block(run, pair, rows, **{rule: value})
        same_P = (without.r_KPC[0] == ruled.r_KPC[0]).all(axis=1) & (valid_P == ruled.valid_KP[0])
        share = float((~same_P)[valid_P].mean()) if valid_P.any() else 0.0
        left = int(ruled.kept([1.0]).sum())
        kl = _kl(without, without), _kl(ruled, without)
        effects.append(Effect(rule, value, share, int(valid_P.sum()), left, *kl, ~same_P))
    return effects


def suggestions(run: Run, anchor: str, rows: Sequence[int]) -> dict[str, float]:
    """Name values that would touch few positions of an anchor: a clip, a floor of mass, a floor of entropy."""
    pair = anchor_pair(run, anchor)
    block = _block(run, pair, rows)
    valid_P = block.valid_KP[0]
    if not valid_P.any():
        return {}
    index = Cache(run.stage("rollout"), run.stage("reference")).rows
    scores = [
        [stage.open(Scores, shard).read(at, at + 1) for shard, at in map(index.find, rows)] for stage in pair.stages
    ]
    post_P, pre_P = (np.concatenate([each.mass.flat for each in side]) for side in scores)
    quantiles = {
        "clip": np.quantile(np.abs(block.r_KPC[0]).max(axis=1)[valid_P], 1 - RARE),
        "mass_floor": np.quantile(np.minimum(post_P, pre_P)[valid_P], FEW),
        "only_above": np.quantile(entropy(block.candidates)[valid_P], 0.5),
    }
    return {rule: float(f"{value:.2g}") for rule, value in quantiles.items()}


def _block(run: Run, pair: PairSource, rows: Sequence[int], **rules: Any) -> Block:
    """Read rows of one anchor by these rules alone."""
    alone = replace(pair, rules=ShiftRules(pair.rules.validity, **rules))
    return Cache(run.stage("rollout"), run.stage("reference"), [alone]).block(rows)


def _kl(block: Block, among: Block) -> float:
    """Mean KL(target || behaviour) over the positions that `among` has; a masked one asks for nothing."""
    targets = compute_targets(block, [1.0], ALPHA)
    kl_P = expected_kl(torch.from_numpy(targets.log_q_PO), torch.from_numpy(targets.log_b_PO)).numpy()
    counted_P = among.valid_KP[0]
    return float(np.where(targets.valid_P, kl_P, 0.0)[counted_P].mean()) if counted_P.any() else 0.0
