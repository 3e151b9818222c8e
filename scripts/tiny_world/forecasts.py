"""Forecasts against trained students on tiny worlds: errors, rank correlation, coverage, and choosing by them.

Nothing was tuned on anything but the shipped world with seed 0: the other seeds and worlds are held out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from lightning_weave.bench.summary import combine
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.stages.forecast import forecast
from lightning_weave.store import write_json
from tiny_world.claims import World, load_world

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of brevity
ALPHAS = (0.5, 1.0, 2.0)
SWEEP_ALPHA = 2.0  # the paper's, at which a plain sweep trains all shares
FIGURES = ("accuracy", "tokens", "aes")


def load_grid(world: World, number: int, overrides: Sequence[str]) -> Run:
    """Load the recipe of the demo with all shares at all alphas, for one world and one seed."""
    compositions = {
        f"brevity-{share:g}-alpha-{alpha:g}": {"weights": {"accuracy": 1 - share, "brevity": share}, "alpha": alpha}
        for alpha in ALPHAS
        for share in SHARES
    }
    changes = {"name": "demo-forecast", "compositions": compositions}
    return load_world(world, changes, number, overrides, own_compositions=True)


@dataclass(frozen=True)
class Pair:
    """One composition: its forecast and, with the same keys, what was measured after training."""

    forecast: Mapping[str, Any]
    measured: Mapping[str, float]

    def error(self, figure: str) -> float:
        return float(self.forecast[figure]) - self.measured[figure]

    def is_covered(self, figure: str, deviations: float = 0.0) -> bool:
        """Whether the measured figure lies in the interval, widened by this many standard errors of the evaluation."""
        low, high = self.forecast[f"{figure}_low"], self.forecast[f"{figure}_high"]
        middle, half = (low + high) / 2, (high - low) / 2
        return bool(
            abs(self.measured[figure] - middle) <= np.hypot(half, deviations * self.measured[f"{figure}_error"])
        )


def compare_run(run: Run) -> list[Pair]:
    """Forecast every composition from the cache and read its evaluation. Also written to report/forecast.json."""
    evaluated = summaries(run)
    base = evaluated["base"]
    pairs = []
    for point in forecast(run):
        if point.policy == "base" or point.policy not in evaluated:
            continue
        found = combine(evaluated[point.policy], base, resamples=1000)
        assert found.comparison is not None
        change = found.comparison.average
        measured = {"accuracy": found.accuracy, "tokens": found.tokens, "aes": change.aes.estimate}
        for figure in FIGURES:  # of the difference to the base, which is what is forecast
            interval = getattr(change, figure)
            measured[f"{figure}_error"] = (interval.high - interval.low) / 2 / 1.96
        pairs.append(Pair(point.to_dict(), measured))
    write_json(run.directory / "report" / "forecast.json", [vars(pair) for pair in pairs])
    return pairs


def rank_correlation(pairs: Sequence[Pair], figure: str) -> float:
    """Compute Spearman's correlation between forecast and measured."""
    return float(spearmanr([pair.forecast[figure] for pair in pairs], [pair.measured[figure] for pair in pairs])[0])


def summary_table(runs: Mapping[str, Sequence[Pair]]) -> str:
    """Markdown of errors, rank correlation and coverage of every run, over the trusted points."""
    lines = [
        "| world and seed | trusted points | accuracy: mean error | bias | rank correlation | in interval | "
        "tokens: mean error | bias | rank correlation | in interval | AES: mean error | rank correlation |",
        "| --- |" + " ---: |" * 11,
    ]
    for name, pairs in {**runs, "all": [pair for one in runs.values() for pair in one]}.items():
        trusted = [pair for pair in pairs if pair.forecast["trusted"]]
        if len(trusted) < 2:
            lines.append(f"| {name} | {len(trusted)} of {len(pairs)} |" + " |" * 10)
            continue
        cells = [f"{len(trusted)} of {len(pairs)}"]
        for figure, form in (("accuracy", ".1f"), ("tokens", ".1f"), ("aes", ".2f")):
            errors = np.array([pair.error(figure) for pair in trusted])
            cells.append(f"{np.abs(errors).mean():{form}}")
            if figure != "aes":
                cells.append(f"{errors.mean():+{form}}")
            own = [[pair for pair in one if pair.forecast["trusted"]] for one in runs.values()]
            within = [rank_correlation(one, figure) for one in (own if name == "all" else [trusted]) if len(one) > 1]
            cells.append(f"{np.mean(within):.2f}")  # over all runs: the mean of theirs
            if figure != "aes":
                cells.append(f"{np.mean([pair.is_covered(figure, 1.96) for pair in trusted]):.0%}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def points_table(runs: Mapping[str, Sequence[Pair]]) -> str:
    """Markdown of every composition, averaged over the runs."""
    lines = [
        "| brevity share | alpha | forecast accuracy | trained | forecast tokens | trained | forecast AES | trained | "
        "effective samples, least | trusted |",
        "|" + " ---: |" * 10,
    ]
    for several in zip(*runs.values(), strict=True):
        cells = [f"{several[0].forecast['weights'].get('brevity', 0):g}", f"{several[0].forecast['alpha']:g}"]
        for figure, form in (("accuracy", ".1f"), ("tokens", ".1f"), ("aes", ".2f")):
            for side in ("forecast", "measured"):
                cells.append(f"{np.mean([getattr(pair, side)[figure] for pair in several]):{form}}")
        cells.append(f"{min(pair.forecast['effective_samples'] for pair in several):.0f}")
        cells.append(f"{sum(pair.forecast['trusted'] for pair in several)} of {len(several)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_table(runs: Mapping[str, Sequence[Pair]]) -> str:
    """Markdown: the trained AES of the point that the forecast chooses, and the best of a five-point sweep."""
    lines = [
        "| world and seed | chosen by forecast (1 training) | AES | best of a sweep (5 trainings) | AES | best |",
        "| --- | --- | ---: | --- | ---: | ---: |",
    ]
    gains = []
    for name, pairs in runs.items():
        trusted = [pair for pair in pairs if pair.forecast["trusted"] and pair.forecast["reachable"]]
        swept = [pair for pair in pairs if pair.forecast["alpha"] == SWEEP_ALPHA]
        if not trusted or not swept:
            continue
        chosen = max(trusted, key=lambda pair: float(pair.forecast["aes"]))
        best = max(swept, key=lambda pair: pair.measured["aes"])
        scores = [chosen.measured["aes"], best.measured["aes"], max(pair.measured["aes"] for pair in pairs)]
        gains.append(scores)
        names = [pair.forecast["policy"] for pair in (chosen, best)]
        lines.append(f"| {name} | {names[0]} | {scores[0]:.2f} | {names[1]} | {scores[1]:.2f} | {scores[2]:.2f} |")
    means = np.mean(gains, axis=0) if gains else [float("nan")] * 3
    lines.append(f"| mean | | {means[0]:.2f} | | {means[1]:.2f} | {means[2]:.2f} |")
    return "\n".join(lines)


def trained_page(runs: Mapping[str, Sequence[Pair]], command: str) -> str:
    """Markdown of all tables."""
    count = len(next(iter(runs.values())))
    several = (
        f"{len(runs)} run{'s' * (len(runs) > 1)} of {count} compositions ({len(SHARES)} shares, {len(ALPHAS)} alphas)"
    )
    return (
        f"Made by `{command}`: {several}.\n\n{summary_table(runs)}\n\n"
        "A bias is forecast minus trained. In interval: within the 95 % interval of the forecast, widened by the\n"
        "standard error of the evaluation. Points that are not trusted are left out.\n\n"
        f"{points_table(runs)}\n\n{choice_table(runs)}\n"
    )
