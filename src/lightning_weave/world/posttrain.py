"""Turn base models into specialists by expert iteration: sample, select with the verifier and a preference, imitate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_weave.models.hf import HFSampler
from lightning_weave.models.load import vocabulary_size
from lightning_weave.progress import Bar
from lightning_weave.types import Request, SamplingSettings
from lightning_weave.world.pretrain import Example, update
from lightning_weave.world.task import Exercise, verify

MAX_TOKENS = 128
SAMPLES = 8  # per prompt and round


@dataclass(frozen=True)
class Attempt:
    """One sampled response and the verifier's verdict."""

    ids: list[int]  # including the end of sequence
    finished: bool
    correct: bool


@dataclass(frozen=True)
class Practice:
    """The amount of post-training of a specialist."""

    rounds: int
    prompts: int  # new ones in each round
    rate: float
    temperature: float = 1.0
    batch: int = 64


def correct_ones(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Prefer correct answers."""
    return [attempt for attempt in attempts if attempt.correct and attempt.finished]


def shortest_ones(attempts: Sequence[Attempt], mastered: float = 0.75) -> list[Attempt]:
    """Prefer the two shortest correct answers, on prompts that are already mastered (6 of 8).

    Without that condition the specialist would improve at everything, with nothing left to compose.
    """
    right = correct_ones(attempts)
    if len(right) < mastered * len(attempts):
        return []
    return sorted(right, key=lambda attempt: len(attempt.ids))[:2]


def longest_ones(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Prefer the four longest correct answers."""
    return sorted(correct_ones(attempts), key=lambda attempt: -len(attempt.ids))[:4]


def sample_attempts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Exercise],
    samples: int,
    settings: SamplingSettings,
) -> list[list[Attempt]]:
    """Sample several answers to every problem."""
    sampler = HFSampler(model.eval(), frozenset({tokenizer.eos_token_id}), vocabulary_size(tokenizer), batch_size=256)
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    requests = [Request(ids, row, number) for row, ids in enumerate(prompts) for number in range(samples)]
    responses = sampler.sample(requests, settings)
    texts = tokenizer.batch_decode([response.ids for response in responses], skip_special_tokens=True)
    attempts = [
        Attempt(response.ids, response.finish == "stop", verify(text, problems[request.prompt]))
        for request, response, text in zip(requests, responses, texts, strict=True)
    ]
    return [attempts[start : start + samples] for start in range(0, len(attempts), samples)]


def post_train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    choose: Callable[[Sequence[Attempt]], list[Attempt]],
    problems: Iterator[Exercise],
    practice: Practice,
    rng: np.random.Generator,
    bar: Bar,
) -> None:
    """Make a specialist of a model, in place: each round trains once on samples that `choose` selects."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=practice.rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(practice.rounds):
        exercises = list(islice(problems, practice.prompts))
        settings = SamplingSettings(
            practice.temperature, top_p=1.0, max_tokens=MAX_TOKENS, seed=int(rng.integers(2**31))
        )
        answered = sample_attempts(model, tokenizer, exercises, SAMPLES, settings)
        chosen = [
            Example(tokenizer.encode(problem.prompt), attempt.ids)
            for problem, attempts in zip(exercises, answered, strict=True)
            for attempt in choose(attempts)
        ]
        order = rng.permutation(len(chosen))
        model.train()
        for start in range(0, len(order), practice.batch):
            update(
                model, [chosen[place] for place in order[start : start + practice.batch]], {optimizer: practice.rate}
            )
        correct = sum(attempt.correct for attempts in answered for attempt in attempts)
        bar.advance(note=f"{correct / (SAMPLES * len(exercises)):.0%} correct, {len(chosen)} chosen")
