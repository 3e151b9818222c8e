"""Put the further parts of the experiment into the docs:

python scripts/real/more.py forecast FILE      # what `lweave forecast --json` printed, against the page's trained rows
python scripts/real/more.py contrast RUN ...   # *hinted* with and without contrast, one run per training seed
python scripts/real/more.py effort RUN ...     # one student with effort levels, one run per training seed
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from page import BRIEF_SHARE, ROOT, against, put, read_policies, results, shown
from scipy.stats import spearmanr

MODELS = ROOT / "docs" / "appendix" / "real-models.md"
LEVELS = ROOT / "docs" / "appendix" / "effort-levels.md"
ASKED = {
    "effort@high": "level `high`",
    "effort@medium": "level `medium`",
    "effort@low": "level `low`",
    "effort": "no level (trained as `medium`)",
    "effort-unknown": "a level that does not exist, `extreme`",
    "effort-said-high": "`high`, in the user's turn",
    "effort-said-low": "`low`, in the user's turn",
}
FIGURES = {"accuracy": 1, "tokens": 1, "aes": 2}  # and their digits


def trained(page: str) -> dict[str, dict[str, float]]:
    """Read the rows of the page's first table: accuracy, tokens and AES, and standard errors of what differs."""
    found: dict[str, dict[str, float]] = {}
    table = page.partition("## Results")[2].partition("![")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) < 9 or not re.fullmatch(r"[\d.]+", cells[2]):
            continue
        row = {"accuracy": float(cells[2]), "tokens": float(cells[5]), "aes": 0.0}
        for figure, cell in zip(FIGURES, (cells[4], cells[6], cells[8]), strict=True):
            if interval := re.findall(r"[+-][\d.]+", cell):
                low, high = map(float, interval[1:])
                row[f"{figure}_error"] = (high - low) / 2 / 1.96
                row["aes"] = float(interval[0]) if figure == "aes" else row["aes"]
        found[cells[0]] = row
    return found


def forecast(file: Path) -> Iterator[str]:
    """Compare a forecast with what was trained."""
    measured = trained(MODELS.read_text(encoding="utf-8"))
    points = {one["policy"]: one for one in json.loads(file.read_text())}
    pairs = [(points[name], measured[name]) for name in BRIEF_SHARE if name in points and name in measured]
    heads = " | ".join(f"{head}: forecast | trained" for head in ("accuracy, %", "tokens", "AES"))
    yield f"| composition | alpha | {heads} | samples | trusted from |"
    yield f"| --- | {' | '.join(['---:'] * 9)} |"
    for point, found in pairs:
        cells = [point["policy"], f"{point['alpha']:.3g}"]
        for figure, digits in FIGURES.items():
            estimate, low, high = (f"{point[key]:.{digits}f}" for key in (figure, f"{figure}_low", f"{figure}_high"))
            cells += [f"{estimate} [{low}, {high}]", f"{found[figure]:.{digits}f}"]
        cells.append(f"{point['effective_samples']:.0f}{'' if point['trusted'] else ' ?'}")
        dose = point["largest_trusted"]
        cells.append("" if dose is None else f"alpha {dose['alpha']:.3g}, KL {dose['kl']:.2g}")
        yield f"| {' | '.join(cells)} |"
    yield "\n| | mean error | bias | rank correlation | in interval |\n| --- | ---: | ---: | ---: | ---: |"
    for figure, digits in FIGURES.items():
        values = np.array([[point[figure], found[figure]] for point, found in pairs])
        errors = values[:, 0] - values[:, 1]
        covered = sum(
            abs(found[figure] - (point[f"{figure}_low"] + point[f"{figure}_high"]) / 2)
            <= np.hypot((point[f"{figure}_high"] - point[f"{figure}_low"]) / 2, found[f"{figure}_error"])
            for point, found in pairs
        )
        order = spearmanr(values[:, 0], values[:, 1]).statistic
        yield (
            f"| {figure} | {np.abs(errors).mean():.{digits}f} | {errors.mean():+.{digits}f} | {order:.2f} "
            f"| {covered} of {len(pairs)} |"
        )


def contrast(runs: Sequence[Path]) -> Iterator[str]:
    """Results of both students, and their paired difference."""
    names = ("base", "hinted", "contrast")
    for benchmark, title in (("same", "The trained kinds, 96 problems"), ("other", "The other two kinds, 48 problems")):
        policies = read_policies(runs, benchmark, names)
        yield f"{title}:\n"
        yield from results(policies)
        found = against(policies["contrast"], policies["hinted"], policies["base"])
        yield (
            f"\n*contrast* minus *hinted*: accuracy {shown(found.accuracy)}, tokens {shown(found.tokens)}, "
            f"AES {shown(found.aes, 2)}.\n"
        )


def effort(runs: Sequence[Path]) -> Iterator[str]:
    """Accuracy and tokens at every level, and whether they are in the order of levels; only what is evaluated."""
    found = {name: read_policies(runs, name, ["base", *ASKED]) for name in ("same", "other", "everyday")}
    titles = {"same": "trained kinds", "other": "other kinds", "everyday": "everyday"}
    columns = [
        (figure, name, f"{titles[name]}: {title}")
        for name in found
        for figure, title in (("accuracy", "right, %"), ("tokens", "tokens"))
        if "effort@low" in found[name] and (figure, name) != ("accuracy", "everyday")
    ]
    yield f"| asked with | {' | '.join(title for *_, title in columns)} |"
    yield f"| --- | {' | '.join(['---:'] * len(columns))} |"
    for policy in ("base", *ASKED):
        means = [found[name][policy].means if policy in found[name] else None for _, name, _ in columns]
        if any(means):
            cells = [
                "" if one is None else f"{getattr(one, figure).mean():.1f}"
                for one, (figure, *_) in zip(means, columns, strict=True)
            ]
            yield f"| {ASKED.get(policy, 'the base, no level')} | {' | '.join(cells)} |"
    for one, two in (("high", "medium"), ("medium", "low"), ("high", "low")):
        cells = []
        for figure, name, _ in columns:
            policies = found[name]
            difference = against(
                policies[f"effort@{one}"], policies[f"effort@{two}"], policies.get("base", policies["effort"])
            )
            cells.append(shown(getattr(difference, figure)))
        yield f"| `{one}` minus `{two}` | {' | '.join(cells)} |"


def main(part: str, runs: Sequence[Path]) -> None:
    """Rewrite one part."""
    match part:
        case "forecast":
            put(MODELS, "\n".join(forecast(runs[0])), "forecast")
        case "contrast":
            put(MODELS, "\n".join(contrast(runs)), "contrast")
        case "effort":
            put(LEVELS, "\n".join(effort(runs)), "smollm2")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
