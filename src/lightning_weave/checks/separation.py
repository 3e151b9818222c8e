"""The cheapest test of a pair before training: does its shift prefer right responses, or only short ones?"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.checks.findings import Bounds, Finding, Level
from lightning_weave.checks.sample import spread
from lightning_weave.config import Threshold
from lightning_weave.grading.graders import grade_rollout
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps

ROWS = 1024
CHANCE = 2.0  # standard errors from one half that are still chance
CERTAIN = 4.0  # standard errors below one half that stop a run
STRATA = 10  # of length
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GradedShifts:
    """Responses with a pair's summed shift, their length and whether they are right."""

    shift_R: Floats
    length_R: Floats
    right_R: NDArray[np.bool_]


def judge_separation(steps: Steps, anchor: str) -> Finding | None:
    """Judge a scored pair by how its summed shift ranks graded responses; None where nothing is scored or graded."""
    pair = anchor_pair(steps, anchor)
    if any(stage.state() != "done" for stage in pair.stages):
        return None
    graded = _grade(steps, Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair]))
    return None if graded is None else _judge(f"anchors.{anchor}", graded, steps.recipe.checks.separation_stop)


def _judge(about: str, graded: GradedShifts, stops: Threshold) -> Finding:
    right = int(graded.right_R.sum())
    wrong = int((~graded.right_R).sum())
    by_length = rank_correlation(graded.shift_R, graded.length_R)
    figures = {"right": right, "wrong": wrong, "length_correlation": by_length}
    length = f"rank correlation with length {by_length:+.2f}"
    if not right or not wrong:
        text = (
            f"all {right + wrong:,} graded responses are {'right' if right else 'wrong'}: nothing to separate; {length}"
        )
        return Finding(about, "separation", "note", text, figures)
    auc = area_under_curve(graded.shift_R, graded.right_R)
    error = auc_error(right, wrong)
    adjusted, adjusted_error = auc_at_equal_length(graded)
    figures |= {"auc": auc, "auc_error": error, "auc_at_equal_length": adjusted, "equal_error": adjusted_error}
    verdict, words = _words(figures, stops)
    text = f"the summed shift {words}: AUC {auc:.2f} ± {error:.2f} over {right:,} right and {wrong:,} wrong, "
    text += f"{adjusted:.2f} ± {adjusted_error:.2f} at equal length; {length}"
    if verdict in ("warning", "error"):
        text += ". Are post and pre swapped?"
    bounds = Bounds(False, stops, below=True, share=False)
    return Finding(about, "separation", verdict, text, figures, judged=True, bounds=bounds)


def _words(figures: dict[str, float], stops: Threshold) -> tuple[Level, str]:
    """Judge by both areas: one that is low only because wrong responses are short is that of a brevity pair."""
    if abs(figures["auc"] - 0.5) <= CHANCE * figures["auc_error"]:
        return "note", "does not tell them apart"
    if figures["auc"] > 0.5:
        return "ok", "prefers right ones"
    adjusted = figures["auc_at_equal_length"]
    if adjusted >= 0.5 - CHANCE * figures["equal_error"]:
        return "note", "prefers short ones, and wrong ones only where they are shorter"
    words = "prefers wrong ones, at equal length too"
    certain = stops is not False and adjusted < min(stops, 0.5 - CERTAIN * figures["equal_error"])
    return ("error" if certain else "warning"), words


def _grade(steps: Steps, cache: Cache) -> GradedShifts | None:
    prompts = read_prompts(steps.prompts_file)
    tokenizer = steps.student.tokenizer
    responses = steps.recipe.rollout.responses
    shifts = []
    lengths = []
    rights = []
    for number in spread(len(cache), ROWS):
        answer = prompts[number // responses].answer
        if answer is not None:
            block = cache.block([number])
            shifts.append(summed_shift(block))
            lengths.append(len(block.sampled_P))
            text = tokenizer.decode(block.sampled_P.tolist(), skip_special_tokens=True)
            rights.append(grade_rollout(steps.recipe.eval, text, answer)[1])
    if not rights:
        return None
    return GradedShifts(np.array(shifts, float), np.array(lengths, float), np.array(rights, bool))


def summed_shift(block: Block) -> float:
    """Add up the pair's shift of the sampled tokens where it is valid and they are among the candidates."""
    sampled_PC = (block.candidates.ids.flat == block.sampled_P[:, None]) & block.valid_KP[0][:, None]
    return float(block.r_KPC[0][sampled_PC].sum())


def area_under_curve(scores_R: Floats, right_R: NDArray[np.bool_]) -> float:
    """Compute the chance that a right response scores above a wrong one, ties counting half.

    >>> area_under_curve(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    0.875
    """
    right = int(right_R.sum())
    wrong = int((~right_R).sum())
    return float((ranks(scores_R)[right_R].sum() - right * (right + 1) / 2) / (right * wrong))


def auc_at_equal_length(graded: GradedShifts) -> tuple[float, float]:
    """Compute the area under the curve within tenths of length, and its standard error: does length explain it?"""
    edges = np.unique(np.quantile(graded.length_R, np.linspace(0, 1, STRATA + 1)[1:-1]))
    stratum_R = np.searchsorted(edges, graded.length_R)
    wins = 0.0
    pairs = 0
    variance = 0.0
    for stratum in np.unique(stratum_R):
        right_R = graded.right_R[stratum_R == stratum]
        both = int(right_R.sum()) * int((~right_R).sum())
        if both:
            wins += both * area_under_curve(graded.shift_R[stratum_R == stratum], right_R)
            pairs += both
            variance += both * (len(right_R) + 1) / 12
    return (wins / pairs, float(np.sqrt(variance)) / pairs) if pairs else (0.5, 0.5)


def auc_error(right: int, wrong: int) -> float:
    """Give the standard error of the area under the curve for scores that carry no information."""
    return float(np.sqrt((right + wrong + 1) / (12 * right * wrong)))


def rank_correlation(one_R: Floats, other_R: Floats) -> float:
    """Correlate ranks (Spearman); 0 where one of them never varies."""
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (one_R, other_R))
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale else 0.0


def ranks(values_R: Floats) -> Floats:
    """Rank from 1, equal values sharing the mean of their ranks.

    >>> ranks(np.array([5.0, 1.0, 5.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = np.unique(values_R, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=float)
