"""Samples of a benchmark: one line of samples.jsonl each, made in blocks that are the unit of resume.

A block is a fixed list of (problem, sample) pairs, always sampled as one batch, and lives in a file of its own until
all are there; so a run that was killed and resumed, or shared among ranks, writes the very file of one that was not.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_weave.errors import CorruptData
from lightning_weave.store.files import write_atomic
from lightning_weave.types import FinishReason

SampleKey = tuple[int, int]  # (problem, sample), both counted from 0


@dataclass(frozen=True)
class Sample:
    """One response to one problem, graded."""

    problem: str  # id
    sample: int
    seed: int
    tokens: int  # generated, as drawn
    finish: FinishReason
    text: str
    answer: str | None  # as extracted
    correct: bool
    why: str
    cuts: dict[int, int] = field(default_factory=dict)  # token budget -> characters of `text` it pays for
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


def blocks(n_problems: int, n_samples: int, block_size: int) -> list[list[SampleKey]]:
    """Cut all (problem, sample) pairs into blocks, problem by problem.

    >>> blocks(2, 2, 3)
    [[(0, 0), (0, 1), (1, 0)], [(1, 1)]]
    """
    pairs = [(problem, sample) for problem in range(n_problems) for sample in range(n_samples)]
    return [pairs[start : start + block_size] for start in range(0, len(pairs), block_size)]


def cut_points(ids: Sequence[int], decode: Callable[[list[int]], str], budgets: Iterable[int]) -> dict[int, int]:
    """Note how far each token budget reaches into the text, from the ids as drawn.

    A budget may end within a character: only what both spellings share is counted. Budgets that pay for the whole
    response are left out.
    """
    text = decode(list(ids))
    reach = {budget: decode(list(ids[:budget])) for budget in sorted(budgets) if budget < len(ids)}
    return {budget: _shared(text, part) for budget, part in reach.items()}


def _shared(text: str, part: str) -> int:
    if text.startswith(part):
        return len(part)
    return next((at for at, (one, two) in enumerate(zip(text, part, strict=False)) if one != two), len(text))


def to_line(sample: Sample) -> str:
    """Write a sample as one line of JSON."""
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def from_line(line: str) -> Sample:
    """Read a sample back from its line."""
    fields = json.loads(line)
    return Sample(**{**fields, "cuts": {int(budget): cut for budget, cut in fields["cuts"].items()}})


def read_samples(path: Path) -> Iterator[Sample]:
    """Read samples.jsonl line by line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_line(line)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptData(
                    f"{path}:{number}: not a sample ({error}). Delete the file and run eval again."
                ) from error


def block_path(folder: Path, number: int) -> Path:
    """Name the file of a block."""
    return folder / f"{number:05d}.jsonl"


def write_block(folder: Path, number: int, samples: Iterable[Sample]) -> None:
    """Store a finished block; until the last instant it does not exist."""
    write_atomic(block_path(folder, number), "".join(map(to_line, samples)).encode())


def pending_blocks(folder: Path, count: int) -> list[int]:
    """List the blocks that are still to be sampled."""
    return [number for number in range(count) if not block_path(folder, number).exists()]


def merge_blocks(folder: Path, count: int, target: Path) -> None:
    """Join all blocks, in their order, into samples.jsonl."""
    write_atomic(target, b"".join(block_path(folder, number).read_bytes() for number in range(count)))
