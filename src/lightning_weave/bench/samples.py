"""Samples of a benchmark: one line of samples.jsonl each, drawn in blocks that are the unit of resume.

A block is a fixed list of (problem, sample) pairs, always sampled as one batch and stored in its own file until all
blocks are done. So a run that was killed and resumed, or split among ranks, writes the same bytes as any other.
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
    tokens: int  # number of generated tokens
    finish: FinishReason
    text: str
    answer: str | None  # as extracted from the text
    correct: bool
    why: str
    cuts: dict[int, int] = field(default_factory=dict)  # token budget -> characters of `text` within it
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


def blocks(n_problems: int, n_samples: int, block_size: int) -> list[list[SampleKey]]:
    """Split all (problem, sample) pairs into blocks, problem by problem.

    >>> blocks(2, 2, 3)
    [[(0, 0), (0, 1), (1, 0)], [(1, 1)]]
    """
    pairs = [(problem, sample) for problem in range(n_problems) for sample in range(n_samples)]
    return [pairs[start : start + block_size] for start in range(0, len(pairs), block_size)]


def cut_points(ids: Sequence[int], decode: Callable[[list[int]], str], budgets: Iterable[int]) -> dict[int, int]:
    """Record how many characters of the text fit into each token budget, from the sampled ids.

    A budget may end within a character, so only the common prefix of both texts counts. Budgets that cover the whole
    response are omitted.
    """
    text = decode(list(ids))
    truncated = {budget: decode(list(ids[:budget])) for budget in sorted(budgets) if budget < len(ids)}
    return {budget: _common_length(text, part) for budget, part in truncated.items()}


def _common_length(text: str, part: str) -> int:
    both = enumerate(zip(text, part, strict=False))
    return next((at for at, (one, two) in both if one != two), min(len(text), len(part)))


def to_line(sample: Sample) -> str:
    """Convert a sample to one line of JSON."""
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def from_line(line: str) -> Sample:
    """Read a sample from its line."""
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
                    f"{path}:{number}: not a sample ({error}). Delete the file and re-run eval."
                ) from error


def block_path(folder: Path, number: int) -> Path:
    """Return the path of a block."""
    return folder / f"{number:05d}.jsonl"


def write_block(folder: Path, number: int, samples: Iterable[Sample]) -> None:
    """Store a finished block atomically."""
    write_atomic(block_path(folder, number), "".join(map(to_line, samples)).encode())


def pending_blocks(folder: Path, count: int) -> list[int]:
    """List the blocks that have not been sampled yet."""
    return [number for number in range(count) if not block_path(folder, number).exists()]


def merge_blocks(folder: Path, count: int, target: Path) -> None:
    """Join all blocks in order into samples.jsonl."""
    write_atomic(target, b"".join(block_path(folder, number).read_bytes() for number in range(count)))
