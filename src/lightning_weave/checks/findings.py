"""The result of a check: a verdict, a sentence for people, figures for machines. And which stages are pending."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_weave.config import Threshold
from lightning_weave.errors import InputError
from lightning_weave.run import Kind, Run

Level = Literal["ok", "note", "warning", "error"]  # error: it cannot work, or the work would be wasted
FEW = 32  # rows or updates; with fewer nothing is stopped, because chance would decide


@dataclass(frozen=True)
class Bounds:
    """The thresholds at which a figure warns and at which it stops a run; false: never."""

    warn: Threshold
    stop: Threshold
    below: bool = False  # small figures are bad
    share: bool = True

    @property
    def words(self) -> str:
        """Both thresholds as text.

        >>> Bounds(0.5, 0.95).words, Bounds(1.05, False, share=False).words, Bounds(False, 0.001, below=True).words
        ('warns above 50 %, stops above 95 %', 'warns above 1.05', 'stops below 0.1 %')
        """
        side = "below" if self.below else "above"
        phrases = [
            f"{verb} {side} {f'{100 * limit:g} %' if self.share else f'{limit:g}'}"
            for verb, limit in (("warns", self.warn), ("stops", self.stop))
            if limit is not False
        ]
        return ", ".join(phrases) or "off"

    def judge(self, value: float, count: int) -> Level:
        """Compare a figure of so many rows with both thresholds.

        >>> some = Bounds(0.5, 0.9)
        >>> some.judge(0.6, 100), some.judge(0.95, 100), some.judge(0.95, 3), Bounds(False, False).judge(0.95, 100)
        ('warning', 'error', 'warning', 'ok')
        """
        warns, stops = (
            limit is not False and (value < limit if self.below else value > limit) for limit in (self.warn, self.stop)
        )
        return "error" if stops and count >= FEW else "warning" if warns or stops else "ok"


@dataclass(frozen=True)
class Finding:
    """One line of `lweave doctor`, or a message of `lweave run`."""

    about: str  # a dotted key of the recipe
    check: str
    verdict: Level
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    judged: bool = False  # an error that `lweave run --force` overrides
    bounds: Bounds | None = None  # of [checks], where a figure was compared with them

    @property
    def line(self) -> str:
        """The text after its key."""
        return self.text if self.text.startswith(self.about) else f"{self.about}: {self.text}"


def visible(text: str) -> str:
    """Escape what a terminal would interpret.

    >>> visible("a\\n\\x1b[31m\\u202eb é 数")
    'a\\\\n\\\\x1b[31m\\\\u202eb é 数'
    """
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode() for char in text
    )


def percent(share: float) -> str:
    """Format a share; 99.996 % is not rounded to 100 %, nor 0.004 % to 0 %.

    >>> percent(1.0), percent(0.99996), percent(0.5), percent(0.00004), percent(0.0)
    ('100 %', '99.99 %', '50.0 %', '0.01 %', '0 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    value = 100 * share
    if value > 99.9 or value < 0.1:
        return f"{min(max(value, 0.01), 99.99):.2f} %"
    return f"{value:.1f} %"


def listed(words: Iterable[str], most: int = 8) -> str:
    """List the first few and count the rest.

    >>> listed(["a", "b"]), listed("abc", most=2)
    ('a, b', 'a, b and 1 more')
    """
    items = list(words)
    rest = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def is_pending(run: Run, kind: Kind, *names: Any) -> bool:
    """Whether a stage is not complete, or its models or data cannot be read, which `validate` reports."""
    try:
        return not run.stage(kind, *names).complete
    except InputError:
        return True


def pending_compositions(run: Run) -> list[str]:
    """The compositions that are not trained yet."""
    return [name for name in run.recipe.compositions if is_pending(run, "train", name)]


def pending_anchors(run: Run) -> list[str]:
    """The anchors that are not scored yet, or that a pending composition loads while it trains."""
    compositions = [run.recipe.compositions[name] for name in pending_compositions(run)]
    pending = {anchor for composition in compositions if composition.samples for anchor in composition.used}
    for anchor in run.recipe.anchors if run.needs_cache else ():
        try:
            if not all(stage.complete for stage in run.scores_of(anchor)):
                pending.add(anchor)
        except InputError:
            pending.add(anchor)
    return [anchor for anchor in run.recipe.anchors if anchor in pending]


def needs_prompts(run: Run) -> bool:
    """Whether prompts have still to be built or sampled from."""
    if run.needs_cache and is_pending(run, "rollout"):
        return True
    online = any(run.recipe.compositions[name].method == "online" for name in pending_compositions(run))
    return online and is_pending(run, "prompts")
