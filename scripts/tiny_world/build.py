"""Build a world from a seed: tokenizers, base models, specialists, prompts, benchmarks, and `world.json`."""

import json
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.store import whole_directory, write_atomic
from lightning_weave.types import SamplingSettings
from tiny_world.models import (
    MAX_TOKENS,
    TOKENIZERS,
    Dimensions,
    Family,
    PostTraining,
    Select,
    make_model,
    make_tokenizer,
    post_train,
    pretrain,
    sample_attempts,
    select_correct,
    select_longest,
    select_shortest,
)
from tiny_world.task import DIFFICULTIES, Errors, Exercise, draw_problems, make_rng, unique

Size = Literal["full", "miniature"]
REPORT = "world.json"
TEMPERATURE = 0.6  # as in the paper's evaluation
TOP_P = 0.95


@dataclass(frozen=True)
class Base:
    """A model to pretrain."""

    family: Family
    dimensions: Dimensions
    tokenizer: str
    steps: int


@dataclass(frozen=True)
class Specialist:
    """A model to post-train from its base."""

    base: str
    select: Select
    settings: PostTraining


@dataclass(frozen=True)
class WorldConfig:
    """Everything that a build makes."""

    bases: dict[str, Base]
    specialists: dict[str, Specialist]
    batch: int  # of pretraining
    prompts: int
    problems: int  # of each benchmark
    samples: int  # of each problem, when models are measured


def _configure(
    widths: Sequence[int],
    layers: int,
    heads: int,
    feed_forward: int,
    steps: int,
    settings: PostTraining,
    brevity: PostTraining,
    mastered: float,
    **counts: int,
) -> WorldConfig:
    """Configure the student and the three pairs; `mastered` is the share of correct samples that brevity needs."""
    student, accuracy, short, thorough = (Dimensions(layers, width, heads, feed_forward) for width in widths)
    return WorldConfig(
        bases={
            "student": Base("qwen3", student, "student", steps),
            "accuracy-pre": Base("qwen3", accuracy, "accuracy", steps),
            "brevity-pre": Base("llama", short, "brevity", steps),
            "thorough-pre": Base("llama", thorough, "thorough", steps),
        },
        specialists={
            "accuracy-post": Specialist("accuracy-pre", select_correct, settings),
            "brevity-post": Specialist("brevity-pre", partial(select_shortest, mastered=mastered), brevity),
            "thorough-post": Specialist("thorough-pre", select_longest, settings),
        },
        **counts,
    )


SHORT = PostTraining(rounds=1, prompts=100, learning_rate=1e-3)
SIZES: dict[Size, WorldConfig] = {
    "full": _configure(
        widths=[64, 56, 48, 56],
        layers=3,
        heads=4,
        feed_forward=128,
        steps=450,
        settings=PostTraining(rounds=4, prompts=700, learning_rate=1e-3),
        # Below temperature 1: at 1 too few prompts are mastered and the pair loses accuracy, at 0.9 it loses none.
        brevity=PostTraining(rounds=3, prompts=700, learning_rate=1e-3, temperature=0.95),
        mastered=0.75,
        batch=96,
        prompts=1000,
        problems=200,
        samples=4,
    ),
    # For tests: takes seconds, and its models learn to write, not to calculate.
    "miniature": _configure(
        widths=[32] * 4,
        layers=1,
        heads=2,
        feed_forward=32,
        steps=60,
        settings=SHORT,
        brevity=SHORT,
        mastered=0.0,
        batch=16,
        prompts=24,
        problems=8,
        samples=2,
    ),
}


@dataclass(frozen=True)
class Figures:
    """The results of a model on one benchmark."""

    accuracy: float  # share of samples
    tokens: float  # mean over samples, including the end of sequence
    finished: float  # share of samples that ended before the limit
    samples: int


@dataclass(frozen=True)
class WorldReport:
    """The contents of `world.json`: what was built, how, and the results of its models."""

    command: str
    seed: int
    size: Size
    figures: dict[str, dict[str, Figures]]  # model -> benchmark
    sampling: dict[str, float]  # settings of the measurement
    environment: dict[str, str]
    seconds: float  # of the run that finished it, without the work of earlier, killed runs


def read_report(directory: Path) -> WorldReport | None:
    """Read the report of a finished build; None if it is not finished."""
    path = directory / REPORT
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "figures" not in content:
        return None
    figures = {
        model: {benchmark: Figures(**values) for benchmark, values in benchmarks.items()}
        for model, benchmarks in content.pop("figures").items()
    }
    return WorldReport(**content, figures=figures)


def write_problems(path: Path, prefix: str, problems: Iterable[Exercise]) -> None:
    """Write problems with their answers, one per line."""
    rows = [
        {"id": f"{prefix}-{number}", "problem": problem.text, "answer": problem.answer}
        for number, problem in enumerate(problems, start=1)
    ]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def save_checkpoint(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a model in float16; the directory appears only when it is complete."""
    with whole_directory(directory) as unfinished:
        model.to(torch.float16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def build_world(directory: Path, seed: int, progress: Progress | None = None, size: Size = "full") -> WorldReport:
    """Make every checkpoint, prompt and benchmark of a world; a killed build resumes with the next model.

    Equal seeds give equal files on the same machine, threads and versions.
    """
    started = time.monotonic()
    if (finished := _open_directory(directory, seed, size)) is not None:
        return finished
    transformers.utils.logging.disable_progress_bar()
    progress = progress or Progress(quiet=True)
    config = SIZES[size]
    rng = partial(make_rng, seed)

    benchmarks = {
        name: list(islice(unique(draw_problems(rng("benchmark", name), [length])), config.problems))
        for name, length in DIFFICULTIES.items()
    }
    held_out = frozenset(chain.from_iterable(benchmarks.values()))
    for name, problems in benchmarks.items():
        write_problems(directory / "benchmarks" / f"{name}.jsonl", name, problems)
    prompts = islice(unique(draw_problems(rng("prompts"), exclude=held_out)), config.prompts)
    write_problems(directory / "prompts.jsonl", "prompt", prompts)

    tokenizers = {name: make_tokenizer(spec, rng("tokenizer", name)) for name, spec in TOKENIZERS.items()}
    for name, base in config.bases.items():
        if (directory / name).exists():
            continue
        tokenizer = tokenizers[base.tokenizer]
        model = make_model(base.family, base.dimensions, tokenizer, rng("weights", name))
        errors = Errors.draw(rng("slips"))
        exercises = draw_problems(rng("problems", name), exclude=held_out)
        with progress.bar(f"pretrain {name}", base.steps, "step") as bar:
            pretrain(
                model, tokenizer, exercises, errors, base.steps, batch=config.batch, rng=rng("corpus", name), bar=bar
            )
        save_checkpoint(directory / name, model, tokenizer)
    for name, specialist in config.specialists.items():
        if (directory / name).exists():
            continue
        tokenizer = tokenizers[config.bases[specialist.base].tokenizer]
        model = AutoModelForCausalLM.from_pretrained(directory / specialist.base, dtype=torch.float32)
        exercises = draw_problems(rng("problems", name), exclude=held_out)
        settings = specialist.settings
        with progress.bar(f"post-train {name}", settings.rounds, "round") as bar:
            post_train(model, tokenizer, specialist.select, exercises, settings, rng=rng("practice", name), bar=bar)
        save_checkpoint(directory / name, model, tokenizer)

    figures = {}
    with progress.bar("measure", len(config.bases) + len(config.specialists), "model") as bar:
        for name in (*config.bases, *config.specialists):
            figures[name] = _measure(directory / name, benchmarks, config.samples, seed)
            bar.advance(note=name)
    report = WorldReport(
        command=f"scripts/build-world DIR --seed {seed}",
        seed=seed,
        size=size,
        figures=figures,
        sampling={"temperature": TEMPERATURE, "top_p": TOP_P, "samples": config.samples, "seed": seed},
        environment={
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "tokenizers", "numpy")},
        },
        seconds=round(time.monotonic() - started, 1),
    )
    write_atomic(directory / REPORT, (json.dumps(asdict(report), indent=1) + "\n").encode())
    return report


def _open_directory(directory: Path, seed: int, size: Size) -> WorldReport | None:
    """Reserve a directory for one build, which may resume in it, or return the report of the finished build."""
    path = directory / REPORT
    settings = {"seed": seed, "size": size}
    if path.exists():
        existing = json.loads(path.read_text(encoding="utf-8"))
        if {key: existing.get(key) for key in settings} != settings:
            raise InputError(
                f"{directory} holds a world of seed {existing.get('seed')} and size {existing.get('size')}, "
                f"not of seed {seed} and size {size}. Choose another directory"
            )
    elif directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty and holds no world. Choose another directory")
    else:
        write_atomic(path, (json.dumps(settings) + "\n").encode())
    return read_report(directory)


def _measure(path: Path, benchmarks: dict[str, list[Exercise]], samples: int, seed: int) -> dict[str, Figures]:
    """Sample a checkpoint, in float32, on every problem of every benchmark."""
    model = Checkpoint(str(path)).load(torch.float32, torch.device("cpu"))
    tokenizer = Checkpoint(str(path)).tokenizer
    settings = SamplingSettings(TEMPERATURE, TOP_P, MAX_TOKENS, seed)
    figures = {}
    for name, problems in benchmarks.items():
        attempts = list(chain.from_iterable(sample_attempts(model, tokenizer, problems, samples, settings)))
        count = len(attempts)
        figures[name] = Figures(
            accuracy=sum(attempt.correct for attempt in attempts) / count,
            tokens=sum(len(attempt.ids) for attempt in attempts) / count,
            finished=sum(attempt.finished for attempt in attempts) / count,
            samples=count,
        )
    return figures
