"""How one anchor model reads the student's trajectories: in its own tokens, after the prompt that it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.errors import InputError
from lightning_weave.models.hf import ScoreRow
from lightning_weave.prompts import encode, in_context, render
from lightning_weave.runs.prompts import Asked, asked_prompts
from lightning_weave.runs.scored import ScoredModel
from lightning_weave.runs.steps import Steps
from lightning_weave.tokens import TokenMap


class Unread(IntEnum):
    """Why a side cannot be asked about a decision, whatever its candidates are."""

    READ = 0  # it can
    UNKNOWN = 1
    TOO_LONG = 2  # beyond its context
    NOT_SPELT = 3  # after a token that its own tokens cannot spell
    NO_COLUMN = 4  # the row lacks a column that its context names


@dataclass(frozen=True)
class OwnPrompts:
    """What one side reads in place of the student's prompts, by line of prompts.jsonl."""

    given: Sequence[list[int]]  # what the student reads
    read: Sequence[list[int] | None]  # None: the row lacks a column, and is masked
    native: bool  # in the anchor's tokens; else in the student's, and projected


@dataclass(frozen=True)
class Alignment:
    """Everything about scoring a trajectory that needs no weights."""

    tokens: TokenMap
    limit: int | None  # longest context of the model, in its own tokens
    bos: tuple[int, ...] = ()
    prompts: OwnPrompts | None = None  # None: the student's, projected
    masked_ids: frozenset[int] = frozenset()  # anchor tokens that a candidate may not be scored as

    @classmethod
    def open(
        cls,
        steps: Steps,
        scored: ScoredModel,
        limit: int | None,
        masked_ids: frozenset[int] = frozenset(),
        asked: Sequence[Asked] | None = None,
    ) -> "Alignment":
        """Align the tokenizer of one anchor model with the student's; `asked` are the prompts, unless the run's."""
        anchor = scored.checkpoint.tokenizer
        name = scored.checkpoint.name
        if scored.bos and anchor.bos_token_id is None:
            raise InputError(f"anchors: bos = true, but the tokenizer of {name} has no such token. Leave it out")
        try:
            tokens = TokenMap.between(steps.student.tokenizer, anchor, dict(scored.aliases))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        return cls(
            tokens,
            limit,
            (anchor.bos_token_id,) if scored.bos else (),
            _own_prompts(steps, scored, asked) if scored.reads_own_prompts else None,
            masked_ids,
        )

    def align(self, prompt: int, prompt_ids: NDArray, response_ids: NDArray, candidate_ids_TC: NDArray) -> ScoreRow:
        """Put one trajectory and its candidates into this model's tokens, each decision at the student's boundary."""
        reading = self._read(prompt, prompt_ids, response_ids)
        if reading is None:
            return _nothing(prompt_ids, candidate_ids_TC)
        ids, positions_T, unread_T = reading
        anchor_ids_TC, mapped_TC = self.tokens.candidate_map(torch.from_numpy(np.array(candidate_ids_TC)))
        mapped = mapped_TC.numpy() & ~np.isin(anchor_ids_TC.numpy(), list(self.masked_ids))
        return ScoreRow(ids, positions_T, anchor_ids_TC.numpy(), mapped & (unread_T == Unread.READ)[:, None])

    def unread(self, prompt: int, prompt_ids: NDArray, response_ids: NDArray) -> NDArray[np.int64]:
        """Say of every decision of a trajectory whether this model can be asked about it, and if not, why."""
        reading = self._read(prompt, prompt_ids, response_ids)
        return np.full(len(response_ids), Unread.NO_COLUMN, np.int64) if reading is None else reading[2]

    def _read(
        self, prompt: int, prompt_ids: NDArray, response_ids: NDArray
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]] | None:
        """Give the tokens that this model reads, where each decision is among them, and which it cannot read."""
        native: list[int] = []
        if self.prompts is not None:
            own = self.prompts.read[prompt]
            if own is None:
                return None
            after = prompt_ids[len(self.prompts.given[prompt]) :]  # a response so far, where a target is sampled from
            native = own if self.prompts.native else []
            prompt_ids = after if self.prompts.native else np.concatenate([np.array(own, np.int32), after])
        context = np.concatenate([prompt_ids, response_ids])
        projected, boundaries = self.tokens.project(context)
        token_ids = [*native, *projected]
        has_bos = tuple(token_ids[: len(self.bos)]) == self.bos  # a prompt may bring its own
        before = [] if has_bos else [*self.bos]
        ids = np.array([*before, *token_ids], dtype=np.int32)
        first = len(context) - len(response_ids)
        positions_T = len(before) + len(native) + np.array(boundaries[first:-1], dtype=np.int64) - 1
        within_T = (positions_T >= 0) & (positions_T < (self.limit or len(ids)))
        spelt_T = np.arange(first, len(context)) <= self.tokens.lossless_prefix(context)
        unread_T = np.where(spelt_T, np.where(within_T, Unread.READ, Unread.TOO_LONG), Unread.NOT_SPELT)
        return ids, positions_T, unread_T.astype(np.int64)


def _nothing(prompt_ids: NDArray, candidate_ids_TC: NDArray) -> ScoreRow:
    """A row of which nothing is scored."""
    shape = np.array(candidate_ids_TC).shape
    return ScoreRow(prompt_ids, np.zeros(shape[0], np.int64), np.zeros(shape, np.int32), np.zeros(shape, np.bool_))


def _own_prompts(steps: Steps, scored: ScoredModel, asked: Sequence[Asked] | None) -> OwnPrompts:
    return own_prompts(steps, scored, asked_prompts(steps, scored.context.columns) if asked is None else asked)


def own_prompts(steps: Steps, scored: ScoredModel, asked: Sequence[Asked]) -> OwnPrompts:
    """Render what one side reads where the student reads its prompts."""
    if (native := scored.template) is not None and not native.tokenizer.chat_template:
        raise InputError(
            f'anchors: prompt = "native", but the tokenizer of {native.name} has no chat template. '
            'Use prompt = "student"'
        )
    _check_columns(scored, asked)
    texts: list[str | None] = []
    for one in asked:
        if not one.prompt.messages:
            raise InputError(
                f"anchors: {_why_messages(scored)}, but the prompt {one.prompt.id} of rollout.from has no messages. "
                'Add them to its line, or use prompt = "student" without post_prompt and pre_prompt'
            )
        if not scored.context.columns <= one.columns.keys():
            texts.append(None)
            continue
        messages = in_context(one.prompt.messages, scored.context, one.columns)
        own = None if native is None else render(messages, native.tokenizer, True, one.form.thinking)
        texts.append(one.form.text(messages, steps.student.tokenizer) if own is None else own)
    reader = steps.student.tokenizer if native is None else scored.checkpoint.tokenizer
    rendered = native is not None or all(one.form.rendered for one in asked)
    ids = iter(encode([text for text in texts if text is not None], reader, rendered))
    token_ids = [None if text is None else next(ids) for text in texts]
    return OwnPrompts([one.prompt.token_ids for one in asked], token_ids, native is not None)


def _why_messages(scored: ScoredModel) -> str:
    return f"a context ({scored.context})" if scored.context else 'prompt = "native"'


def _check_columns(scored: ScoredModel, asked: Sequence[Asked]) -> None:
    """Refuse a template that names a column which no row has, or, unless it is to be masked, one that a row lacks."""
    for name in sorted(scored.context.columns):
        lacking = [one.prompt.id for one in asked if name not in one.columns]
        if lacking and (len(lacking) == len(asked) or not scored.masks_missing):
            which = "no row has" if len(lacking) == len(asked) else f"the row of prompt {lacking[0]} has not"
            more = f" (nor have {len(lacking) - 1} others)" if 1 < len(lacking) < len(asked) else ""
            mask = "" if len(lacking) == len(asked) else ', or set missing = "mask" in that anchor'
            raise InputError(
                f"anchors: the template {scored.context.template!r} names {{{name}}}, a column that {which}{more}. "
                f"Fill it in{mask}"
            )
