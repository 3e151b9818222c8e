"""How one anchor model reads the student's trajectories: in its own tokens, after the prompt that it is given."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.errors import InputError
from lightning_weave.models.scorer import Scorer, ScoreRow
from lightning_weave.progress import Progress
from lightning_weave.prompts import add_context, encode, render
from lightning_weave.run import Run, Side
from lightning_weave.stages.grades import grade_rows
from lightning_weave.stages.prompts import load_prompts
from lightning_weave.tokens import TokenMap
from lightning_weave.types import FINISH_REASONS, Candidates, Prompt, Ragged, Request, Response, Rollouts


def pack_rollouts(requests: Sequence[Request], responses: Sequence[Response]) -> Rollouts:
    """Put sampled responses into the arrays of a shard."""
    decided = [np.array(one.decided or [True] * len(one.ids), dtype=np.bool_) for one in responses]
    return Rollouts(
        prompt_R=np.array([request.prompt for request in requests], dtype=np.int32),
        response_R=np.array([request.response for request in requests], dtype=np.int32),
        finish_R=np.array([FINISH_REASONS.index(response.finish) for response in responses], dtype=np.uint8),
        prompt_ids=Ragged.of([np.array(request.prompt_ids, dtype=np.int32) for request in requests]),
        response_ids=Ragged.of([np.array(response.ids, dtype=np.int32) for response in responses]),
        decided=Ragged.of(decided) if any(response.decided is not None for response in responses) else None,
    )


def find_candidates(scorer: Scorer, rows: Rollouts, count: int, given: Candidates | None = None) -> Candidates:
    """Run the student over its trajectories and keep its likeliest tokens at every decision, or score those given."""
    pairs = list(zip(rows.prompt_ids, rows.response_ids, strict=True))
    scored = scorer.candidates(pairs, count, row_names(rows), None if given is None else list(given.ids))
    ids, logp, other, sampled = (Ragged.of([np.asarray(row[part]) for row in scored]) for part in range(4))
    return Candidates(rows.trajectories(), ids, logp, other, sampled)


def row_names(rows: Rollouts) -> list[str]:
    """Name the rows of a shard in messages as rollout does."""
    places = zip(rows.prompt_R.tolist(), rows.response_R.tolist(), strict=True)
    return [f"prompt {prompt}, response {response}" for prompt, response in places]


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
    # By prompt and the bytes of a response, where the context has columns of the run itself; it replaces `read`.
    by_response: Mapping[tuple[int, bytes], list[int] | None] | None = None

    def of(self, prompt: int, response_ids: NDArray) -> list[int] | None:
        """What is read before one response."""
        if self.by_response is None:
            return self.read[prompt]
        return self.by_response.get((prompt, np.asarray(response_ids, np.int32).tobytes()))


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
        run: Run,
        side: Side,
        limit: int | None,
        masked_ids: frozenset[int] = frozenset(),
        prompts: Sequence[Prompt] | None = None,
    ) -> "Alignment":
        """Align the tokenizer of one anchor model with the student's; `prompts` replace those of the run."""
        anchor = side.checkpoint.tokenizer
        name = side.checkpoint.name
        if side.bos and anchor.bos_token_id is None:
            raise InputError(f"anchors: bos = true, but the tokenizer of {name} has no such token. Leave it out")
        try:
            tokens = TokenMap.between(run.student.tokenizer, anchor, dict(side.aliases))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        own = None
        if side.reads_other_prompts:
            own = own_prompts(run, side, load_prompts(run, side.context.columns) if prompts is None else prompts)
        return cls(tokens, limit, (anchor.bos_token_id,) if side.bos else (), own, masked_ids)

    def align(self, prompt: int, prompt_ids: NDArray, response_ids: NDArray, candidate_ids_TC: NDArray) -> ScoreRow:
        """Put one trajectory and its candidates into this model's tokens, each decision at the student's boundary."""
        reading = self._read(prompt, prompt_ids, response_ids)
        candidate_ids_TC = np.array(candidate_ids_TC)
        if reading is None:  # nothing of this row is scored
            shape = candidate_ids_TC.shape
            nowhere_T = np.zeros(shape[0], np.int64)
            return ScoreRow(prompt_ids, nowhere_T, np.zeros(shape, np.int32), np.zeros(shape, np.bool_))
        ids, positions_T, unread_T = reading
        anchor_ids_TC, mapped_TC = self.tokens.candidate_map(torch.from_numpy(candidate_ids_TC))
        mapped = mapped_TC.numpy() & ~np.isin(anchor_ids_TC.numpy(), list(self.masked_ids))
        return ScoreRow(ids, positions_T, anchor_ids_TC.numpy(), mapped & (unread_T == Unread.READ)[:, None])

    def unread(self, prompt: int, prompt_ids: NDArray, response_ids: NDArray) -> NDArray[np.int64]:
        """Tell for every decision of a trajectory whether this model can be asked about it, and if not, why."""
        reading = self._read(prompt, prompt_ids, response_ids)
        return np.full(len(response_ids), Unread.NO_COLUMN, np.int64) if reading is None else reading[2]

    def _read(
        self, prompt: int, prompt_ids: NDArray, response_ids: NDArray
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]] | None:
        """Give the tokens that this model reads, where each decision is among them, and which it cannot read."""
        native: list[int] = []
        if self.prompts is not None:
            own = self.prompts.of(prompt, response_ids)
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


def own_prompts(run: Run, side: Side, prompts: Sequence[Prompt]) -> OwnPrompts:
    """Render what one side reads where the student reads its prompts, from the same conversations."""
    check_template(side)
    for name in sorted(side.context.columns):
        lacking = [one.id for one in prompts if name not in (one.columns or {})]
        if lacking and (len(lacking) == len(prompts) or not side.masks_missing):
            which = "no row has" if len(lacking) == len(prompts) else f"the row of prompt {lacking[0]} lacks"
            more = f" (as do {len(lacking) - 1} others)" if 1 < len(lacking) < len(prompts) else ""
            mask = "" if len(lacking) == len(prompts) else ', or set missing = "mask" in that anchor'
            raise InputError(
                f"anchors: the template {side.context.template!r} names {{{name}}}, a column that {which}{more}. "
                f"Fill it in{mask}"
            )
    given_ids = [one.token_ids for one in prompts]
    keys: list[tuple[int, bytes]] = []
    if side.context.run_columns and run.stage("rollout").complete:
        keys, prompts = with_responses(run, side.context.run_columns, prompts)
    elif side.context.run_columns:  # nothing is sampled yet: the rest is checked
        empty = dict.fromkeys(side.context.run_columns, "")
        prompts = [replace(one, columns={**(one.columns or {}), **empty}) for one in prompts]
    student, day = run.student.tokenizer, run.recipe.date
    reader = student if side.template is None else side.checkpoint.tokenizer
    given: list[str] = []
    read: list[str | None] = []
    for one in prompts:
        if not one.messages or one.form is None:
            raise _unlike_student(side, one, day)
        given.append(render(one.messages, student, one.form, day))
        columns = one.columns or {}
        if not side.context.columns | side.context.run_columns <= columns.keys():
            read.append(None)
            continue
        template, form = student, one.form
        if side.template is not None:
            template, form = side.template.tokenizer, replace(one.form, style="chat")
        read.append(render(add_context(one.messages, side.context, columns), template, form, day, reader=reader))
    is_chat = [one.form is not None and one.form.style == "chat" for one in prompts]
    for one, ids in zip(prompts, encode(given, student, is_chat), strict=True):
        if ids != one.token_ids:
            raise _unlike_student(side, one, day)
    encoded = encode([text or "" for text in read], reader, [side.template is not None or chat for chat in is_chat])
    token_ids = [None if text is None else ids for text, ids in zip(read, encoded, strict=True)]
    by_response = dict(zip(keys, token_ids, strict=True)) if keys else None
    return OwnPrompts(given_ids, token_ids, side.template is not None, by_response)


def with_responses(
    run: Run, names: Collection[str], prompts: Sequence[Prompt]
) -> tuple[list[tuple[int, bytes]], list[Prompt]]:
    """Repeat each prompt for each of its responses, with columns from its other responses, where there is one.

    `wrong` and `right` are the next one after it, in a circle, that is graded so; `shorter` is the shortest that has
    fewer tokens. Responses with the same tokens count once.
    """
    grade_R = grade_rows(run, Progress(quiet=True)) if set(names) != {"shorter"} else None
    stage = run.stage("rollout")
    groups: dict[int, dict[bytes, tuple[float, list[int]]]] = {}
    row = 0
    for shard in range(len(stage.require()["shards"])):
        rows = stage.open(Rollouts, shard).read()
        for at, prompt in enumerate(rows.prompt_R.tolist()):
            ids = rows.response_ids[at]
            written = ids if rows.decided is None else ids[rows.decided[at]]
            grade = float("nan") if grade_R is None else float(grade_R[row])
            groups.setdefault(prompt, {}).setdefault(ids.tobytes(), (grade, written.tolist()))
            row += 1
    keys, repeated = [], []
    for prompt, responses in groups.items():
        for place, (key, (_, own)) in enumerate(responses.items()):
            others = [*responses.values()]
            others = others[place + 1 :] + others[:place]
            shorter = sorted((ids for _, ids in others if len(ids) < len(own)), key=len)
            found = {
                "wrong": [ids for grade, ids in others if grade == 0.0],
                "right": [ids for grade, ids in others if grade == 1.0],
                "shorter": shorter,
            }
            decode = run.student.tokenizer.decode
            columns = {name: str(decode(found[name][0], skip_special_tokens=True)) for name in names if found[name]}
            keys.append((prompt, key))
            repeated.append(replace(prompts[prompt], columns={**(prompts[prompt].columns or {}), **columns}))
    # Doubles are never right; in a later part of training, responses to other prompts may still have one.
    for name in () if run.recipe.rehearsal or run.sampler else names:
        if not any(name in (one.columns or {}) for one in repeated):
            raise InputError(
                f"anchors: the template names {{{name}}}, but no response of this run has another response to the "
                "same prompt with that grade or length. Sample more responses, or use another column"
            )
    return keys, repeated


def _unlike_student(side: Side, prompt: Prompt, day: str | None) -> InputError:
    why = f"a context ({side.context})" if side.context else 'prompt = "native"'
    what = "has no messages"
    if prompt.messages:
        what = f"has other token ids than its messages give with the student's chat template (date = {day})"
    return InputError(
        f"anchors: {why}, but the prompt {prompt.id} of rollout.from {what}. Add the messages, tools and thinking that "
        'the student read to its line, or use prompt = "student" without post_prompt and pre_prompt'
    )


def check_template(side: Side) -> None:
    """Refuse prompt = "native" without a chat template."""
    if side.template is not None and not side.template.tokenizer.chat_template:
        raise InputError(
            f'prompt = "native", but the post-anchor {side.template.name} has no chat template. Use prompt = "student"'
        )


def masked_aliases(side: Side, untrained: Collection[int]) -> frozenset[int]:
    """Find the alias targets that may not be scored: tokens whose output row the pre-anchor never trained.

    Their shift is arbitrary and many nats large, so the recipe decides whether they are masked or kept.
    """
    tokenizer = side.checkpoint.tokenizer
    targets = {tokenizer.convert_tokens_to_ids(target): target for _, target in side.aliases}
    aliased = {id: text for id, text in targets.items() if id in untrained}
    if aliased and side.untrained is None:
        names = ", ".join(map(repr, aliased.values()))
        raise InputError(
            f"an alias leads to {names}, whose output row looks untrained in {side.checkpoint.name}: its shift is "
            'arbitrary.\nSet untrained = "mask" (no supervision there) or untrained = "keep" in that anchor'
        )
    return frozenset(aliased) if side.untrained == "mask" else frozenset()
