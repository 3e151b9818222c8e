"""Sample files in the format of lm-evaluation-harness, for its viewers and scripts."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.bench.samples import Sample
from lightning_weave.errors import Mismatch
from lightning_weave.store.files import write_atomic


def export_samples(
    folder: Path,
    benchmark: Benchmark,
    prompts: Sequence[str],
    samples: Iterable[Sample],
    settings: Mapping[str, Any],
    when: datetime,
) -> Path:
    """Write samples_<task>_<date>.jsonl with one line per problem and all its responses. Returns the path."""
    by_problem: dict[str, list[Sample]] = {problem.id: [] for problem in benchmark.problems}
    for sample in samples:
        if sample.problem not in by_problem:
            raise Mismatch(f"a sample of {sample.problem!r}, which is not a problem of {benchmark.name}. Re-run eval.")
        by_problem[sample.problem].append(sample)
    lines = [
        _record(number, problem, prompt, by_problem[problem.id], settings)
        for number, (problem, prompt) in enumerate(zip(benchmark.problems, prompts, strict=True))
        if by_problem[problem.id]
    ]
    path = folder / f"samples_{benchmark.slug}_{when.isoformat().replace(':', '-')}.jsonl"
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return path


def _record(
    number: int, problem: Problem, prompt: str, samples: Sequence[Sample], settings: Mapping[str, Any]
) -> dict[str, Any]:
    doc = _doc(problem)
    target = problem.answer or ""
    metric = "exact_match" if problem.row is None else "pass@1"
    return {
        "doc_id": number,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": _generation(settings)}},
        "resps": [[sample.text for sample in samples]],
        "filtered_resps": [[sample.answer or "" for sample in samples]],
        "filter": "none",
        "metrics": [metric, "tokens"],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False, default=str)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        metric: sum(sample.correct for sample in samples) / len(samples),
        "tokens": sum(sample.tokens for sample in samples) / len(samples),
    }


def _doc(problem: Problem) -> dict[str, Any]:
    """Describe the problem without the private tests of a code problem, which may take megabytes."""
    if problem.row is None:
        return {"id": problem.id, "problem": problem.question, "answer": problem.answer}
    return {key: str(value) for key, value in problem.row.items() if key != "private_test_cases"}


def _generation(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_gen_toks"}
    generation = {name: settings[key] for key, name in names.items() if key in settings}
    return {"until": [], "do_sample": settings.get("temperature", 0) > 0, **generation}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
