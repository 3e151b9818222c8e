"""Measure a checkpoint of this world on its three benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from lightning_weave.models.load import load_model, load_tokenizer
from lightning_weave.types import SamplingSettings
from lightning_weave.world.posttrain import MAX_TOKENS, sample_attempts
from lightning_weave.world.task import Exercise

TEMPERATURE = 0.6  # as in the paper's evaluation
TOP_P = 0.95


@dataclass(frozen=True)
class Figures:
    """The results of a model on one benchmark."""

    accuracy: float  # share of samples
    tokens: float  # mean over samples, including the end of sequence
    finished: float  # share of samples that ended before the limit
    samples: int


def measure(path: Path, benchmarks: Mapping[str, Sequence[Exercise]], samples: int, seed: int) -> dict[str, Figures]:
    """Sample a checkpoint, in float32, on every problem of every benchmark."""
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(path)
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
