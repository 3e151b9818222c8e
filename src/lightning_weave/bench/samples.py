"""Samples of a benchmark: one line of samples.jsonl each, drawn in blocks that are the unit of resume.

A block is a fixed list of (problem, sample) pairs, always sampled as one batch and stored in its own file until all
blocks are done. So a run that was killed and resumed, or split among ranks, writes the same bytes as any other.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark
from lightning_weave.errors import CorruptData, Mismatch
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
    cuts = {}
    for budget in sorted(budgets):
        if budget < len(ids):
            part = decode(list(ids[:budget]))
            pairs = enumerate(zip(text, part, strict=False))
            cuts[budget] = next((at for at, (one, two) in pairs if one != two), min(len(text), len(part)))
    return cuts


def to_line(sample: Sample) -> str:
    """Convert a sample to one line of JSON."""
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def read_samples(path: Path) -> Iterator[Sample]:
    """Read samples.jsonl line by line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                yield Sample(**{**fields, "cuts": {int(budget): cut for budget, cut in fields["cuts"].items()}})
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


def export_samples(
    folder: Path,
    benchmark: Benchmark,
    prompts: Sequence[str],
    samples: Iterable[Sample],
    settings: Mapping[str, Any],
    when: datetime,
) -> Path:
    """Write samples_<task>_<date>.jsonl as lm-evaluation-harness does: one line per problem with all its responses.

    Returns the path.
    """
    by_problem: dict[str, list[Sample]] = {problem.id: [] for problem in benchmark.problems}
    for sample in samples:
        if sample.problem not in by_problem:
            raise Mismatch(f"a sample of {sample.problem!r}, which is not a problem of {benchmark.name}. Re-run eval.")
        by_problem[sample.problem].append(sample)
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_gen_toks"}
    generation = {name: settings[key] for key, name in names.items() if key in settings}
    generation = {"until": [], "do_sample": settings.get("temperature", 0) > 0, **generation}
    lines = []
    for number, (problem, prompt) in enumerate(zip(benchmark.problems, prompts, strict=True)):
        own = by_problem[problem.id]
        if not own:
            continue
        doc: dict[str, Any] = {"id": problem.id, "problem": problem.question, "answer": problem.answer}
        if problem.row is not None:  # private tests may take megabytes
            doc = {key: str(value) for key, value in problem.row.items() if key != "private_test_cases"}
        target = problem.answer or ""
        hashed = {"doc": json.dumps(doc, indent=2, ensure_ascii=False, default=str), "prompt": prompt, "target": target}
        metric = "exact_match" if problem.row is None else "pass@1"
        line = {
            "doc_id": number,
            "doc": doc,
            "target": target,
            "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": generation}},
            "resps": [[sample.text for sample in own]],
            "filtered_resps": [[sample.answer or "" for sample in own]],
            "filter": "none",
            "metrics": [metric, "tokens"],
            **{f"{name}_hash": hashlib.sha256(text.encode()).hexdigest() for name, text in hashed.items()},
            metric: sum(sample.correct for sample in own) / len(own),
            "tokens": sum(sample.tokens for sample in own) / len(own),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    path = folder / f"samples_{benchmark.slug}_{when.isoformat().replace(':', '-')}.jsonl"
    write_atomic(path, "".join(lines).encode())
    return path
