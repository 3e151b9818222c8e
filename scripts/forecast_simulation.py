"""Where forecasts can be trusted: simulated responses of any length whose truth is computed exactly.

A response is a walk. Its state says how far it has come (the further, the likelier the answer is right); every decision
moves it up or down, ends it, or chooses one of several fillers, which change nothing. The shift makes ending and moving
up likelier by an amount that does not depend on the length, and, as style does, some fillers likelier than others at
every decision: this costs KL per decision and changes neither accuracy nor length. The longer the responses, the more
of it a weight collects. Accuracy and length under the target follow from the chances of all states, step by step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_weave.bench.statistics import TAIL, FloatArray
from lightning_weave.cache.block import Cache
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair
from lightning_weave.stages.forecast import (
    TRUSTED,
    Aim,
    Decoding,
    Weighted,
    bootstrap,
    effective_samples,
    truncate,
    weigh,
    weights_of,
)
from lightning_weave.stages.grades import grade_rows

STATES, LEVELS, CONTEXTS, FILLERS = 9, 5, 4, 4  # LEVELS of difficulty; in each context other fillers are likelier
END, UP, DOWN = 0, 1, 2  # outcomes, before the fillers
RESPONSES = 4  # per prompt
SEGMENTS = 20  # of a response of mean length


@dataclass(frozen=True)
class Walk:
    """A student that writes `length` decisions on average, at least half as many, and its shift."""

    length: int
    style: float  # KL per decision of the shift of fillers at dose 1, nats

    def log_b(self) -> FloatArray:
        """Log-probabilities (whether it can end, state, context, outcome) of the student."""
        rng = np.random.default_rng(1)
        p_ESKO = np.empty((2, STATES, CONTEXTS, 3 + FILLERS))
        p_ESKO[0, ..., END], p_ESKO[1, ..., END] = 1e-12, 2 / self.length
        p_ESKO[..., UP] = p_ESKO[..., DOWN] = min(0.25, 6 / self.length)
        rest = 1 - p_ESKO[..., :3].sum(axis=3, keepdims=True)
        p_ESKO[..., 3:] = rest * rng.dirichlet(np.full(FILLERS, 5.0), size=CONTEXTS)
        return np.log(p_ESKO)

    def shift(self) -> FloatArray:
        """The shift r of every outcome: it ends sooner, moves up, and has a style."""
        r_ESKO = np.zeros((2, STATES, CONTEXTS, 3 + FILLERS))
        r_ESKO[..., END] = np.linspace(0.4, 1.0, STATES)[:, None]
        r_ESKO[..., UP], r_ESKO[..., DOWN] = 0.5, -0.3
        style_KF = np.random.default_rng(2).normal(size=(CONTEXTS, FILLERS))
        p_KF = np.exp(self.log_b()[0, 0, :, 3:])
        p_KF /= p_KF.sum(axis=1, keepdims=True)
        style_KF -= (p_KF * style_KF).sum(axis=1, keepdims=True)
        variance = (p_KF * style_KF**2).sum(axis=1).mean()
        r_ESKO[..., 3:] = style_KF * np.sqrt(2 * self.style / variance)  # KL is half the variance, for small shifts
        return r_ESKO

    def target(self, dose: float) -> FloatArray:
        """Log-probabilities of the target: b exp(dose r), normalised; dose is 1 / alpha."""
        log_q_ESKO = self.log_b() + dose * self.shift()
        return np.asarray(log_q_ESKO - np.log(np.exp(log_q_ESKO).sum(axis=3, keepdims=True)))

    @property
    def longest(self) -> int:
        return 4 * self.length

    def can_end(self, step: int) -> int:
        return int(step >= self.length // 2)

    def right(self) -> FloatArray:
        """The chance of a right answer (level, state)."""
        height_S, hard_L = np.linspace(-2.5, 2.5, STATES), np.linspace(-1, 1, LEVELS)
        return np.asarray(1 / (1 + np.exp(-(height_S[None] - hard_L[:, None]))))

    def truth(self, dose: float) -> tuple[float, float]:
        """Compute accuracy (percent) and tokens under the target, over all levels. A response cut off is wrong."""
        p_ESO = np.exp(self.target(dose)).mean(axis=2)  # contexts are drawn evenly at every decision
        state_S = np.eye(STATES)[STATES // 2]
        accuracy = tokens = 0.0
        for step in range(self.longest):
            p_SO = p_ESO[self.can_end(step)]
            tokens += state_S.sum()
            accuracy += float((state_S * p_SO[:, END] * self.right().mean(axis=0)).sum())
            up_S, down_S = state_S * p_SO[:, UP], state_S * p_SO[:, DOWN]
            state_S = state_S * p_SO[:, 3:].sum(axis=1)
            state_S[1:] += up_S[:-1]
            state_S[-1] += up_S[-1]
            state_S[:-1] += down_S[1:]
            state_S[0] += down_S[0]
        return 100 * accuracy, float(tokens)

    def sample(self, prompts: int, doses: Sequence[float], rng: np.random.Generator) -> "Drawn":
        """Sample RESPONSES responses of the student per prompt, with their log-weights for every dose."""
        rows = prompts * RESPONSES
        log_b = self.log_b()
        ratio_DESKO = np.stack([self.target(dose) - log_b for dose in doses])
        score_ESKO = self.shift() - (np.exp(log_b) * self.shift()).sum(axis=3, keepdims=True)
        total_ESKO = np.exp(log_b).cumsum(axis=3)
        level_R = np.repeat(rng.integers(LEVELS, size=prompts), RESPONSES)
        state_R = np.full(rows, STATES // 2)
        segment = max(1, self.length // SEGMENTS)
        log_weight_DRM = np.zeros((len(doses), rows, -(-self.longest // segment)), np.float32)
        score_R, tokens_R, right_R = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        live = np.arange(rows)
        for step in range(self.longest):
            can, state, context = self.can_end(step), state_R[live], rng.integers(CONTEXTS, size=len(live))
            drawn = (rng.random(len(live))[:, None] > total_ESKO[can, state, context, :-1]).sum(axis=1)
            log_weight_DRM[:, live, step // segment] += ratio_DESKO[:, can, state, context, drawn]
            score_R[live] += score_ESKO[can, state, context, drawn]
            tokens_R[live] += 1
            state_R[live] = np.clip(state + (drawn == UP) - (drawn == DOWN), 0, STATES - 1)
            done = live[drawn == END]
            right_R[done] = rng.random(len(done)) < self.right()[level_R[done], state_R[done]]
            live = live[drawn != END]
            if not len(live):
                break
        return Drawn(
            log_weight_DRM, score_R, tokens_R, 100 * right_R, np.repeat(np.arange(prompts), RESPONSES), segment
        )


@dataclass(frozen=True)
class Drawn:
    """Sampled responses: log-weights by dose and segment, the sum of r - E_b r, tokens, and 100 for what was right."""

    log_weight_DRM: NDArray[np.float32]
    score_R: FloatArray
    tokens_R: FloatArray
    right_R: FloatArray
    prompt_R: NDArray[np.int64]
    segment: int

    @property
    def weight_DR(self) -> FloatArray:
        return weights_of(self.log_weight_DRM.sum(axis=2, dtype=float))


# Trust: how often intervals cover, by effective samples

EDGES = (0, 10, 20, 30, 50, 75, 100, 150, 200, 400, np.inf)
FIGURES = ("accuracy", "tokens")
RESAMPLES = 300


@dataclass(frozen=True)
class Trial:
    """One interval: its effective samples, whether it holds the truth, and its width."""

    samples: float
    figure: str
    covered: bool
    width: float  # points, or percent of the student's tokens


def simulated_trials(repetitions: int) -> list[Trial]:
    """Estimate many doses from small and large caches of short and long responses."""
    rng = np.random.default_rng(0)
    doses = (0.5, 1.0, 1.5, 2.0, 3.0)
    trials = []
    for length, style in ((30, 0.01), (30, 0.1), (100, 0.01), (100, 0.05), (300, 0.01)):
        walk = Walk(length, style)
        truths = [walk.truth(dose) for dose in doses]
        for number in range(repetitions):
            drawn = walk.sample((50, 100, 200, 400, 800)[number % 5], doses, rng)
            for figure, values_R in enumerate((drawn.right_R, drawn.tokens_R)):
                means_DB = bootstrap(drawn.weight_DR, values_R, drawn.prompt_R, RESAMPLES, number)
                truth_D = np.array([truth[figure] for truth in truths])
                trials += _trials(drawn.weight_DR, means_DB, truth_D, figure, 1.0, 100 / length if figure else 1.0)
    return trials


def _trials(
    weight_DR: FloatArray, means_DB: FloatArray, truth_D: FloatArray, figure: int, shrink: float, unit: float
) -> list[Trial]:
    """Compare the percentile intervals, shrunk about the estimate, with the truth."""
    low_D, high_D = (
        means_DB[:, 0] + shrink * (np.percentile(means_DB[:, 1:], tail, axis=1) - means_DB[:, 0])
        for tail in (TAIL, 100 - TAIL)
    )
    covered_D = (low_D <= truth_D) & (truth_D <= high_D)
    parts = zip(effective_samples(weight_DR), covered_D, (high_D - low_D) * unit / shrink, strict=True)
    return [Trial(float(samples), FIGURES[figure], bool(covered), float(width)) for samples, covered, width in parts]


def cached_trials(weighted: Weighted, grade_R: FloatArray, repetitions: int) -> list[Trial]:
    """Estimate from a part of the prompts of a cache what all of them give, where they have 100 effective samples.

    A part of n of N prompts differs from all of them by sqrt(1 - n / N) of its own error.
    """
    rng = np.random.default_rng(0)
    all_DR = weights_of(weighted.log_weight_AR)
    kept_D = effective_samples(all_DR) >= 100
    prompts = np.unique(weighted.prompt_R)
    trials = []
    for number in range(repetitions):
        share = (1 / 16, 1 / 8, 1 / 4, 1 / 2)[number % 4]
        part = np.isin(weighted.prompt_R, rng.choice(prompts, int(share * len(prompts)), replace=False))
        weight_DR = weights_of(weighted.log_weight_AR[kept_D][:, part])
        for figure, values_R in enumerate((100 * grade_R, weighted.tokens_R)):
            means_DB = bootstrap(weight_DR, values_R[part], weighted.prompt_R[part], RESAMPLES, number)
            truth_D = all_DR[kept_D] @ values_R / all_DR[kept_D].sum(axis=1)
            unit = 100 / weighted.tokens_R.mean() if figure else 1.0
            trials += _trials(weight_DR, means_DB, truth_D, figure, math.sqrt(1 - share), unit)
    return trials


def trust_table(sources: Mapping[str, Sequence[Trial]]) -> str:
    """Markdown: how often 95 % intervals hold the truth, and how wide they are, by effective samples."""
    heads = [f"{source}: {figure}" for source in sources for figure in FIGURES]
    lines = [
        f"| effective samples | {' | '.join(heads)} | width: accuracy, tokens |",
        "| --- |" + " ---: |" * (len(heads) + 1),
    ]
    for low, high in pairwise(EDGES):
        cells = [f"{low} to {high:g}" if high < np.inf else f"{low} and more"]
        chosen = {name: [trial for trial in trials if low <= trial.samples < high] for name, trials in sources.items()}
        for trials in chosen.values():
            for figure in FIGURES:
                own = [trial.covered for trial in trials if trial.figure == figure]
                cells.append(f"{np.mean(own):.0%} of {len(own):,}" if len(own) >= 50 else "")
        widths = [
            [trial.width for trials in chosen.values() for trial in trials if trial.figure == figure]
            for figure in FIGURES
        ]
        cells.append(", ".join(f"{np.nanmedian(width):.0f}" + "%" * place for place, width in enumerate(widths)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Estimators for doses that have few effective samples

SHARES = tuple(2 ** (-rung / 2) for rung in range(14, -1, -1))  # of the dose, up to all of it


def logit(percent: float) -> float:
    inside = min(max(percent, 0.5), 99.5)
    return math.log(inside / (100 - inside))


def line(base: float, near: float, factor: float, figure: int) -> float:
    """Extend the line from the base through a smaller dose, in log-odds of the accuracy or in the log of the tokens."""
    if figure:
        return float(base * (near / base) ** factor)
    end = logit(base) + factor * (logit(near) - logit(base))
    return 100 / (1 + math.exp(-end))


def estimates(
    weight_DR: FloatArray, values_R: FloatArray, score_R: FloatArray | None, shares: Sequence[float], figure: int
) -> dict[str, float]:
    """Estimate the full dose, the last of D, in several ways; the first of D is the student itself."""
    mean_D = weight_DR @ values_R / weight_DR.sum(axis=1)
    samples_D = effective_samples(weight_DR)
    truncated_R = truncate(weight_DR[-1:])[0]
    found = {
        "no forecast": mean_D[0],
        "all weights": mean_D[-1],
        "truncated": truncated_R @ values_R / truncated_R.sum(),
    }
    near = max((place for place in range(1, len(mean_D)) if samples_D[place] >= TRUSTED), default=1)
    sound = max((place for place in range(1, len(mean_D)) if samples_D[place] >= len(values_R) / 8), default=1)
    found["largest trusted dose"] = mean_D[near]
    found["extended from it"] = line(mean_D[0], mean_D[near], 1 / shares[near - 1], figure)
    found["extended from R/8 samples"] = line(mean_D[0], mean_D[sound], 1 / shares[sound - 1], figure)
    if score_R is not None:
        slope = float(np.mean((score_R - score_R.mean()) * values_R))
        unit = mean_D[0] if figure else mean_D[0] * (100 - mean_D[0]) / 100
        found["linear response"] = mean_D[0] + slope
        found["linear, log scale"] = (
            mean_D[0] * math.exp(slope / unit) if figure else 100 / (1 + math.exp(-logit(mean_D[0]) - slope / unit))
        )
    return {name: float(value) for name, value in found.items()}


def by_segment(drawn: Drawn) -> tuple[float, float]:
    """Estimate ends and right answers segment by segment, weighted by this segment and the one before it alone."""
    last_R = (drawn.tokens_R - 1) // drawn.segment
    left, accuracy, tokens = 1.0, 0.0, 0.0
    for number in range(int(last_R.max()) + 1):
        here = last_R >= number
        log_weight_R = drawn.log_weight_DRM[-1, here, max(0, number - 1) : number + 1].sum(axis=1, dtype=float)
        weight_R = np.exp(log_weight_R - log_weight_R.max())
        weight_R /= weight_R.sum()
        ends_R = last_R[here] == number
        tokens += left * float(
            weight_R @ np.where(ends_R, drawn.tokens_R[here] - number * drawn.segment, drawn.segment)
        )
        accuracy += left * float(weight_R @ (ends_R * drawn.right_R[here]))
        left *= float(weight_R @ ~ends_R)
    return accuracy, tokens


Errors = dict[str, list[list[float]]]  # by estimator: of accuracy, of tokens


def simulated_errors(length: int, style: float, dose: float, repetitions: int) -> tuple[float, Errors]:
    """Compute the errors of all estimators on one kind of response, and the median effective samples."""
    walk, rng = Walk(length, style), np.random.default_rng(length)
    truth = walk.truth(dose)
    errors: Errors = {}
    samples = []
    for _ in range(repetitions):
        drawn = walk.sample(800, [0.0, *(share * dose for share in SHARES)], rng)
        samples.append(effective_samples(drawn.weight_DR)[-1])
        for figure, values_R in enumerate((drawn.right_R, drawn.tokens_R)):
            found = estimates(drawn.weight_DR, values_R, dose * drawn.score_R, SHARES, figure)
            found["by segment"] = by_segment(drawn)[figure]
            for name, value in found.items():
                unit = 100 / length if figure else 1.0
                errors.setdefault(name, [[], []])[figure].append((value - truth[figure]) * unit)
    return float(np.median(samples)), errors


def cached_errors(
    weighted: Weighted, grade_R: FloatArray, alphas: Sequence[float], repetitions: int
) -> tuple[float, Errors]:
    """Compute them with a part of the prompts of a cache, against all. `weighted` has all alphas of each direction."""
    rng = np.random.default_rng(1)
    all_DR = weights_of(weighted.log_weight_AR)
    prompts = np.unique(weighted.prompt_R)
    errors: Errors = {}
    samples = []
    for _ in range(repetitions):
        part = np.isin(weighted.prompt_R, rng.choice(prompts, len(prompts) // 8, replace=False))
        for first in range(1, len(all_DR), len(alphas)):
            places = [0, *range(first + len(alphas) - 1, first - 1, -1)]
            if effective_samples(all_DR[first : first + 1])[0] < TRUSTED:
                continue
            weight_DR = weights_of(weighted.log_weight_AR[places][:, part])
            samples.append(effective_samples(weight_DR)[-1])
            shares = [alphas[0] / alpha for alpha in reversed(alphas)]
            for figure, values_R in enumerate((100 * grade_R, weighted.tokens_R)):
                truth = all_DR[first] @ values_R / all_DR[first].sum()
                unit = 100 / weighted.tokens_R.mean() if figure else 1.0
                for name, value in estimates(weight_DR, values_R[part], None, shares, figure).items():
                    errors.setdefault(name, [[], []])[figure].append((value - truth) * unit)
    return float(np.median(samples)), errors


def estimator_table(cases: Mapping[str, tuple[float, Errors]]) -> str:
    """Markdown: root mean square error of every estimator in every case, accuracy in points and tokens in percent."""
    names = list(dict.fromkeys(name for _, errors in cases.values() for name in errors))
    lines = [f"| responses | effective samples | {' | '.join(names)} |", "| --- | ---: |" + " ---: |" * len(names)]
    for case, (samples, errors) in cases.items():
        cells = [case, f"{samples:.0f}"]
        for name in names:
            both = [math.sqrt(np.mean(np.square(one))) for one in errors.get(name, ())]
            cells.append(f"{both[0]:.0f}, {both[1]:.0f} %" if both else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# The cache of the demo

ALPHAS = tuple(0.5 * 2 ** (rung / 2) for rung in range(14))


def weigh_demo(run: Run) -> tuple[Weighted, FloatArray]:
    """Weigh the cached responses of the demo for five weights at all ALPHAS, and grade them."""
    anchors = ("accuracy", "brevity")
    cache = Cache(run.stage("rollout"), run.stage("reference"), [anchor_pair(run, anchor) for anchor in anchors])
    aims = [Aim((1 - share, share), alpha) for share in (0.0, 0.25, 0.5, 0.75, 1.0) for alpha in ALPHAS]
    section = run.recipe.eval
    decoding = Decoding(section.temperature, section.top_p)
    weighted = weigh(cache, aims, decoding, Decoding(run.recipe.rollout.temperature), run.recipe.rollout.max_tokens)
    grade_R = grade_rows(run, Progress(quiet=True))
    assert grade_R is not None
    return weighted, grade_R


CASES = [(length, style) for length in (100, 300, 1000, 3000) for style in (0.002, 0.01, 0.05)]


def simulated_page(run: Run, command: str, repetitions: int) -> dict[str, str]:
    """Markdown of both tables, by their names in the page."""
    weighted, grade_R = weigh_demo(run)
    trials = {
        "simulated": simulated_trials(repetitions),
        "parts of the demo's cache": cached_trials(weighted, grade_R, repetitions),
    }
    cases = {}
    for length, style in CASES:
        few = max(4, repetitions // max(4, length // 25))
        cases[f"{length:,} decisions, {style:g} nats of style"] = simulated_errors(length, style, 1.0, few)
    cases["an eighth of the demo's cache, alpha 0.5"] = cached_errors(weighted, grade_R, ALPHAS, repetitions)
    made = f"Made by `{command}`."
    return {"trust": f"{made}\n\n{trust_table(trials)}", "long": f"{made}\n\n{estimator_table(cases)}"}
