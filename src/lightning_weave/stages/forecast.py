"""`lweave forecast`: what a composition's target is worth, from the cache alone, before anything is trained.

A cached response y has the weight prod_t q_T(y_t) / b(y_t): q_T is the target, sampled as the evaluation samples, and b
the student as the rollout sampled it. Weighted means over all responses estimate accuracy and tokens under the target.
There is one normalisation over all prompts: within the few responses to one prompt it would be biased towards the
student. A response cut off at rollout.max_tokens counts as it is.
Letters as in `lightning_weave.types`; A aims, G prompts, B bootstrap resamples.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.bench.statistics import TAIL, FloatArray
from lightning_weave.bench.summary import combine, read_summary
from lightning_weave.cache.block import Block, Cache, compute_targets
from lightning_weave.config import Composition, Distilled, Joint, Recipe, SelfDistilled
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.maths import expected_kl, with_other
from lightning_weave.maths.metrics import aes, pareto_front
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair, open_cache
from lightning_weave.stages.grades import grade_rows
from lightning_weave.stages.sweep import Planned, extend, is_same, plan_sweep, refuse_budgets, usual_alpha
from lightning_weave.store import read_json, write_json
from lightning_weave.train.data import find_dose
from lightning_weave.train.schedule import make_schedule

TRUSTED = 30  # effective samples: with fewer, 95 % intervals cover in less than 90 % (docs/appendix/forecast.md)
REACHED = 0.2  # nats of KL per decision: farther targets were not reached by offline training (same page)
RESAMPLES = 1000
DECISIONS = 1 << 17  # read at a time, about
RUNGS = 14  # larger alphas that are tried where a point is not trusted, each by a factor of sqrt(2)
FILE = "forecast.json"  # in the run directory: the points that were forecast last, for the report
NOT_FORECAST = {
    "mixture": "each prompt is trained on one anchor alone, so there is no common target",
    "sequential": "the target of a later part depends on the student that the part before trains",
    "online": "it is trained on states that are sampled while it trains; a joint composition has the same target",
}


# Estimator


@dataclass(frozen=True)
class Decoding:
    """How tokens are drawn from a distribution."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Aim:
    """A target on a cache: the weights of its sources, the same for all rows or row by row, and alpha."""

    weights: Sequence[float]
    alpha: float
    weight_RK: NDArray[np.float32] | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)  # the weights by anchor, or by tag and anchor
    kl_budget: float | None = None  # that alpha was solved for


@dataclass(frozen=True)
class Weighted:
    """All that is kept of the rows of a cache. The first of the A policies is the student itself, then the aims."""

    log_weight_AR: FloatArray
    kl_A: FloatArray  # mean KL(q || b) over the valid decisions, nats
    tokens_R: FloatArray  # that the student wrote
    prompt_R: NDArray[np.int64]


def sampled_logp(log_p_PO: Tensor, outcome_P: Tensor, share_P: Tensor, least_P: Tensor, decoding: Decoding) -> Tensor:
    """Compute the log-probability of drawing each sampled token; -inf outside of the nucleus of top_p.

    `other`, the last outcome, is many tokens: `share_P` is the sampled one's share of it (log, 0 for a candidate), and
    `least_P` the least candidate's probability over that of all of them. At another temperature than 1 the rest of them
    matter too: they continue the candidates as a power law that starts at the least one and has the mass of `other`, or
    are a single token where all of them are less likely than that. In the nucleus they come last.
    """
    if decoding.temperature == 0:
        return torch.where(log_p_PO[:, :-1].argmax(dim=1) == outcome_P, 0.0, -torch.inf)
    logp_P = log_p_PO.gather(1, outcome_P[:, None])[:, 0] + share_P
    if decoding.temperature != 1:
        power, count = 1 / decoding.temperature, log_p_PO.shape[1] - 1
        log_p_PO = power * log_p_PO
        # sum_i p_i^power over p_i = least (1 + i / count)^-a, i > 0, relative to that of a single token
        many_P = power * least_P + math.log(count) - (power - 1 + power * count * least_P.exp()).clamp(min=0.1).log()
        log_p_PO[:, -1] += torch.where(least_P < 0, many_P.clamp(max=0.0) if power > 1 else many_P.clamp(min=0.0), 0.0)
        log_all_P1 = log_p_PO.logsumexp(dim=1, keepdim=True)
        log_p_PO, logp_P = log_p_PO - log_all_P1, power * logp_P - log_all_P1[:, 0]
    if decoding.top_p < 1:
        logp_PC = torch.from_numpy(np.sort(log_p_PO[:, :-1].numpy(), axis=1)).flip(1)  # faster than torch's for few
        mass_PC = logp_PC.exp().cumsum(dim=1)
        whole_P = mass_PC[:, -1] < decoding.top_p  # the candidates do not reach top_p: everything is in
        last_P1 = (mass_PC < decoding.top_p).sum(dim=1, keepdim=True).clamp(max=mass_PC.shape[1] - 1)
        is_candidate_P = outcome_P < mass_PC.shape[1]
        inside_P = whole_P | (is_candidate_P & (logp_P >= logp_PC.gather(1, last_P1)[:, 0]))
        log_mass_P = torch.where(whole_P, 0.0, mass_PC.gather(1, last_P1)[:, 0].log())
        logp_P = torch.where(inside_P, logp_P - log_mass_P, -torch.inf)
    return logp_P


def weigh_block(
    block: Block, aims: Sequence[Aim], decoding: Decoding, behaviour: Decoding
) -> tuple[FloatArray, FloatArray, NDArray[np.int64]]:
    """Compute each row's log-weight, and of each policy the sum of KL(q || b) and the decisions that it is over."""
    candidates = block.candidates
    hit_PC = candidates.ids.flat == block.sampled_P[:, None]
    outcome_P = torch.from_numpy(np.where(hit_PC.any(axis=1), hit_PC.argmax(axis=1), hit_PC.shape[1]))
    log_b_PO = with_other(torch.tensor(candidates.logp.flat), torch.tensor(candidates.other_logp.flat))
    # Of the others only their total is shifted, so both are the same under every target.
    share_P = torch.where(
        outcome_P < hit_PC.shape[1], 0.0, torch.tensor(candidates.sampled_logp.flat) - log_b_PO[:, -1]
    )
    least_P = log_b_PO[:, -2] - log_b_PO[:, -1]
    log_b_P = sampled_logp(log_b_PO, outcome_P, share_P, least_P, behaviour)
    row_P = np.repeat(np.arange(len(block)), block.decisions_R)
    log_weight_AR = np.zeros((1 + len(aims), len(block)))
    kl_A, decisions_A = np.zeros(1 + len(aims)), np.zeros(1 + len(aims), np.int64)
    for place in range(1 + len(aims)):
        log_q_PO = log_b_PO
        if place:
            aim = aims[place - 1]
            rows = block if aim.weight_RK is None else block.with_row_weights(aim.weight_RK[block.number_R])
            targets = compute_targets(rows, aim.weights, aim.alpha)
            log_q_PO, valid_P = torch.from_numpy(targets.log_q_PO), torch.from_numpy(targets.valid_P)
            kl_A[place] = expected_kl(log_q_PO, log_b_PO)[valid_P].double().sum()
            decisions_A[place] = valid_P.sum()
        ratio_P = (sampled_logp(log_q_PO, outcome_P, share_P, least_P, decoding) - log_b_P).double().numpy()
        ratio_P = np.where(block.decided_P, ratio_P, 0.0)
        log_weight_AR[place] = np.bincount(row_P, ratio_P, minlength=len(block))
    return log_weight_AR, kl_A, decisions_A


def weigh(cache: Cache, aims: Sequence[Aim], decoding: Decoding, behaviour: Decoding, longest: int = 2048) -> Weighted:
    """Weigh every row of a cache for the student itself and for every aim, in one pass, a few rows at a time."""
    policies = 1 + len(aims)
    log_weight_AR = np.zeros((policies, len(cache)))
    kl_A, decisions_A = np.zeros(policies), np.zeros(policies, np.int64)
    tokens_R, prompt_R = np.zeros(len(cache)), np.zeros(len(cache), np.int64)
    step = max(1, DECISIONS // longest)
    for shard in range(cache.rows.shards):
        numbers = cache.shard_rows(shard)
        for rows in (numbers[start : start + step] for start in range(0, len(numbers), step)):
            block = cache.block(rows)
            here = slice(rows.start, rows.stop)
            log_weight_AR[:, here], kl, decisions = weigh_block(block, aims, decoding, behaviour)
            kl_A, decisions_A = kl_A + kl, decisions_A + decisions
            row_P = np.repeat(np.arange(len(block)), block.decisions_R)
            tokens_R[here] = np.bincount(row_P, block.decided_P, minlength=len(block))
            prompt_R[here] = block.rollouts.prompt_R
    return Weighted(log_weight_AR, kl_A / np.maximum(decisions_A, 1), tokens_R, prompt_R)


def weights_of(log_weight_AR: FloatArray) -> FloatArray:
    """Scale the weights of each policy to a largest of 1; all are 0 where no response can be drawn."""
    most_A1 = log_weight_AR.max(axis=1, keepdims=True)
    return np.exp(log_weight_AR - np.where(np.isfinite(most_A1), most_A1, 0.0))


def effective_samples(weight_AR: FloatArray) -> FloatArray:
    """Compute Kish's (sum w)^2 / sum w^2: of so many equally weighted responses the estimate would be as precise."""
    squares_A = np.maximum((weight_AR**2).sum(axis=1), np.finfo(float).tiny)
    return np.asarray(weight_AR.sum(axis=1) ** 2 / squares_A)


def truncate(weight_AR: FloatArray) -> FloatArray:
    """Limit weights to sqrt(R) times their mean: fewer outliers, but a bias towards the student itself."""
    return np.minimum(weight_AR, weight_AR.mean(axis=1, keepdims=True) * math.sqrt(weight_AR.shape[1]))


def bootstrap(
    weight_AR: FloatArray, value_R: FloatArray, prompt_R: NDArray[np.int64], resamples: int = RESAMPLES, seed: int = 0
) -> FloatArray:
    """Compute self-normalised means of a value: (A, 1 + B), the first as measured, the others over resampled prompts.

    A value of NaN is left out. All policies, and all values of the same prompts, share the resampled prompts.
    """
    known_R = ~np.isnan(value_R)
    _, group_R = np.unique(prompt_R, return_inverse=True)
    groups = int(group_R.max()) + 1
    parts = [weight_AR * known_R, weight_AR * np.where(known_R, value_R, 0.0)]
    below_AG, above_AG = (np.stack([np.bincount(group_R, row, groups) for row in part]) for part in parts)
    rng = np.random.default_rng(seed)
    means_BA = []
    for number in range(1 + resamples):
        drawn = rng.integers(groups, size=groups) if number else np.arange(groups)
        count_G = np.bincount(drawn, minlength=groups).astype(float)
        with np.errstate(invalid="ignore", divide="ignore"):
            means_BA.append((above_AG @ count_G) / (below_AG @ count_G))
    return np.stack(means_BA, axis=1)


# Points


@dataclass(frozen=True)
class TrustedDose:
    """The largest dose of a direction that is trusted, and what one more nat of KL per decision does there."""

    alpha: float
    accuracy: float | None
    tokens: float
    kl: float
    effective_samples: float
    points_per_nat: float | None  # of accuracy
    tokens_per_nat: float

    @classmethod
    def of(cls, one: "ForecastPoint", next_one: "ForecastPoint") -> "TrustedDose":
        """Describe a point, with the slope between it and the next of its direction."""
        assert one.alpha is not None, "a dose has an alpha"
        gained = None
        if one.accuracy is not None and next_one.accuracy is not None:
            gained = (one.accuracy - next_one.accuracy) / (one.kl - next_one.kl)
        written = (one.tokens - next_one.tokens) / (one.kl - next_one.kl)
        return cls(one.alpha, one.accuracy, one.tokens, one.kl, one.effective_samples, gained, written)


@dataclass(frozen=True)
class ForecastPoint:
    """One point: what the target of a composition is worth. Intervals are 95 %, over resampled prompts."""

    policy: str
    weights: Mapping[str, Any]
    alpha: float | None
    accuracy: float | None  # percent; None without known answers
    accuracy_low: float | None
    accuracy_high: float | None
    tokens: float
    tokens_low: float
    tokens_high: float
    aes: float | None
    aes_low: float | None
    aes_high: float | None
    kl: float  # KL(target || student), nats per decision
    effective_samples: float
    trusted: bool
    anchored: bool  # at the measured evaluation of the base: accuracy and tokens are those of the benchmarks
    kl_budget: float | None = None  # that alpha was solved for
    largest_trusted: TrustedDose | None = None  # with the same weights, where the point itself is not trusted
    method: str = "joint"  # else the weights are not those of shifts

    @property
    def reachable(self) -> bool:
        """Whether the target is near enough for offline training."""
        return self.kl <= REACHED

    def to_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        return asdict(self) | {"reachable": self.reachable}


def plan_forecast(
    recipe: Recipe,
    shares: Sequence[float] | None = None,
    anchor: str | None = None,
    alphas: Sequence[float] | None = None,
    kl_budgets: Sequence[float] | None = None,
    tag: str | None = None,
    grid: int | None = None,
) -> list[Planned]:
    """List the compositions of the recipe, then a grid: weights (its own, shares or a simplex) by alphas or budgets."""
    if wrong := [one for one in (*(alphas or ()), *(kl_budgets or ())) if not 0 < one < float("inf")]:
        raise InputError(f"--alphas, --kl-budgets: {wrong[0]:g} must be greater than 0")
    planned = [Planned(name, one, True) for name, one in recipe.written.items()]
    bases = [one for one in planned if isinstance(one.composition, Joint) and not one.composition.is_placebo]
    if shares is not None:
        bases = plan_sweep(recipe, shares, anchor, None, tag)
    elif grid is not None:
        bases = _simplex(recipe, grid)
    doses: list[dict[str, Any]] = [{"alpha": float(alpha)} for alpha in alphas or ()]
    doses += [{"kl_budget": float(budget)} for budget in kl_budgets or ()]
    for base in bases:
        joint = base.composition
        assert isinstance(joint, Joint)
        rules: dict[str, Any] = {"normalize": joint.normalize, "allow_negative": joint.allow_negative}
        for dose in doses or [{}]:
            label = [f"{key.removesuffix('_budget')}-{value:g}" for key, value in dose.items()]
            one = Joint(weights=joint.weights, routes=joint.routes, **rules, **dose) if dose else joint
            if not any(is_same(other.composition, one) for other in planned):
                planned.append(Planned("-".join([base.name, *label]), one, False))
    names = [one.name for one in planned]
    if taken := [name for name in names if names.count(name) > 1 or name in recipe.policies]:
        raise InputError(f"{taken[0]} is the name of something else in this recipe; rename that")
    return planned


def _simplex(recipe: Recipe, steps: int) -> list[Planned]:
    """All weights of all anchors in multiples of 1 / steps."""
    refuse_budgets(recipe)
    names = list(recipe.anchors)
    if steps < 1 or not names:
        raise InputError(f"--grid {steps}: give a number of steps of 1 or more, and anchors to weigh")
    planned = []
    for table in itertools.product(range(steps + 1), repeat=len(names) - 1):
        if sum(table) > steps:
            continue
        parts = zip(names, [steps - sum(table), *table], strict=True)
        weights = {name: part / steps for name, part in parts}
        label = "-".join(f"{name}-{weight:.3g}" for name, weight in weights.items() if weight)
        planned.append(Planned(label, Joint(weights=weights, alpha=usual_alpha(recipe)), False))
    return planned


@dataclass(frozen=True)
class Estimates:
    """Estimates of A policies, the student itself first: as measured, then over B resamples of the prompts."""

    accuracy_AB: FloatArray | None  # percent
    tokens_AB: FloatArray
    samples_A: FloatArray
    kl_A: FloatArray

    def figures(self, place: int) -> dict[str, float | None]:
        """Describe one policy: accuracy, tokens and AES against the student itself, each with its interval."""
        accuracy_B = None if self.accuracy_AB is None else self.accuracy_AB[place]
        score_B = None
        if self.accuracy_AB is not None:
            with np.errstate(invalid="ignore"):  # a policy that can draw none of the responses
                score_B = np.vectorize(aes, otypes=[float])(
                    accuracy_B, self.tokens_AB[place], self.accuracy_AB[0], self.tokens_AB[0]
                )
        found: dict[str, float | None] = {}
        for key, values_B in (("accuracy", accuracy_B), ("tokens", self.tokens_AB[place]), ("aes", score_B)):
            found |= dict.fromkeys((key, f"{key}_low", f"{key}_high"))
            if values_B is not None and not np.isnan(values_B[1:]).all():
                low, high = np.nanpercentile(values_B[1:], [TAIL, 100 - TAIL])
                found |= {key: float(values_B[0]), f"{key}_low": float(low), f"{key}_high": float(high)}
        return found

    def trusted(self, place: int) -> bool:
        """Whether a policy, and the student itself, have enough effective samples."""
        return bool(min(self.samples_A[place], self.samples_A[0]) >= TRUSTED)


def estimate(weighted: Weighted, grade_R: FloatArray | None, measured: tuple[float, float] | None) -> Estimates:
    """Average over the weighted rows and over resampled prompts.

    With the measured accuracy and tokens of the student, accuracies are moved by its error in points, and tokens by its
    factor: prompts and benchmarks differ, but what the target changes carries over.
    """
    weight_AR = weights_of(weighted.log_weight_AR)
    samples_A = effective_samples(weight_AR)
    weight_AR = np.where(samples_A[:, None] < TRUSTED, truncate(weight_AR), weight_AR)
    tokens_AB = bootstrap(weight_AR, weighted.tokens_R, weighted.prompt_R)
    accuracy_AB = None if grade_R is None else bootstrap(weight_AR, 100 * grade_R, weighted.prompt_R)
    if measured is not None:
        tokens_AB = measured[1] * tokens_AB / tokens_AB[:1]
    if measured is not None and accuracy_AB is not None:
        accuracy_AB = np.clip(measured[0] + accuracy_AB - accuracy_AB[:1], 0.0, 100.0)
    return Estimates(accuracy_AB, tokens_AB, samples_A, weighted.kl_A)


def measured_base(run: Run) -> tuple[float, float] | None:
    """Read the base's accuracy and tokens, averaged over all benchmarks, if it is evaluated on all of them."""
    with suppress(InputError):  # a benchmark is gone
        stages = [run.stage("eval", "base", name) for name in run.recipe.eval.benchmarks]
        if stages and all(stage.complete for stage in stages):
            overall = combine([read_summary(stage.folder / "summary.json") for stage in stages])
            return overall.accuracy, overall.tokens
    return None


def not_forecast(composition: Composition) -> str | None:
    """Explain why a composition cannot be forecast; None if it can."""
    placebo = "a placebo is a control, compared after training"
    return placebo if composition.is_placebo else NOT_FORECAST.get(composition.method)


def forecast(
    run: Run,
    planned: Sequence[Planned] | None = None,
    progress: Progress | None = None,
    decoding: Decoding | None = None,
) -> list[ForecastPoint]:
    """Forecast the student itself and every planned composition that has a target, or those of the recipe.

    Reads rollout, reference and scores; the cached responses are graded if they are not yet.
    """
    recipe = run.recipe
    planned = [one for one in planned or plan_forecast(recipe) if not_forecast(one.composition) is None]
    evaluation = Decoding(recipe.eval.temperature, recipe.eval.top_p)
    decoding = decoding or evaluation
    behaviour = Decoding(recipe.rollout.temperature)
    if behaviour.temperature == 0:
        raise InputError("rollout.temperature = 0: greedy responses cannot be reweighted, so nothing can be forecast")
    extended = extend(run, planned)
    joints = [one for one in planned if isinstance(one.composition, Joint)]
    anchors = sorted({anchor for one in joints for anchor in one.composition.used})
    cache = Cache(run.stage("rollout"), run.stage("reference"), [anchor_pair(run, anchor) for anchor in anchors])
    grade_R = grade_rows(run, progress or Progress(quiet=True))
    measured = measured_base(run) if decoding == evaluation else None

    def look(cache: Cache, aims: Sequence[Aim]) -> Estimates:
        weighted = weigh(cache, aims, decoding, behaviour, recipe.rollout.max_tokens)
        return estimate(weighted, grade_R, measured)

    def describe(name: str, aim: Aim | None, found: Estimates, place: int, method: str = "joint") -> ForecastPoint:
        asked = {} if aim is None else {"weights": aim.shown, "alpha": aim.alpha, "kl_budget": aim.kl_budget}
        figures: dict[str, Any] = {"weights": {}, "alpha": None} | asked | found.figures(place)
        kl, samples = float(found.kl_A[place]), float(found.samples_A[place])
        state: dict[str, Any] = {"trusted": found.trusted(place), "anchored": measured is not None, "method": method}
        return ForecastPoint(name, kl=kl, effective_samples=samples, **state, **figures)

    aims = {policy: aim for one in joints for policy, aim in _aims(extended, one.name, anchors).items()}
    found = look(cache, list(aims.values()))
    points = {"base": describe("base", None, found, 0)}
    directions: dict[str, dict[str, Aim]] = {}  # of points that are not trusted
    for place, (policy, aim) in enumerate(aims.items(), start=1):
        points[policy] = describe(policy, aim, found, place)
        if not points[policy].trusted and points["base"].trusted:
            directions.setdefault(str(aim.shown), {})[policy] = aim
    for asked in directions.values():
        first = min(asked.values(), key=lambda aim: aim.alpha)
        rungs = [replace(first, alpha=first.alpha * 2 ** (rung / 2)) for rung in range(1, RUNGS + 2)]
        found = look(cache, rungs)
        doses = [describe("", rung, found, place) for place, rung in enumerate(rungs, start=1)]
        dose = next((TrustedDose.of(one, weaker) for one, weaker in itertools.pairwise(doses) if one.trusted), None)
        for name in asked:
            points[name] = replace(points[name], largest_trusted=dose)
    for one in planned:
        if isinstance(one.composition, Distilled | SelfDistilled):
            own = open_cache(extended, one.name)
            aim = Aim(own.weights, one.composition.alpha, shown=one.composition.weights)
            points[one.name] = describe(one.name, aim, look(own, [aim]), 1, one.composition.method)
    order = {one.name: place for place, one in enumerate(planned)} | {"base": -1}  # levels follow their composition
    return sorted(points.values(), key=lambda point: order[point.policy.partition("@")[0]])


def _origin(run: Run) -> list[str]:
    """Name everything that all forecasts of a run depend on: cache, scores, rules for shifts, sampling, grading."""
    stages = [run.stage("reference"), *(run.stage("score", side) for side in run.score_names)]
    recipe, section = run.recipe, run.recipe.eval
    settings = [*recipe.anchors.values(), recipe.spans, recipe.tags]
    settings += [section.temperature, section.top_p, run.grading[0]]
    return [*(stage.fingerprint for stage in stages), *map(str, settings)]


def keep_points(run: Run, points: Sequence[ForecastPoint]) -> None:
    """Write points to the run directory, for the report; those before stay if the base has the same figures there."""
    before = read_points(run)
    bases = [[one.tokens, one.accuracy or 0.0] for one in (*before[:1], points[0])]
    kept = {point.policy: asdict(point) for point in [*(before if np.allclose(bases[0], bases[-1]) else ()), *points]}
    write_json(run.directory / FILE, {"origin": _origin(run), "points": list(kept.values())})


def read_points(run: Run) -> list[ForecastPoint]:
    """Read the points that were forecast from the present cache and settings; none if there are none."""
    points = []
    path = run.directory / FILE
    with suppress(InputError):  # its models are no longer available
        found = read_json(path) if path.exists() else None
        for point in found["points"] if found and found.get("origin") == _origin(run) else ():
            dose = point.pop("largest_trusted")
            points.append(ForecastPoint(**point, largest_trusted=None if dose is None else TrustedDose(**dose)))
        if points and points[0].anchored and not belong_to(points, measured_base(run)):  # it is evaluated otherwise now
            return []
    return points


def belong_to(points: Sequence[ForecastPoint], measured: tuple[float, float] | None) -> bool:
    """Whether the base of these points has this measured accuracy, where it is known, and these tokens."""
    if measured is None or not points:
        return False
    base, (accuracy, tokens) = points[0], measured
    return bool(np.allclose([base.tokens, accuracy if base.accuracy is None else base.accuracy], [tokens, accuracy]))


def _aims(run: Run, name: str, anchors: Sequence[str]) -> dict[str, Aim]:
    """Find the weights and alpha of a composition by policy: one or, with effort levels, one for each of them.

    Weights are over these anchors, by row where the composition has routes.
    """
    composition = run.recipe.compositions[name]
    assert isinstance(composition, Joint)
    weights = [composition.weights.get(anchor, 0.0) for anchor in anchors]
    shown = composition.by_tag or composition.weights
    weight_RK = None
    alpha = composition.alpha
    doses: dict[str, float] = {}
    if composition.routes or composition.slots or alpha is None or run.recipe.budgets(name):
        cache = open_cache(run, name)
        if composition.slots or alpha is None:  # as training will solve it
            schedule = make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, name)
            dose = find_dose(run, name, cache, schedule)
            alpha, doses = dose.alpha, dose.levels
        if cache.weight_RK is not None:
            weight_RK = np.zeros((len(cache), len(anchors)), np.float32)
            weight_RK[:, [anchors.index(one) for one in cache.names]] = cache.weight_RK
            weights = [1.0] * len(anchors)
    found = {}
    for slot in composition.slots:
        if slot.level is None or slot.level in composition.levels:
            policy = name if slot.level is None else f"{name}@{slot.level}"
            own = [slot.weights.get(anchor, 0.0) for anchor in anchors]
            found[policy] = Aim(own, doses[slot.level or ""], shown=slot.weights, kl_budget=slot.kl_budget)
    return found or {name: Aim(weights, alpha, weight_RK, shown, composition.kl_budget)}


# Choosing

FACTORS = (0.25, 0.5, 1.0, 2.0)  # of the recipe's own alpha, tried where none are given
GRID = 8  # steps of the weights of two anchors, 4 of more


def usual_grid(
    recipe: Recipe, shares: Sequence[float] | None, grid: int | None, alphas: Sequence[float] | None
) -> tuple[int | None, Sequence[float]]:
    """Give the weights and alphas that are tried, where none are asked for."""
    if shares is None and grid is None:
        grid = GRID if len(recipe.anchors) == 2 else GRID // 2
    return grid, alphas or [usual_alpha(recipe) * factor for factor in FACTORS]


def plan_promising(
    run: Run,
    count: int,
    shares: Sequence[float] | None = None,
    anchor: str | None = None,
    alphas: Sequence[float] | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> list[Planned]:
    """Choose the points of a grid that are worth training: the forecast frontier by AES, then the others by AES."""
    recipe = run.recipe
    grid, alphas = usual_grid(recipe, shares, None, alphas)
    planned = {one.name: one for one in plan_forecast(recipe, shares, anchor, alphas, None, tag, grid)}
    points = [point for point in forecast(run, list(planned.values()), progress) if point.policy in planned]
    trusted = [(point, point.accuracy, point.aes) for point in points if point.trusted and point.reachable]
    known = [
        (point, accuracy, score) for point, accuracy, score in trusted if accuracy is not None and score is not None
    ]
    if not known:
        raise WeaveError(
            f"--forecast: no point is trusted, within KL {REACHED} and has a known accuracy. Give --shares instead"
        )
    front = pareto_front([(accuracy, point.tokens) for point, accuracy, _ in known])
    order = sorted(range(len(known)), key=lambda place: (place not in front, -known[place][2]))
    return [planned[known[place][0].policy] for place in order[:count]]


def weights_text(weights: Mapping[str, Any]) -> str:
    """Write weights in short, by tag where they differ.

    >>> weights_text({"a": 0.5, "b": 0.5}), weights_text({"code": {"a": 1.0}})
    ('a 0.5, b 0.5', 'code: a 1')
    """
    if any(isinstance(value, dict) for value in weights.values()):
        return "; ".join(f"{tag}: {weights_text(table)}" for tag, table in weights.items())
    return ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items() if weight)


def outcome_text(figures: Mapping[str, Any]) -> str:
    """Write accuracy, if it is known, and tokens."""
    known = "" if figures["accuracy"] is None else f"{figures['accuracy']:.1f} % in "
    return f"{known}{figures['tokens']:,.1f} tokens"


def suggest_alpha(run: Run) -> str | None:
    """Describe the alpha with the best forecast AES for the recipe's own weights; None if the cache cannot tell."""
    try:
        joints = {name: one for name, one in run.recipe.written.items() if isinstance(one, Joint) and one.alpha}
        alphas = sorted({one.alpha * factor for one in joints.values() if one.alpha for factor in FACTORS})
        points = forecast(run, plan_forecast(run.recipe, alphas=alphas)) if joints else []
    except WeaveError:  # nothing is cached yet, or a part is gone
        return None
    usable = [one for one in points[1:] if one.trusted and one.reachable and one.method == "joint"]
    scored = [(point.aes, point) for point in usable if point.aes is not None]
    if not scored:
        return None
    score, best = max(scored, key=lambda pair: pair[0])
    own = max((found for found, point in scored if point.policy in joints), default=None)
    others = "" if own is None else f" (the best as the recipe has them: {own:+.2f})"
    return (
        f"forecast from the cache: alpha {best.alpha:.4g} with {weights_text(best.weights)} has the best AES, "
        f"{score:+.2f}{others}; {outcome_text(asdict(best))}"
    )
