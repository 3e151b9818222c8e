"""The paper's cost table (tab. training-cost): a column for each student and number of anchors, in device hours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_weave.report.tables import MISSING
from lightning_weave.runs.costs import SHARED, setting_costs
from lightning_weave.runs.steps import Steps

TRAINING = "Student-only training"
RULES = (3, 6)  # before these lines: what was measured, the parts of it


@dataclass(frozen=True)
class CostColumn:
    """Seconds of one composition of these anchors, with its cache, and online if it was measured."""

    student: str
    anchors: tuple[str, ...]
    parts: dict[str, float]
    online: float | None

    @property
    def offline(self) -> float:
        return sum(self.parts.values())

    @property
    def ratio(self) -> float | None:
        return self.online / self.offline if self.online is not None and self.offline else None


def cost_columns(steps: Steps, ledger: list[dict[str, Any]], student: str) -> list[CostColumn]:
    """Make a column for every set of anchors that a composition was trained with, the smallest first."""
    return [
        CostColumn(
            student,
            one.anchors,
            {**{SHARED[stage]: seconds for stage, seconds in one.cache.items()}, TRAINING: one.train},
            one.online,
        )
        for one in setting_costs(steps, ledger)
    ]


def table_lines(columns: Sequence[CostColumn]) -> list[list[str]]:
    """Write the table as texts, its header first."""
    unit, divisor = ("h", 3600.0) if max(column.offline for column in columns) >= 360 else ("s", 1.0)
    parts = list(dict.fromkeys(part for column in columns for part in column.parts))

    def number(value: float | None, scale: float = divisor) -> str:
        return MISSING if value is None else f"{value / scale:,.2f}"

    return [
        ["Student", *(column.student for column in columns)],
        ["Anchors", *(" + ".join(column.anchors) for column in columns)],
        ["Number of anchors", *(str(len(column.anchors)) for column in columns)],
        [f"Online DOPD, {unit}", *(number(column.online) for column in columns)],
        [f"Lightning Weave, {unit}", *(number(column.offline) for column in columns)],
        ["Online/offline cost ratio", *(number(column.ratio, 1.0) for column in columns)],
        *([part, *(number(column.parts.get(part)) for column in columns)] for part in parts),
    ]
