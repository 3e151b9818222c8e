"""Build the whole world from a seed: tokenizers, base models, specialists, prompts, benchmarks, figures."""

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
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
from lightning_weave.world.measure import TEMPERATURE, TOP_P, Figures, measure
from lightning_weave.world.plan import PLANS, Base, Size, WorldPlan
from lightning_weave.world.posttrain import post_train
from lightning_weave.world.pretrain import make_model, pretrain
from lightning_weave.world.spellings import SPELLINGS, make_tokenizer
from lightning_weave.world.task import DIFFICULTIES, Exercise, different, endless_problems, random_numbers


def build_world(directory: Path, seed: int, progress: Progress | None = None, size: Size = "full") -> WorldReport:
    """Make every checkpoint, prompt and benchmark of a world; a killed build resumes with the next model.

    Equal seeds give equal files on the same machine, threads and versions.
    """
    started = time.monotonic()
    claim(directory, seed, size)
    if (finished := read_report(directory)) is not None:
        return finished
    transformers.utils.logging.disable_progress_bar()  # ours are enough
    build = _Build(directory, seed, PLANS[size], progress or Progress(quiet=True))
    build.write_problems()
    for name in build.plan.bases:
        if not (directory / name).exists():
            build.make_base(name)
    for name in build.plan.specialists:
        if not (directory / name).exists():
            build.make_specialist(name)
    report = WorldReport(
        command=f"lweave world build DIR --seed {seed}",
        seed=seed,
        size=size,
        figures=build.measure(),
        sampling={"temperature": TEMPERATURE, "top_p": TOP_P, "samples": build.plan.samples, "seed": seed},
        environment={
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "tokenizers", "numpy")},
        },
        seconds=round(time.monotonic() - started, 1),
    )
    write_report(directory, report)
    return report


@dataclass(frozen=True)
class _Build:
    directory: Path
    seed: int
    plan: WorldPlan
    progress: Progress

    def random(self, *names: str) -> np.random.Generator:
        return random_numbers(self.seed, *names)

    @cached_property
    def benchmarks(self) -> dict[str, list[Exercise]]:
        """The problems of every benchmark, all of them different."""
        drawn = {name: endless_problems(self.random("benchmark", name), [size]) for name, size in DIFFICULTIES.items()}
        return {name: list(islice(different(problems), self.plan.problems)) for name, problems in drawn.items()}

    def problems(self, *names: str) -> Iterator[Exercise]:
        """Draw problems that are in no benchmark."""
        held_out = frozenset(problem for problems in self.benchmarks.values() for problem in problems)
        return endless_problems(self.random(*names), unlike=held_out)

    def write_problems(self) -> None:
        for name, problems in self.benchmarks.items():
            write_problems(self.directory / BENCHMARKS / f"{name}.jsonl", name, problems)
        prompts = islice(different(self.problems("prompts")), self.plan.prompts)
        write_problems(self.directory / PROMPTS, "prompt", prompts)

    def make_base(self, name: str) -> None:
        base = self.plan.bases[name]
        tokenizer = self.tokenizer(base)
        model = make_model(base.family, base.dimensions, tokenizer, self.random("weights", name))
        slips = Slips.draw(self.random("slips"))
        rng = self.random("corpus", name)
        problems = self.problems("problems", name)
        with self.progress.bar(f"pretrain {name}", base.steps, "step") as bar:
            pretrain(model, tokenizer, problems, slips, base.steps, batch=self.plan.batch, rng=rng, bar=bar)
        save_checkpoint(self.directory / name, model, tokenizer)

    def make_specialist(self, name: str) -> None:
        specialist = self.plan.specialists[name]
        practice = specialist.practice
        tokenizer = self.tokenizer(self.plan.bases[specialist.base])
        model = AutoModelForCausalLM.from_pretrained(self.directory / specialist.base, dtype=torch.float32)
        rng = self.random("practice", name)
        problems = self.problems("problems", name)
        with self.progress.bar(f"post-train {name}", practice.rounds, "round") as bar:
            post_train(model, tokenizer, specialist.choose, problems, practice, rng=rng, bar=bar)
        save_checkpoint(self.directory / name, model, tokenizer)

    def tokenizer(self, base: Base) -> PreTrainedTokenizerFast:
        return make_tokenizer(SPELLINGS[base.spelling], self.random("tokenizer", base.spelling))

    def measure(self) -> dict[str, dict[str, Figures]]:
        figures = {}
        names = [*self.plan.bases, *self.plan.specialists]
        with self.progress.bar("measure", len(names), "model") as bar:
            for name in names:
                figures[name] = measure(self.directory / name, self.benchmarks, self.plan.samples, self.seed)
                bar.advance(note=name)
        return figures
