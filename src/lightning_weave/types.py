"""The data that flows between stages. Rows are ragged: flat arrays with offsets, never padding.

Shape letters: R rows (trajectories) of a shard, P positions of a shard (all response tokens, flat), C candidates.
Position t of a row is the *decision* about response token t: its state is the prompt and the response before t.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")  # stored as their index


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length in one flat array.

    >>> rows = Ragged.of([np.array([1, 2]), np.array([], dtype=int), np.array([3])])
    >>> len(rows), rows[0].tolist(), rows[1].tolist(), rows[2].tolist()
    (3, [1, 2], [], [3])
    """

    flat: NDArray
    offsets: NDArray[np.int64]  # (R + 1,)

    @classmethod
    def of(cls, rows: Sequence[NDArray]) -> "Ragged":
        lengths = [len(row) for row in rows]
        return cls(np.concatenate(rows), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class PromptForm:
    """How messages become what a model reads: the student, and every side of an anchor."""

    style: Literal["chat", "plain", "chatml"]  # chatml: LiveCodeBench's, whatever the model's template is
    thinking: bool = True
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """One line of prompts.jsonl: what was asked, and exactly what the student is given.

    Messages and form are the one conversation from which the student's tokens and those of every anchor are rendered.
    """

    id: str
    messages: list[dict[str, Any]]  # before any chat template
    text: str  # as the student sees it
    token_ids: list[int]  # `text` in student tokens
    answer: str | None = None
    form: PromptForm | None = None  # None: token ids that no rendering of the messages gives
    # Of its row; None: the source has them under its id. A value of None: it differs among the prompt's responses.
    columns: dict[str, Any] | None = None


@dataclass(frozen=True)
class Request:
    """Ask a sampler for one response. Random numbers belong to (seed, prompt, response), never to the batch."""

    prompt_ids: list[int]
    prompt: int
    response: int

    @property
    def key(self) -> tuple[int, int]:
        """What it is told apart by."""
        return self.prompt, self.response

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"prompt {self.prompt}, response {self.response}"


@dataclass(frozen=True)
class Response:
    """What was sampled, ids exactly as drawn, end of sequence included."""

    ids: list[int]
    finish: FinishReason
    decided: list[bool] | None = None  # of a logged run: which of them the student wrote; None: all
    logprobs: list[float] | None = field(default=None, compare=False)  # at temperature 1, where an engine tells them


@dataclass(frozen=True)
class SamplingSettings:
    """How a sampler draws. Only these: nothing is taken from a checkpoint's generation_config but its stop ids."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Rollouts:
    """One shard of trajectories."""

    prompt_R: NDArray[np.int32]  # line of prompts.jsonl
    response_R: NDArray[np.int32]  # which of the prompt's responses
    finish_R: NDArray[np.uint8]  # index into FINISH_REASONS
    prompt_ids: Ragged  # int32
    response_ids: Ragged  # int32
    decided: Ragged | None = None  # bool: the student wrote this token, the others are context; None: it wrote all

    def trajectories(self) -> NDArray[np.uint32]:
        """Name each row by its tokens, so that two caches are only ever joined on the same trajectory."""
        crcs = []
        for row in zip(self.prompt_ids, self.response_ids, strict=True):  # prompt and response apart
            prompt, response = (np.ascontiguousarray(ids, dtype="<i4").tobytes() for ids in row)
            crcs.append(zlib.crc32(response, zlib.crc32(prompt + b"|")))
        return np.array(crcs, dtype=np.uint32)


@dataclass(frozen=True)
class Candidates:
    """The student's own view of one shard: its top candidates and where the rest of its mass is."""

    trajectory_R: NDArray[np.uint32]  # which tokens these numbers belong to
    ids: Ragged  # (P, C) int32
    logp: Ragged  # (P, C) float32, normalised over the whole vocabulary
    other_logp: Ragged  # (P,) float32, log-mass of everything that is not a candidate
    sampled_logp: Ragged  # (P,) float32, log-prob of the token that was sampled


@dataclass(frozen=True)
class Scores:
    """One model's view of the candidates of one shard."""

    trajectory_R: NDArray[np.uint32]
    logp: Ragged  # (P, C) float32; 0 where not mapped
    mapped: Ragged  # (P, C) bool: the candidate is one token of this model, at a boundary it can see
    mass: Ragged  # (P,) float32, this model's own probability mass on the mapped candidates


def pick_rows(table: T, rows: Sequence[int]) -> T:
    """Take some rows of a dataclass of row arrays and ragged arrays, in this order."""

    def pick(values: Any) -> Any:
        if values is None:
            return None
        if not isinstance(values, Ragged):
            return values[list(rows)]
        return Ragged.of([values[row] for row in rows]) if len(rows) else Ragged(values.flat[:0], values.offsets[:1])

    return type(table)(**{name: pick(values) for name, values in vars(table).items()})


def join_rows(tables: Sequence[T]) -> T:
    """Put the rows of several such dataclasses of one kind after one another."""

    def join(parts: Sequence[Any]) -> Any:
        if parts[0] is None:
            return None
        if not isinstance(parts[0], Ragged):
            return np.concatenate(parts)
        ends = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, ends, strict=False)]
        return Ragged(np.concatenate([part.flat for part in parts]), np.concatenate([[0], *offsets]).astype(np.int64))

    return type(tables[0])(**{name: join([vars(table)[name] for table in tables]) for name in vars(tables[0])})
