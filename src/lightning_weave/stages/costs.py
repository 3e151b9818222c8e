"""What a run has cost, from its ledger: by stage, for one composition, and against online training."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_weave.progress import duration
from lightning_weave.run import ROLES, Run
from lightning_weave.store import FOLDER, read_description
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
    """The rows of a ledger: those of the folders that are used, and those of others or of what was removed since."""

    kept: list[dict[str, Any]]
    discarded: list[dict[str, Any]]


def read_spent(run_dir: Path) -> Spent:
    """Read what a run has cost. A row counts unless it names another fingerprint than the folder that is used now.

    A cache may be deleted when students are trained on it: it is part of what they cost.
    """
    spent = Spent([], [])
    fingerprints: dict[Path, str | None] = {}
    for row in read_ledger(run_dir):
        folder = run_dir / row["stage"] / row["name"]
        if not folder.exists():  # a file system without symlinks
            others = folder.parent.glob(f"{folder.name}@*")
            folder = max(others, key=lambda path: path.stat().st_mtime_ns, default=folder)
        if folder not in fingerprints:
            fingerprints[folder] = read_description(folder).get("fingerprint")
        fingerprint = fingerprints[folder]
        deleted = fingerprint is None and not folder.exists() and row["stage"] not in SHARED
        gone = deleted or (fingerprint is not None and row.get("fingerprint", fingerprint) != fingerprint)
        (spent.discarded if gone else spent.kept).append(row)
    return spent


def cost_of(folder: Path, run_dir: Path, rows: list[dict[str, Any]]) -> Cost | None:
    """What it took to make the stage in this folder, however far it came; None where nothing was measured."""
    fingerprint = read_description(folder).get("fingerprint")
    stage, _, name = FOLDER.split(folder.relative_to(run_dir).as_posix())[0].partition("/")

    def is_own(row: dict[str, Any]) -> bool:
        is_same = row["name"] == name and row.get("fingerprint", fingerprint) == fingerprint
        return row["stage"] == stage and (is_same or row["name"].startswith(f"{name}/"))

    return costs([{**row, "name": name} for row in rows if is_own(row)], "name").get((name,))


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


def offline_cost(run: Run, rows: list[dict[str, Any]], anchors: Iterable[str] | None = None) -> Offline | None:
    """What a composition of these anchors (default: all) costs with its cache; None before any is trained."""
    trained = training_seconds(run, rows, "joint")
    if not trained:
        return None
    sides = [run.side(anchor, role) for anchor in anchors or () for role in ROLES]
    models = {run.score_names[side] for side in sides}
    used = [row for row in rows if row["stage"] != "score" or anchors is None or row["name"] in models]
    by_stage = costs(used, "stage")
    cache = {stage: by_stage[(stage,)].seconds if (stage,) in by_stage else 0.0 for stage in SHARED}
    return Offline(cache, fmean(trained.values()), len(trained))


def online_costs(run: Run, rows: list[dict[str, Any]]) -> dict[str, tuple[float, Offline]]:
    """What each online composition cost, and what the same anchors cost offline at the same number of updates."""
    seconds = training_seconds(run, rows, "online")
    compared = {}
    for name in sorted(seconds.keys() & run.recipe.compositions.keys()):
        if offline := offline_cost(run, rows, run.recipe.compositions[name].used):
            compared[name] = (seconds[name], offline)
    return compared


def summary(run: Run, rows: list[dict[str, Any]]) -> list[str]:
    """State what a composition costs: alone, five sharing the cache, and against online training."""
    offline = offline_cost(run, rows)
    if offline is None:
        return []
    one, five = offline.of(1), offline.of(5)
    lines = [
        f"One composition: {duration(one)} ({duration(offline.of(0))} cache + {duration(offline.train)} training)",
        f"Five sharing the cache: {duration(five)}, {duration(five / 5)} each",
    ]
    for name, (live, same) in online_costs(run, rows).items():
        ratios = f"{live / same.of(1):.2f} x offline for one, {5 * live / same.of(5):.2f} x for five"
        lines.append(f"Online ({name}): {duration(live)} = {ratios}")
    return lines


def training_seconds(run: Run, rows: list[dict[str, Any]], method: str) -> dict[str, float]:
    """By composition, those with the recipe's number of updates and, offline, its objective; no legs of a sequence."""
    by_name = costs([row for row in rows if row["stage"] == "train" and row.get("method") == method], "name")
    others = {
        name
        for name, composition in run.recipe.compositions.items()
        if composition.epochs is not None or (method == "joint" and run.objective(name) != run.recipe.train.objective)
    }
    return {name: cost.seconds for (name,), cost in by_name.items() if name not in others and "/" not in name}
