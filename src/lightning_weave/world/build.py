"""Build the whole world from a seed: tokenizers, base models, specialists, prompts, benchmarks, figures."""

import platform
import time
from collections.abc import Collection
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_weave.progress import Progress
from lightning_weave.world.corpus import Slips
from lightning_weave.world.layout import (
    BENCHMARKS,
    PROMPTS,
    WorldReport,
    claim,
    read_report,
    save_checkpoint,
    write_problems,
    write_report,
)
from lightning_weave.world.measure import TEMPERATURE, TOP_P, measure
from lightning_weave.world.plan import PLANS, Base, Plan, Size
from lightning_weave.world.posttrain import post_train
from lightning_weave.world.pretrain import make_model, pretrain
from lightning_weave.world.spellings import SPELLINGS, make_tokenizer
from lightning_weave.world.task import DIFFICULTIES, Exercise, different, endless_problems, random_numbers

Benchmarks = dict[str, list[Exercise]]


def build_world(directory: Path, seed: int, progress: Progress | None = None, size: Size = "full") -> WorldReport:
    """Make every checkpoint, prompt and benchmark of a world; a build that was killed goes on with the next model.

    Equal seeds give equal files on the same machine, threads and versions.
    """
    started, plan, progress = time.monotonic(), PLANS[size], progress or Progress(quiet=True)
    claim(directory, seed, size)
    if (finished := read_report(directory)) is not None:
        return finished
    transformers.utils.logging.disable_progress_bar()  # ours say enough
    benchmarks = _write_texts(directory, plan, seed)
    held_out = frozenset(problem for problems in benchmarks.values() for problem in problems)
    for name in plan.bases:
        if not (directory / name).exists():
            _make_base(directory, name, plan, seed, held_out, progress)
    for name in plan.specialists:
        if not (directory / name).exists():
            _make_specialist(directory, name, plan, seed, held_out, progress)
    report = _measure_all(directory, plan, seed, size, benchmarks, progress, started)
    write_report(directory, report)
    return report


def _write_texts(directory: Path, plan: Plan, seed: int) -> Benchmarks:
    """Write benchmarks and prompts, all of them different problems."""
    benchmarks = {}
    for name, length in DIFFICULTIES.items():
        problems = different(endless_problems(random_numbers(seed, "benchmark", name), lengths=[length]))
        benchmarks[name] = list(islice(problems, plan.problems))
        write_problems(directory / BENCHMARKS / f"{name}.jsonl", name, benchmarks[name])
    held_out = [problem for problems in benchmarks.values() for problem in problems]
    prompts = different(endless_problems(random_numbers(seed, "prompts"), unlike=held_out))
    write_problems(directory / PROMPTS, "prompt", islice(prompts, plan.prompts))
    return benchmarks


def _make_base(
    directory: Path, name: str, plan: Plan, seed: int, held_out: Collection[Exercise], progress: Progress
) -> None:
    base = plan.bases[name]
    tokenizer = _tokenizer(base, seed)
    model = make_model(base.family, base.shape, tokenizer, random_numbers(seed, "weights", name))
    problems = endless_problems(random_numbers(seed, "problems", name), unlike=held_out)
    slips, rng = Slips.draw(random_numbers(seed, "slips")), random_numbers(seed, "corpus", name)
    with progress.bar(f"pretrain {name}", base.steps, "step") as bar:
        pretrain(model, tokenizer, problems, slips, base.steps, plan.batch, rng, bar)
    save_checkpoint(directory / name, model, tokenizer)


def _make_specialist(
    directory: Path, name: str, plan: Plan, seed: int, held_out: Collection[Exercise], progress: Progress
) -> None:
    specialist = plan.specialists[name]
    tokenizer = _tokenizer(plan.bases[specialist.base], seed)
    model = AutoModelForCausalLM.from_pretrained(directory / specialist.base, dtype=torch.float32)
    problems = endless_problems(random_numbers(seed, "problems", name), unlike=held_out)
    rng = random_numbers(seed, "practice", name)
    with progress.bar(f"post-train {name}", specialist.practice.rounds, "round") as bar:
        post_train(model, tokenizer, specialist.choose, problems, specialist.practice, rng, bar)
    save_checkpoint(directory / name, model, tokenizer)


def _tokenizer(base: Base, seed: int) -> PreTrainedTokenizerFast:
    return make_tokenizer(SPELLINGS[base.spelling], random_numbers(seed, "tokenizer", base.spelling))


def _measure_all(
    directory: Path,
    plan: Plan,
    seed: int,
    size: Size,
    benchmarks: Benchmarks,
    progress: Progress,
    started: float,
) -> WorldReport:
    names, figures = [*plan.bases, *plan.specialists], {}
    with progress.bar("measure", len(names), "model") as bar:
        for name in names:
            figures[name] = measure(directory / name, benchmarks, plan.samples, seed)
            bar.advance(note=name)
    return WorldReport(
        command=f"lweave world build DIR --seed {seed}",
        seed=seed,
        size=size,
        figures=figures,
        sampling={"temperature": TEMPERATURE, "top_p": TOP_P, "samples": plan.samples, "seed": seed},
        environment={
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "tokenizers", "numpy")},
        },
        seconds=round(time.monotonic() - started, 1),
    )
