"""Check that an engine's log-probabilities are the scorer's: once per model, engine, dtype and options.

The scorer draws and scores a few rows on the device before the engine takes it. What agrees is remembered in the run
directory, so that no other rank, benchmark or resume loads the model for it again.
"""

import fcntl
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.config import Eval, Reference, Rollout, Score
from lightning_weave.errors import Mismatch
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hf import HFSampler, Scorer, hf_scorer
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.store import append_line, read_lines
from lightning_weave.types import Request, SamplingSettings

FILE = "parity.jsonl"
ROWS = 4
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=32, seed=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredRow:
    """A prompt with a response, and the scorer's log-probabilities of the response."""

    prompt: list[int]
    response: list[int]
    logprobs_T: NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """How far an engine and the scorer were apart, in nats per token, over so many tokens."""

    gap: float
    tokens: int


@dataclass(frozen=True)
class Parity:
    """What a run remembers of one engine with one model."""

    file: Path
    key: dict[str, Any]

    def remembered(self) -> Agreement | None:
        """Look up whether they were compared before."""
        for row in read_lines(self.file):
            if all(row.get(name) == value for name, value in self.key.items()):
                return Agreement(row["gap"], row["tokens"])
        return None

    def accept(self, section: Rollout | Eval | Reference | Score, checkpoint: Checkpoint, agreement: Agreement) -> None:
        """Refuse what is too far apart; keep the rest for other ranks, benchmarks and resumes."""
        judge(agreement, section, checkpoint)
        append_line(self.file, {**self.key, "gap": agreement.gap, "tokens": agreement.tokens})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process at a time compare; the others wait and find its result."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file.with_name(".parity.lock"), "w") as lock:
            with suppress(OSError):  # a file system without locks: each process compares for itself
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def score_a_few(
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    padded: bool,
) -> list[ScoredRow]:
    """Draw and score responses to the shortest prompts with transformers; no row has `length` tokens or more.

    With `padded` all rows of the output matrix count, those of no token included.
    """
    model = checkpoint.load(dtype, device)
    scorer = hf_scorer(model, model.get_output_embeddings().weight.shape[0] if padded else checkpoint.vocabulary)
    requests = [Request(ids, number, 0) for number, ids in enumerate(sorted(prompts, key=len)[:ROWS])]
    drawn = HFSampler(model, checkpoint.stop_ids, checkpoint.vocabulary).sample(requests, SETTINGS)
    rows = [
        (request.prompt_ids, response.ids[: length - 1 - len(request.prompt_ids)])
        for request, response in zip(requests, drawn, strict=True)
    ]
    scored = scorer.candidates(rows, 1)
    return [ScoredRow(*row, logprobs_T) for row, (*_, logprobs_T) in zip(rows, scored, strict=True)]


def compare(sampler: VLLMSampler, expected: Sequence[ScoredRow]) -> Agreement:
    """Compare the scorer's rows with the engine's reading of them, and that with the engine's own writing.

    An engine reads a prompt in one way and writes a response in another, and both must be right.
    """
    reading = _read(sampler, [(row.prompt, row.response) for row in expected])
    requests = [Request(row.prompt, number, 0) for number, row in enumerate(expected)]
    drawn = sampler.sample_with_logprobs(requests, SETTINGS)
    room = [max(0, sampler.limit - 1 - len(row.prompt)) for row in expected]
    own = [(row.prompt, one.response.ids[:most]) for row, one, most in zip(expected, drawn, room, strict=True)]
    writing = [np.array(one.logprobs[:most]) for one, most in zip(drawn, room, strict=True)]
    gaps = [
        _mean_gap([row.logprobs_T for row in expected], reading),
        _mean_gap(writing, _read(sampler, own)),
    ]
    return Agreement(float(np.max(gaps)), sum(len(row.response) for row in expected))


def compare_scorers(scorer: Scorer, expected: Sequence[ScoredRow]) -> Agreement:
    """Compare the rows of a transformers model with what another body gives for them."""
    scored = scorer.candidates([(row.prompt, row.response) for row in expected], 1)
    gap = _mean_gap([row.logprobs_T for row in expected], [logprobs_T for *_, logprobs_T in scored])
    return Agreement(gap, sum(len(row.response) for row in expected))


def _read(sampler: VLLMSampler, rows: Sequence[tuple[list[int], list[int]]]) -> list[NDArray[np.float64]]:
    scored = sampler.score([[*prompt, *response] for prompt, response in rows])
    return [np.array(logprobs[len(prompt) - 1 :]) for (prompt, _), logprobs in zip(rows, scored, strict=True)]


def _mean_gap(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> float:
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())


def judge(agreement: Agreement, section: Rollout | Eval | Reference | Score, checkpoint: Checkpoint) -> None:
    """Refuse an engine that is further from the scorer than the recipe allows."""
    key = type(section).__name__.lower()
    if not agreement.gap <= section.parity:  # a NaN is no agreement either
        raise Mismatch(
            f"{key}.engine = {section.engine!r} and the scorer disagree by {agreement.gap:.4f} nats per token, more "
            f"than {key}.parity = {section.parity:g} ({agreement.tokens} tokens of {checkpoint.path}).\n"
            f'Try {key}.dtype = "float32" or another version of the engine; {key}.engine = "hf" always agrees'
        )
    log.info("%s: vLLM and the scorer agree to %.1e nats per token", key, agreement.gap)
