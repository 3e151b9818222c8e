"""Evaluation during training: a few problems of a benchmark, answered by the student as it is now."""

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_weave.bench.definitions import Benchmark, asked_benchmark
from lightning_weave.maths import aes
from lightning_weave.models.hf import HFSampler
from lightning_weave.runs.evaluation import asked_problems, sampling_settings
from lightning_weave.runs.grade import Grader
from lightning_weave.runs.steps import Steps
from lightning_weave.train.objectives import Trainee, without_dropout
from lightning_weave.train.parallel import Ranks, whole
from lightning_weave.types import Request, SamplingSettings


@dataclass(frozen=True)
class Probe:
    """The problems, how they are put to the student, and how its answers are graded."""

    benchmark: Benchmark
    grader: Grader
    requests: list[Request]
    settings: SamplingSettings
    stop: frozenset[int]
    tokenizer: Any
    batch_size: int

    @classmethod
    def of(cls, steps: Steps) -> "Probe":
        """Take problems of the recipe's first benchmark, evenly spread; the recipe's protocol, one sample of each."""
        section = steps.recipe.eval
        name = section.benchmarks[0]
        loaded = asked_benchmark(section, name)
        count = len(loaded.problems)
        most = min(count, steps.recipe.train.eval_problems)
        benchmark = replace(loaded, problems=tuple(loaded.problems[place * count // most] for place in range(most)))
        tokenizer = steps.student.tokenizer
        problems = asked_problems(benchmark, tokenizer, section)
        return cls(
            benchmark=benchmark,
            grader=Grader.of(benchmark, section, steps.trust),
            requests=[Request(one.prompt.token_ids, place, 0) for place, one in enumerate(problems)],
            settings=sampling_settings(section, benchmark),
            stop=steps.student.stop_ids,
            tokenizer=tokenizer,
            batch_size=section.batch_size,
        )

    def answer(self, trainee: Trainee, ranks: Ranks) -> dict[str, float]:
        """Sample and grade, each rank its share of the problems; gives the share that is right, in %, and tokens."""
        own = self.requests[ranks.rank :: ranks.world]
        with without_dropout(trainee), whole(trainee):
            sampler = HFSampler(trainee.model, self.stop, trainee.head_description.vocabulary, self.batch_size)
            responses = sampler.sample(own, self.settings) if own else []
        texts = [str(self.tokenizer.decode(response.ids, skip_special_tokens=True)) for response in responses]
        problems = [self.benchmark.problems[request.prompt] for request in own]
        graded = self.grader.grade(list(zip(problems, texts, strict=True)))
        right = sum(one.correct for one in graded)
        total = ranks.total({"right": right, "tokens": sum(len(response.ids) for response in responses)})
        count = len(self.requests)
        return {"eval_accuracy": 100 * total["right"] / count, "eval_tokens": total["tokens"] / count}


def with_aes(figures: dict[str, float], base: dict[str, float] | None) -> dict[str, float]:
    """Add the AES against the student that training began with, where that was measured and was ever right."""
    if base is None:
        return figures
    score = aes(figures["eval_accuracy"], figures["eval_tokens"], base["eval_accuracy"], base["eval_tokens"])
    return figures if math.isnan(score) else {**figures, "eval_aes": score}
