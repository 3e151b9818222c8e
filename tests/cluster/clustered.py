"""What the tests on a Ray cluster share: a small world, and a place to act from while it is woven."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tiny
from lightning_weave.progress import Bar, Progress


def world(root: Path) -> dict:
    """A recipe with 12 shards and 6 blocks of evaluation."""
    recipe = tiny.make_world(root / "models", prompts=24)
    problems = tiny.save_prompts(root / "problems.jsonl", 6, seed=9)
    recipe["runs"] = str(root / "runs")
    recipe["rollout"] = {"responses": 4, "max_tokens": 24, "prompts_per_shard": 2}
    recipe["eval"] = {"benchmarks": [f"file:{problems}"], "samples": 4, "max_tokens": 12, "chat": False, "block": 4}
    return recipe


class Watching(Progress):
    """Counts units as they are finished and keeps what is said; acts on the third unit of a bar, and on a death."""

    def __init__(
        self, third: Mapping[str, Callable[[], None]] | None = None, on_death: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(quiet=True)
        self.third = third or {}
        self.on_death = on_death
        self.counts: dict[str, int] = {}
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)
        if "a rank died" in message:
            self.on_death()

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        watching = self

        class Counting(Bar):
            def show(self) -> None:
                watching.counts[what] = watching.counts.get(what, 0) + 1
                if watching.counts[what] == 3 and what in watching.third:
                    watching.third[what]()

        yield Counting(what, total, unit)
