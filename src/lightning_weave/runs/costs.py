"""What a run has cost, from its ledger: by stage, for one composition, and against online training."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.progress import duration
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import recorded
from lightning_weave.store.ledger import read_ledger

SHARED = {"rollout": "Student rollout collection", "reference": "Student-reference scoring", "score": "Anchor scoring"}


@dataclass(frozen=True)
class Cost:
    """What a stage has cost so far, over all its rows of the ledger."""

    seconds: float
    tokens: int
    written: int
    peak_memory: int
    starting: float = 0.0  # device seconds of an engine
    busy: float = 0.0  # with a request to work on

    @property
    def idle(self) -> float | None:
        """The share of the time in which an engine neither started nor had a request; None without one."""
        return 1 - (self.starting + self.busy) / self.seconds if self.starting + self.busy else None


@dataclass(frozen=True)
class Offline:
    """Seconds of the shared cache, by stage, and of training one composition on it, the mean over so many."""

    cache: dict[str, float]
    train: float
    compositions: int

    def of(self, compositions: int) -> float:
        """Seconds of so many compositions that share the cache."""
        return sum(self.cache.values()) + compositions * self.train


@dataclass(frozen=True)
class Spent:
    """The rows of a ledger: those of what is there, and those of what was made again or removed since."""

    kept: list[dict[str, Any]]
    discarded: list[dict[str, Any]]


def read_spent(run_dir: Path) -> Spent:
    """Read what a run has cost. A row belongs to what is there unless it names another fingerprint than the folder.

    A cache may be deleted when students are trained on it: it is part of what they cost.
    """
    spent = Spent([], [])
    fingerprints: dict[Path, str | None] = {}
    for row in read_ledger(run_dir):
        folder = run_dir / row["stage"] / row["name"]
        if folder not in fingerprints:
            fingerprints[folder] = (recorded(folder) or {}).get("fingerprint")
        fingerprint = fingerprints[folder]
        deleted = fingerprint is None and not folder.exists() and row["stage"] not in SHARED
        gone = deleted or (fingerprint is not None and row.get("fingerprint", fingerprint) != fingerprint)
        (spent.discarded if gone else spent.kept).append(row)
    return spent


def cost_of(folder: Path, run_dir: Path, rows: list[dict[str, Any]]) -> Cost | None:
    """What it took to make the stage in this folder, however far it came; None where nothing was measured."""
    fingerprint = (recorded(folder) or {}).get("fingerprint")
    stage, _, name = folder.relative_to(run_dir).as_posix().partition("/")
    own = [
        {**row, "name": name}
        for row in rows
        if row["stage"] == stage
        and (
            row["name"].startswith(f"{name}/")
            or (row["name"] == name and row.get("fingerprint", fingerprint) == fingerprint)
        )
    ]
    return costs(own, "name").get((name,))


def costs(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], Cost]:
    """Add up ledger rows that agree on `keys`."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(row.get(key, "")) for key in keys)].append(row)
    return {
        group: Cost(
            seconds=sum(row["device_seconds"] for row in members),
            tokens=sum(row["tokens"] for row in members),
            written=sum(row["bytes"] for row in members),
            peak_memory=max(row["peak_memory"] for row in members),
            starting=sum(row.get("engine", {}).get("starting", 0.0) for row in members),
            busy=sum(row.get("engine", {}).get("busy", 0.0) for row in members),
        )
        for group, members in groups.items()
    }


def offline_cost(steps: Steps, rows: list[dict[str, Any]], anchors: Iterable[str] | None = None) -> Offline | None:
    """What a composition of these anchors (default: all) costs with its cache; None before any is trained.

    Training is the mean over the joint compositions with the recipe's own number of updates and objective: naive
    runs are not among them.
    """
    compositions = steps.recipe.compositions
    others = {name for name in compositions if steps.objective(name) != steps.recipe.train.objective}
    joint = _training_seconds(steps, rows, "joint")
    trained = {name: seconds for name, seconds in joint.items() if name not in others}
    if not trained:
        return None
    models = None if anchors is None else _models(steps, anchors)
    used = [row for row in rows if row["stage"] != "score" or models is None or row["name"] in models]
    by_stage = costs(used, "stage")
    cache = {stage: by_stage[(stage,)].seconds if (stage,) in by_stage else 0.0 for stage in SHARED}
    return Offline(cache, sum(trained.values()) / len(trained), len(trained))


@dataclass(frozen=True)
class SettingCost:
    """Seconds of one composition of these anchors: its cache by stage, its training, and online if it was measured."""

    anchors: tuple[str, ...]
    cache: dict[str, float]
    train: float
    online: float | None


def setting_costs(steps: Steps, rows: list[dict[str, Any]]) -> list[SettingCost]:
    """What a composition costs by the anchors that it uses, the fewest first; training is the mean over these."""
    compositions = steps.recipe.compositions
    seconds = {method: _training_seconds(steps, rows, method) for method in ("joint", "online")}
    tilted = {
        name: cost
        for name, cost in seconds["joint"].items()
        if name in compositions and steps.objective(name) == steps.recipe.train.objective
    }
    used = {
        name: tuple(anchor for anchor in steps.recipe.anchors if anchor in compositions[name].used)
        for name in compositions
    }
    settings = []
    for anchors in sorted(dict.fromkeys(used[name] for name in tilted), key=len):
        offline = offline_cost(steps, rows, anchors)
        assert offline is not None, anchors
        settings.append(
            SettingCost(
                anchors,
                offline.cache,
                _mean(cost for name, cost in tilted.items() if used[name] == anchors) or 0.0,
                _mean(cost for name, cost in seconds["online"].items() if used.get(name) == anchors),
            )
        )
    return settings


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def online_costs(steps: Steps, rows: list[dict[str, Any]]) -> dict[str, tuple[float, Offline]]:
    """What each online composition cost, and what the same anchors cost offline at the same number of updates."""
    seconds = _training_seconds(steps, rows, "online")
    compared = {}
    for name in sorted(seconds.keys() & steps.recipe.compositions.keys()):
        if offline := offline_cost(steps, rows, steps.recipe.compositions[name].used):
            compared[name] = (seconds[name], offline)
    return compared


def summary(steps: Steps, rows: list[dict[str, Any]]) -> list[str]:
    """State what a composition costs: alone, five sharing the cache, and against online training."""
    offline = offline_cost(steps, rows)
    if offline is None:
        return []
    cache = offline.of(0)
    one = offline.of(1)
    five = offline.of(5)
    lines = [
        f"One composition: {duration(one)} ({duration(cache)} cache + {duration(offline.train)} training)",
        f"Five sharing the cache: {duration(five)}, {duration(five / 5)} each",
    ]
    for name, (live, same) in online_costs(steps, rows).items():
        ratios = f"{live / same.of(1):.2f} x offline for one, {5 * live / same.of(5):.2f} x for five"
        lines.append(f"Online ({name}): {duration(live)} = {ratios}")
    return lines


def training_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["stage"] == "train"]


def _training_seconds(steps: Steps, rows: list[dict[str, Any]], method: str) -> dict[str, float]:
    """By composition, those with the recipe's own number of updates; a leg of a sequence has fewer."""
    by_name = costs([row for row in training_rows(rows) if row.get("method") == method], "name")
    others = {name for name, composition in steps.recipe.compositions.items() if composition.epochs is not None}
    return {name: cost.seconds for (name,), cost in by_name.items() if name not in others and "/" not in name}


def _models(steps: Steps, anchors: Iterable[str]) -> set[str]:
    return {steps.score_names[steps.side(anchor, role)] for anchor in anchors for role in ROLES}
