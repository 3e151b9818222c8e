"""What is written down while a student trains: metrics.jsonl, trackers, and how it does on a few problems."""

import json
import math
from dataclasses import replace
from pathlib import Path

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.config import Recipe
from lightning_weave.grading.graders import Grader
from lightning_weave.maths import aes
from lightning_weave.models.sampler import HFSampler
from lightning_weave.run import Run
from lightning_weave.stages.sampling import render_problems, sampling_settings
from lightning_weave.store import append_line, read_lines, write_atomic
from lightning_weave.trackers import TrackedRun, open_trackers
from lightning_weave.train.objectives import Trainee, without_dropout
from lightning_weave.train.parallel import Ranks, unsharded
from lightning_weave.types import Request


class Metrics:
    """metrics.jsonl, and the trackers that the recipe switches on."""

    def __init__(self, recipe: Recipe, name: str, folder: Path, start: int, fingerprint: str) -> None:
        self.path = folder / "metrics.jsonl"
        # After a kill the log may be ahead of the checkpoint: those updates are taken again.
        rows = [row for row in read_lines(self.path, step=int) if row["step"] <= start] if start else []
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.last: dict[str, float] = {key: value for row in rows for key, value in row.items() if key != "step"}
        self.first = next((row for row in rows if row["step"] == 0), None)
        self.trackers = open_trackers(recipe, TrackedRun(name, folder, fingerprint, start))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write one step."""
        row = {name: float(f"{value:.6g}") for name, value in figures.items()}
        self.last |= row  # as written: a resumed run has no other digits
        if step == 0:
            self.first = row
        append_line(self.path, {"step": step, **row})
        for tracker in self.trackers:
            tracker.log(step, figures)


class Probe:
    """Problems of the recipe's first benchmark, evenly spread: sampled by the recipe's protocol, once each."""

    def __init__(self, run: Run) -> None:
        section = run.recipe.eval
        loaded = load_eval_benchmark(run.recipe, section.benchmarks[0])
        count = len(loaded.problems)
        most = min(count, run.recipe.train.eval_problems)
        problems = tuple(loaded.problems[place * count // most] for place in range(most))
        self.benchmark = replace(loaded, problems=problems)
        self.student = run.student
        self.grader = Grader.from_section(self.benchmark, section, run.trust)
        asked = render_problems(self.benchmark, run.student.tokenizer, section, run.recipe.date)
        self.requests = [Request(one.token_ids, place, 0) for place, one in enumerate(asked)]
        self.settings = sampling_settings(section, self.benchmark)
        self.batch_size = section.batch_size

    def answer(self, trainee: Trainee, ranks: Ranks, base: dict[str, float] | None = None) -> dict[str, float]:
        """Sample and grade, each rank its share of the problems: the share that is right in %, the mean of tokens.

        With the figures of `base`, the student that training began with, also the AES, if `base` was ever right.
        """
        own = self.requests[ranks.rank :: ranks.world_size]
        with without_dropout(trainee), unsharded(trainee):
            vocabulary = trainee.head_description.vocabulary
            sampler = HFSampler(trainee.model, self.student.stop_ids, vocabulary, self.batch_size)
            responses = sampler.sample(own, self.settings) if own else []
        texts = [str(self.student.tokenizer.decode(each.ids, skip_special_tokens=True)) for each in responses]
        problems = [self.benchmark.problems[request.prompt] for request in own]
        right = sum(one.correct for one in self.grader.grade(list(zip(problems, texts, strict=True))))
        total = ranks.all_reduce({"right": right, "tokens": sum(len(each.ids) for each in responses)})
        accuracy, tokens = 100 * total["right"] / len(self.requests), total["tokens"] / len(self.requests)
        figures = {"eval_accuracy": accuracy, "eval_tokens": tokens}
        score = aes(accuracy, tokens, base["eval_accuracy"], base["eval_tokens"]) if base else math.nan
        return figures if math.isnan(score) else {**figures, "eval_aes": score}
