"""What a pair does to length: of two responses to one prompt, does its shift prefer the longer?

A pair that learned brevity cannot be judged by right and wrong, only by length. One that prefers long responses, and
among responses of equal length no right ones, has nothing to teach: post and pre are probably swapped.

Ranked is the summed pull: r(a) - E[r] of every sampled token, the mean taken over what might have been sampled at the
temperature of the rollout. So its own mean is zero at every decision, whatever was said before, and it does not grow
with the length as the summed shift does (at temperature 1 log post/pre drifts downwards, however the pair was trained;
below that a pair that makes likely tokens likelier drifts upwards).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.checks.findings import Bounds, Finding, Level, percent
from lightning_weave.checks.sample import spread
from lightning_weave.checks.separation import CERTAIN, CHANCE, ROWS, Floats, judge_separation
from lightning_weave.config import Threshold
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps

COLDEST = 1e-3  # temperature: only the likeliest token is drawn
PREFERS = 0.65  # AUC of a pair that prefers right responses; one that may have it is not stopped


@dataclass(frozen=True)
class LengthPreference:
    """How often the longer of two responses to one prompt is preferred; 0.5 is none."""

    share: float
    error: float  # standard error of a pair to which length means nothing
    pairs: int


def judge_direction(steps: Steps, anchor: str) -> list[Finding]:
    """Judge a scored pair by right and wrong, and by length."""
    separation = judge_separation(steps, anchor)
    findings = (separation, judge_length(steps, anchor, separation))
    return [finding for finding in findings if finding is not None]


def judge_length(steps: Steps, anchor: str, separation: Finding | None) -> Finding | None:
    """Judge a scored pair by length; None where nothing is scored or no responses of a prompt differ in length."""
    pair = anchor_pair(steps, anchor)
    if any(stage.state() != "done" for stage in pair.stages):
        return None
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair])
    responses = steps.recipe.rollout.responses
    groups = []
    for prompt in spread(len(cache) // responses, max(ROWS // responses, 1)):
        block = cache.block(range(prompt * responses, (prompt + 1) * responses))
        groups.append((summed_pulls(block, steps.recipe.rollout.temperature), block.decisions_R.astype(float)))
    if responses == 1:  # of different prompts then: the summed pull has mean zero after each of them
        groups = [(np.concatenate([pull for pull, _ in groups]), np.concatenate([length for _, length in groups]))]
    preference = prefers_longer(groups)
    stops = steps.recipe.checks.longer_stop
    return judge_preference(f"anchors.{anchor}", preference, separation, stops) if preference.pairs else None


def judge_preference(about: str, preference: LengthPreference, separation: Finding | None, stops: Threshold) -> Finding:
    """Judge by both: longer responses are worth it only to a pair that prefers right ones among equally long ones."""
    verdict, words = _words(preference, separation, stops)
    text = (
        f"of two responses it prefers the longer in {percent(preference.share)} of cases "
        f"(± {100 * preference.error:.1f}, {preference.pairs:,} pairs){words}"
    )
    bounds = Bounds(False, stops, share=False)
    figures = {"share": preference.share, "error": preference.error, "pairs": preference.pairs}
    return Finding(about, "length", verdict, text, figures, judged=True, bounds=bounds)


def _words(preference: LengthPreference, separation: Finding | None, stops: Threshold) -> tuple[Level, str]:
    certain = preference.share > 0.5 + CERTAIN * preference.error
    figures = separation.figures if separation is not None else {}
    equal = figures.get("auc_at_equal_length", 0.5)
    margin = CHANCE * figures.get("equal_error", 0.5)
    if preference.share < 0.5 - CHANCE * preference.error:
        return "ok", ": it makes responses brief"
    if equal > 0.5 + margin:
        return "ok", ", and right ones among those of equal length"
    if equal + margin >= PREFERS:  # too few are known to be right or wrong
        words = ". If it was trained to be brief, post and pre are swapped"
        return ("warning", words) if certain else ("ok", "")
    if preference.share <= 0.5 + CHANCE * preference.error:
        return "ok", ""
    words = ", but no right ones among those of equal length. If it was trained to be brief, post and pre are swapped"
    return ("error" if certain and stops is not False and preference.share > stops else "warning"), words


def summed_pulls(block: Block, temperature: float) -> Floats:
    """Add up the pulls on the sampled tokens of each row where the pair is valid."""
    log_b_PO = np.column_stack([block.candidates.logp.flat, block.candidates.other_logp.flat]).astype(float)
    r_PC = np.where(block.valid_KP[0][:, None], block.r_KPC[0], 0.0)
    sampled_PC = block.candidates.ids.flat == block.sampled_P[:, None]
    pull_P = pulls(log_b_PO, r_PC, sampled_PC, temperature)
    before_P = np.concatenate([[0.0], np.cumsum(pull_P)])
    return np.asarray(np.diff(before_P[block.rollouts.response_ids.offsets]))


def pulls(log_b_PO: Floats, r_PC: Floats, sampled_PC: NDArray[np.bool_], temperature: float) -> Floats:
    """Subtract from the shift of each sampled token what was to be expected there; `other` has shift 0."""
    log_b_PO = log_b_PO / max(temperature, COLDEST)
    b_PO = np.exp(log_b_PO - log_b_PO.max(axis=1, keepdims=True, initial=-np.inf))
    b_PC = b_PO[:, :-1] / b_PO.sum(axis=1, keepdims=True)
    return np.asarray(np.where(sampled_PC, r_PC, 0.0).sum(axis=1) - (b_PC * r_PC).sum(axis=1))


def prefers_longer(groups: Sequence[tuple[Floats, Floats]]) -> LengthPreference:
    """Count pairs of one prompt's responses in which the longer has the larger score (Kendall's S, added over prompts).

    >>> found = prefers_longer([(np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 6.0]))])
    >>> found.share, round(found.error, 3), found.pairs
    (1.0, 0.408, 2)
    """
    wins = 0.0
    pairs = 0
    variance = 0.0
    for score_R, length_R in groups:
        one, other = np.triu_indices(len(score_R), 1)
        longer = np.sign(length_R[one] - length_R[other])
        wins += float((longer * np.sign(score_R[one] - score_R[other])).sum())
        pairs += int((longer != 0).sum())
        variance += _kendall_variance(length_R)
    return LengthPreference((wins / pairs + 1) / 2, variance**0.5 / pairs / 2, pairs) if pairs else _NONE


_NONE = LengthPreference(0.5, 0.5, 0)


def _kendall_variance(length_R: Floats) -> float:
    """The variance of Kendall's S where scores are in random order and lengths may be equal."""
    _, counts = np.unique(length_R, return_counts=True)
    sizes = np.array([len(length_R), *(-counts)])
    return float((sizes * (np.abs(sizes) - 1) * (2 * np.abs(sizes) + 5)).sum()) / 18
