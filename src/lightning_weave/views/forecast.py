"""`lweave forecast`: print the points, choose a composition by a goal, and add it to a recipe."""

import json
import math
import operator
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.maths.metrics import pareto_front
from lightning_weave.prompts import EFFORT_VARIABLE
from lightning_weave.run import Run
from lightning_weave.stages.forecast import (
    REACHED,
    TRUSTED,
    not_forecast,
    outcome_text,
    read_points,
    weights_text,
)
from lightning_weave.stages.realised import describe_realised, realise, realised_table
from lightning_weave.store import write_atomic
from lightning_weave.views.keys import dotted_key, toml_value

ForecastRow = dict[str, Any]  # as `run.forecast()` returns it
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
LEAST_TOKENS = 3  # a limit below is a share of the base's tokens
BETTER = {"aes": 1, "accuracy": 1, "tokens": -1, "kl": -1}  # whether more is better
LEVEL_NAMES = {  # by how many there are, the longest responses first
    2: ("high", "low"),
    3: ("high", "medium", "low"),
    4: ("high", "medium", "low", "minimal"),
    5: ("max", "high", "medium", "low", "minimal"),
}


@dataclass(frozen=True)
class Goal:
    """One part of a goal: a figure to make as good as possible or, with a comparison, a limit for it."""

    figure: str
    comparison: str = ""
    value: float = 0.0
    relative: bool = False  # to the base: tokens as a share of the base's, others as a difference

    def is_met(self, point: ForecastRow, base: ForecastRow) -> bool:
        """Compare the forecast of a point with the limit."""
        limit = self.value
        if self.relative:
            limit = base[self.figure] * limit if self.figure == "tokens" else base[self.figure] + limit
        return bool(COMPARE[self.comparison](point[self.figure], limit))


def parse_goals(texts: Sequence[str]) -> list[Goal]:
    """Read goals as they are typed.

    >>> parse_goals(["aes and tokens <= 0.6"])[1]
    Goal(figure='tokens', comparison='<=', value=0.6, relative=True)
    >>> parse_goals(["accuracy >= base - 1"])
    [Goal(figure='accuracy', comparison='>=', value=-1.0, relative=True)]
    >>> [(goal.value, goal.relative) for goal in parse_goals(["tokens <= 60 %, tokens <= 200"])]
    [(0.6, True), (200.0, False)]
    """
    goals = []
    for text in (part.strip() for typed in texts for part in re.split(r"\band\b|,", typed)):
        found = re.fullmatch(
            r"(aes|accuracy|tokens|kl)(?:\s*(<=|>=|<|>)\s*(base)?\s*(?:([+-])?\s*(\d*\.?\d+)\s*(%)?)?)?", text
        )
        if found is None or (found[2] and not found[3] and not found[5]) or (found[3] and found[5] and not found[4]):
            raise InputError(
                f"--goal {text!r}: must be aes, accuracy, tokens or kl, alone or with a limit, such as "
                '"tokens <= 0.6" (of the base), "accuracy >= base - 1" or "kl <= 0.1"'
            )
        figure, comparison, base, sign, number, percent = found.groups()
        value = float(number or 0) * (-1 if sign == "-" else 1)
        relative = bool(base)
        if figure == "tokens" and comparison:
            if base:
                raise InputError(f'--goal {text!r}: write tokens as a share of the base, such as "tokens <= 0.6"')
            value = value / 100 if percent else value
            relative = bool(percent) or value < LEAST_TOKENS
        elif figure == "accuracy" and comparison and not base and 0 < value <= 1:
            raise InputError(f"--goal {text!r}: accuracy is in percent; write {100 * value:g} instead of {value:g}")
        goals.append(Goal(figure, comparison or "", value, relative))
    return goals


def best(points: Sequence[ForecastRow], goals: Sequence[Goal]) -> ForecastRow:
    """Choose the trusted point that meets all limits and is best by the first goal without one.

    Only targets that offline training reaches are chosen, unless a goal limits kl itself.
    If all goals are limits: the most accurate if they limit tokens, the shortest if they limit accuracy, else by AES.
    """
    base, *others = points
    limited = {goal.figure for goal in goals if goal.comparison}
    implied = "accuracy" if "tokens" in limited and "accuracy" not in limited else "aes"
    implied = "tokens" if limited == {"accuracy"} or base[implied] is None else implied
    order = next((goal.figure for goal in goals if not goal.comparison), implied)
    if not base["trusted"]:
        raise WeaveError(
            f"--goal: even the base has only {base['effective_samples']:.0f} effective samples of the cache ({TRUSTED} "
            "are needed). Give --temperature and --top-p as the cache was sampled, or raise rollout.responses"
        )
    if unknown := [figure for figure in (order, *limited) if base[figure] is None]:
        why = "no prompt has a known answer" if base["accuracy"] is None else "the base has no right answer"
        raise InputError(f"--goal: {unknown[0]} is not known, as {why}. Choose by tokens or kl")
    trusted = [point for point in others if point["trusted"] and (point["reachable"] or "kl" in limited)]
    fitting = [point for point in trusted if all(goal.is_met(point, base) for goal in goals if goal.comparison)]
    if not fitting:
        raise WeaveError(
            f"none of {len(others)} points is trusted, within KL {REACHED} and meets the goal. Try others: --grid 8, "
            '--alphas 0.5,1,2,4; or set another limit with "kl <= 1"'
        )
    return max(fitting, key=lambda point: BETTER[order] * point[order])


def composition_toml(point: ForecastRow) -> str:
    """Write the lines of a recipe that make a point a composition."""
    weights, budget = point["weights"], point["kl_budget"]
    tables = [table for table in weights.values() if isinstance(table, dict)] or [weights]
    lines = [
        f"[{dotted_key('compositions', point['policy'].replace('@', '-'))}]",
        f"weights = {toml_value(weights)}",
        f"alpha = {float(format(point['alpha'], '.6g'))!r}" if budget is None else f"kl_budget = {budget!r}",
    ]
    if not all(math.isclose(sum(table.values()), 1, abs_tol=1e-6) for table in tables):
        lines.append("normalize = false")
    if any(weight < 0 for table in tables for weight in table.values()):
        lines.append("allow_negative = true")
    return "\n".join([*lines, ""])


def choose(
    run: Run, points: Sequence[ForecastRow], goals: Sequence[Goal], recipe: str | None, console: Console
) -> None:
    """Print the best composition as lines to paste, and add them to a recipe file if one is given."""
    point = best(points, goals)
    known = point["policy"] in run.recipe.compositions
    score = "" if point["aes"] is None else f", AES {point['aes']:+.2f}"
    found = f"{point['policy']}: {outcome_text(point)}{score}"
    lines = f"It is in the recipe: compositions.{point['policy']}" if known else f"\n{composition_toml(point)}"
    console.print(f"\nBest by this goal: {found}\n{lines}", markup=False, highlight=False, soft_wrap=True)
    if recipe is not None and not known:
        _write(recipe, point["policy"].replace("@", "-"), composition_toml(point), console)


def _write(recipe: str, name: str, lines: str, console: Console) -> None:
    text = "added to" if add_composition(Path(recipe), name, lines) else "already in"
    console.print(f"compositions.{name} is {text} {recipe}", markup=False, soft_wrap=True)


def choose_levels(points: Sequence[ForecastRow], count: int) -> dict[str, ForecastRow]:
    """Choose effort levels on the forecast frontier, the longest first: the most accurate below evenly spaced lengths.

    Only trusted points that offline training reaches are chosen, as by a goal.
    """
    if points[0]["accuracy"] is None:
        raise InputError("--levels: no prompt has a known answer, so there is no frontier. Add answers to the prompts")
    usable = {
        (point["accuracy"], point["tokens"]): point
        for point in points[1:]
        if point["trusted"] and point["reachable"] and point["method"] == "joint"
        if not any(isinstance(weight, dict) or weight < 0 for weight in point["weights"].values())
        if math.isclose(sum(point["weights"].values()), 1)
    }
    front = sorted(list(usable)[place] for place in pareto_front(list(usable)))  # accuracy and tokens both rise
    if len(front) < count:
        raise WeaveError(
            f"--levels {count}: only {len(front)} of {len(points) - 1} points are trusted, within KL {REACHED} and on "
            "the frontier. Try fewer levels, or more points: --grid 16, --alphas 0.5,1,2,4"
        )
    shortest, longest = front[0][1], front[-1][1]
    spacing = (longest - shortest) / (count - 1)
    chosen = []
    for step in range(count):  # a tenth of the spacing is no difference in length, but may be one in accuracy
        near = [one for one in front if one[1] <= shortest + (step + 0.1) * spacing] or front[:1]
        chosen.append(near[-1])
        front.remove(near[-1])
    longest_first = sorted(chosen, reverse=True)
    return {name: usable[one] for name, one in zip(LEVEL_NAMES[count], longest_first, strict=True)}


def show_levels(run: Run, levels: dict[str, ForecastRow], recipe: str | None, console: Console) -> None:
    """Print effort levels as a composition to paste, and add them to a recipe file if one is given."""
    template = run.student.tokenizer.chat_template or ""
    control = {"prefix": "Effort {level}. "}
    if run.recipe.prompts.chat:
        has_variable = re.search(rf"\b{EFFORT_VARIABLE}\b", str(template))
        control = {"variable": EFFORT_VARIABLE} if has_variable else {"system": "Reasoning effort: {level}"}
    lines = ["[compositions.effort]"]
    for name, point in levels.items():
        weights = {anchor: weight for anchor, weight in point["weights"].items() if weight}
        level = toml_value({**weights, "alpha": float(f"{point['alpha']:.6g}")})
        lines.append(f"levels.{name} = {level} # {point['accuracy']:.1f} % in {point['tokens']:,.1f} tokens")
    lines += [f'default = "{list(levels)[len(levels) // 2]}"', f"control = {toml_value(control)}", ""]
    console.print("\n" + "\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if recipe is not None:
        _write(recipe, "effort", "\n".join(lines), console)


def add_composition(recipe: Path, name: str, lines: str) -> bool:
    """Append a composition to a recipe file, leaving the rest of it as it is; False if the file has it already."""
    text = recipe.read_text(encoding="utf-8")
    before = tomllib.loads(text).get("compositions", {})
    wanted = tomllib.loads(lines)["compositions"][name]
    if name in before:
        usual = {"alpha": 2.0, "method": "joint"}
        if {**usual, **before[name]} == {**usual, **wanted}:
            return False
        raise InputError(f"{recipe}: compositions.{name} exists with other content. Rename it, or remove it")
    longer = f"{text.rstrip()}\n\n{lines}"
    try:
        tomllib.loads(longer)
    except tomllib.TOMLDecodeError:
        raise InputError(f"{recipe}: compositions are written in one line, so nothing can be added. Paste it") from None
    write_atomic(recipe, longer.encode())
    return True


def show(run: Run, points: Sequence[ForecastRow], console: Console, as_json: bool) -> None:
    """Print the points as a table, with notes about what cannot be trusted or forecast; or as JSON."""
    if as_json:
        print(json.dumps(points, indent=1, default=float))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("Policy", overflow="fold")
    for name in ("Weights", "Alpha", "Accuracy", "Tokens", "AES", "KL", "Samples"):
        table.add_column(name, justify="left" if name == "Weights" else "right", no_wrap=name != "Weights")
    for point in points:
        table.add_row(
            point["policy"],
            weights_text(point["weights"]),
            "" if point["alpha"] is None else f"{point['alpha']:.4g}",
            _with_interval(point, "accuracy", ".1f"),
            _with_interval(point, "tokens", ",.1f"),
            _with_interval(point, "aes", ".2f"),
            f"{point['kl']:.3g}",
            f"{point['effective_samples']:,.0f}{'' if point['trusted'] else ' ?'}",
        )
    console.print(table, markup=False)
    lines = ["In brackets: 95 % interval. KL: nats per decision. Samples: effective; ? means not trusted."]
    base = points[0]
    if base["anchored"]:
        lines.append("Accuracy and tokens: the evaluation of the base plus the forecast difference from it.")
    if base["accuracy"] is None:
        lines.append("No prompt has a known answer: only tokens and KL are forecast.")
    if far := sum(point["trusted"] and not point["reachable"] for point in points[1:]):
        lines.append(
            f"{far} trusted point{'s ask' if far > 1 else ' asks'} for more than {REACHED} nats per decision, which "
            "offline training may not reach: refresh helps. --goal leaves them out unless it limits kl"
        )
    if not base["trusted"]:
        lines.append(
            f"No point is trusted: with the sampling of the evaluation, even the base has only "
            f"{base['effective_samples']:.0f} effective samples of the cache ({TRUSTED} are needed). Try --temperature "
            f"{run.recipe.rollout.temperature:g} --top-p 1, as in the rollout, and compare with the base"
        )
    seen = set()
    for point in points[1:]:
        dose, direction = point["largest_trusted"], weights_text(point["weights"])
        if dose is not None and direction not in seen:
            seen.add(direction)
            points_moved = "" if dose["points_per_nat"] is None else f"{dose['points_per_nat']:+.1f} points and "
            moved = f"{points_moved}{dose['tokens_per_nat']:+,.1f} tokens per nat there"
            what = f"alpha {dose['alpha']:.3g}, {outcome_text(dose)} at KL {dose['kl']:.3g}"
            lines.append(f"{direction}: trusted down to {what}; {moved}")
    for name, composition in run.recipe.written.items():
        if why := not_forecast(composition):
            lines.append(f"{name} ({composition.method}) is not forecast: {why}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def show_realised(run: Run, records: Sequence[dict[str, Any]], console: Console, as_json: bool) -> None:
    """Print what training made of each target, with what to try; or as JSON."""
    if as_json:
        print(json.dumps(records, indent=1, default=float))
        return
    results = realise(run, read_points(run))
    head, *rows = realised_table(results)
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
    console.print("\n".join(describe_realised(results)), markup=False, highlight=False, soft_wrap=True)


def _with_interval(point: ForecastRow, key: str, form: str) -> str:
    value, low, high = (point[name] for name in (key, f"{key}_low", f"{key}_high"))
    if value is None or math.isnan(value):
        return ""
    interval = f"{low:{form}}, {high:{form}}"
    return f"{value:{form}}" if f"{value:{form}}, {value:{form}}" == interval else f"{value:{form}} [{interval}]"
