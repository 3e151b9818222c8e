"""A world on disk: one Hugging Face directory per model, problems as JSONL, and `world.json` that says what it is."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_weave.errors import InputError
from lightning_weave.store import whole_directory, write_atomic
from lightning_weave.world.measure import Figures
from lightning_weave.world.plan import Size
from lightning_weave.world.task import Exercise

REPORT = "world.json"
PROMPTS = "prompts.jsonl"
BENCHMARKS = "benchmarks"


@dataclass(frozen=True)
class WorldReport:
    """What was built, by what, and what it does."""

    command: str
    seed: int
    size: Size
    figures: dict[str, dict[str, Figures]]  # model -> benchmark
    sampling: dict[str, float]  # that the figures were measured with
    environment: dict[str, str]
    seconds: float  # of the run that finished it: what an earlier, killed one had made is not counted


def shipped_world() -> Path:
    """Find the world that comes with the package."""
    return Path(str(files("lightning_weave.world") / "shipped"))


def read_report(directory: Path) -> WorldReport | None:
    """Read what a build wrote about itself, or None where none has finished."""
    content = _read_json(directory / REPORT)
    if "figures" not in content:
        return None
    figures = {
        model: {benchmark: Figures(**each) for benchmark, each in benchmarks.items()}
        for model, benchmarks in content.pop("figures").items()
    }
    return WorldReport(**content, figures=figures)


def write_report(directory: Path, report: WorldReport) -> None:
    """Mark a build as finished."""
    _write(directory / REPORT, json.dumps(asdict(report), indent=1) + "\n")


def claim(directory: Path, seed: int, size: Size) -> None:
    """Reserve a directory for one build; only the same build may go on in it."""
    found, wanted = _read_json(directory / REPORT), {"seed": seed, "size": size}
    if found and {key: found.get(key) for key in wanted} != wanted:
        raise InputError(
            f"{directory} holds a world of seed {found.get('seed')} and size {found.get('size')}, not of seed {seed} "
            f"and size {size}. Give another directory"
        )
    if not found:
        if directory.exists() and any(directory.iterdir()):
            raise InputError(f"{directory} is not empty and holds no world. Give another directory")
        _write(directory / REPORT, json.dumps(wanted) + "\n")


def write_problems(path: Path, prefix: str, problems: Iterable[Exercise]) -> None:
    """Write problems with their answers, one per line."""
    rows = (
        {"id": f"{prefix}-{number}", "problem": problem.text, "answer": problem.answer}
        for number, problem in enumerate(problems, start=1)
    )
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def save_checkpoint(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a model in float16; a directory of that name is complete."""
    with whole_directory(directory) as unfinished:
        model.to(torch.float16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode())
