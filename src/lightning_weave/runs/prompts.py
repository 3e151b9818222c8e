"""The prompts of a run: how they are kept, and trajectories that a user brings with their prompts."""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError
from lightning_weave.prompts import chatml, read_columns, read_prompts, read_rows, render
from lightning_weave.runs.logged import is_log, read_log
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import make_room
from lightning_weave.store import write_atomic
from lightning_weave.store.tables import BadRow, Row, checked_rows
from lightning_weave.types import FINISH_REASONS, FinishReason, Prompt, Response


def keep_prompts(steps: Steps, prompts: Sequence[Prompt], extra: Mapping[str, Any]) -> None:
    """Make these the prompts of the run."""
    make_room(steps.store.stage(steps.prompts))
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomic(steps.prompts_file, lines.encode())
    steps.store.stage(steps.prompts).record([steps.prompts_file], {"rows": len(prompts), **extra})


@dataclass(frozen=True)
class Form:
    """How messages become the text that the student reads."""

    is_code: bool  # LiveCodeBench's own form
    chat: bool
    thinking: bool
    rendered: bool  # the text has all the special tokens that it needs

    def text(self, messages: list[dict[str, str]], tokenizer: Any) -> str:
        return chatml(messages) if self.is_code else render(messages, tokenizer, self.chat, self.thinking)


@dataclass(frozen=True)
class Asked:
    """A prompt, columns of the row that it was built from (those that the row has), and how it is rendered."""

    prompt: Prompt
    columns: Mapping[str, Any]
    form: Form


def asked_prompts(steps: Steps, names: Collection[str], prompts: Sequence[Prompt] | None = None) -> list[Asked]:
    """Give the prompts of the run with columns of their rows, which are read from the source again."""
    if prompts is None:
        steps.store.stage(steps.prompts).require()
        prompts = read_prompts(steps.prompts_file)
    section = steps.recipe.prompts
    is_code = section.format == "livecodebench"
    form = Form(is_code, section.chat, section.thinking, rendered=section.chat and not is_code)
    if not names:
        return [Asked(prompt, {}, form) for prompt in prompts]
    if steps.recipe.rollout.from_ is not None:
        tokenizer = steps.student.tokenizer
        rows = {group.as_prompt(tokenizer).id: group.row for group in own_trajectories(steps)}
    else:
        rows = read_columns(names, section)
    return [
        Asked(prompt, {name: rows[prompt.id][name] for name in names if rows[prompt.id].get(name) is not None}, form)
        for prompt in prompts
    ]


def tag_columns(recipe: Recipe) -> set[str]:
    """The columns that tags are read from."""
    return set() if recipe.tags.column is None else {recipe.tags.column}


def tag_of(recipe: Recipe, asked: Asked) -> str:
    """The tag of one prompt, by its column or by its last turn."""
    messages = asked.prompt.messages
    return recipe.tags.of(messages[-1]["content"] if messages else asked.prompt.text, asked.columns)


@dataclass(frozen=True)
class OwnGroup:
    """The trajectories that a user brings for one prompt."""

    prompt_ids: tuple[int, ...]
    row: dict[str, Any]
    responses: list[Response]

    def as_prompt(self, tokenizer: Any) -> Prompt:
        prompt = self.row.get("prompt")  # a list beside a completion: its messages
        text = prompt if prompt and isinstance(prompt, str) else tokenizer.decode(self.prompt_ids)
        digest = zlib.crc32(np.array(self.prompt_ids, "<i4").tobytes())
        own_id = self.row.get("id")
        name = f"own-{digest:08x}" if own_id is None else str(own_id)
        answer = self.row.get("answer")
        # No messages: the text of these ids is rendered already, and no anchor can render it in its own way.
        messages = self.row.get("messages") or []
        return Prompt(name, messages, text, list(self.prompt_ids), None if answer is None else str(answer))


def own_trajectories(steps: Steps) -> list[OwnGroup]:
    """Read `[rollout] from`: rows of token ids (prompt_ids, response_ids, perhaps mask) or of messages.

    If known, also finish, id, prompt, messages beside token ids, answer. A JSONL or Parquet file, or a dataset
    directory, such as `lweave export` and other tools write.
    """
    path = Path(steps.recipe.rollout.from_ or "").expanduser()
    count = steps.recipe.rollout.responses
    vocabulary = steps.student.vocabulary
    stops = steps.student.stop_ids
    groups: dict[tuple[int, ...], OwnGroup] = {}
    for row in _rows(path):
        if is_log(row):
            run = read_log(row, steps.student.tokenizer, stops)
            finish = _finish(row, run.response_ids[-1] in stops)
            plain = all(isinstance(turn["content"], str) and "tool_calls" not in turn for turn in run.asked)
            digest = zlib.crc32(np.array([*run.prompt_ids, *run.response_ids], "<i4").tobytes())
            values = {"id": f"log-{digest:08x}", **row.values, "messages": run.asked if plain else []}
            response = Response(run.response_ids, finish, run.decided)
            # Every run is a group of its own, unless several were wanted for each prompt.
            key = tuple(run.prompt_ids) if count > 1 else (len(groups), *run.prompt_ids)
            groups.setdefault(key, OwnGroup(tuple(run.prompt_ids), values, [])).responses.append(response)
            continue
        prompt_ids = tuple(_ids(row, "prompt_ids", vocabulary))
        if not prompt_ids:
            raise InputError(f"{row.where}: prompt_ids is empty; every prompt needs at least one token")
        response_ids = _ids(row, "response_ids", vocabulary)
        _check_messages(row)
        for column in ("id", "answer"):
            if not isinstance(row.values.get(column), str | int | float | None):
                raise InputError(f"{row.where}: {column} = {row.values[column]!r} must be text or a number")
        ended = bool(response_ids) and response_ids[-1] in stops
        response = Response(response_ids, _finish(row, ended), _mask(row, len(response_ids)))
        groups.setdefault(prompt_ids, OwnGroup(prompt_ids, row.values, [])).responses.append(response)
    if not groups:
        raise InputError(f"{path}: no trajectory in it; each line is one, with prompt_ids and response_ids")
    if not any(response.ids for group in groups.values() for response in group.responses):
        raise InputError(f"{path}: no response in it has a token; give response_ids as the student drew them")
    for group in groups.values():
        if len(group.responses) != count:
            raise InputError(
                f"{path}: the prompt {group.row.get('id', group.prompt_ids[:8])} has {len(group.responses)} responses, "
                f"but rollout.responses = {count}. Give every prompt as many, or set that key"
            )
    own_groups = list(groups.values())
    if any(response.decided is not None for group in own_groups for response in group.responses):
        own_groups = [replace(group, responses=[_all_said(one) for one in group.responses]) for group in own_groups]
    return own_groups


def _all_said(response: Response) -> Response:
    """Say of every token whether the student wrote it: all shards of a run hold the same arrays."""
    return response if response.decided is not None else replace(response, decided=[True] * len(response.ids))


def _rows(path: Path) -> Iterator[Row]:
    is_table = path.is_dir() or path.suffix == ".parquet"
    for row in read_rows(path) if path.is_dir() else checked_rows(path):
        if isinstance(row, BadRow):
            raise InputError(f"{row.where}: {row.why}. Fix or remove this row.")
        yield replace(row, values=_without_nulls(row.values)) if is_table else row


def _without_nulls(value: Any) -> Any:
    """Drop the keys that a table only has because another of its rows does: a message's tool_calls, an argument."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _ids(row: Row, key: str, vocabulary: int) -> list[int]:
    ids = row.values.get(key)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InputError(f"{row.where}: {key} must be a list of token ids")
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        raise InputError(
            f"{row.where}: {key} holds {outside[0]}, but the student's tokenizer has the ids 0 to {vocabulary - 1}. "
            "Were these tokens made with another tokenizer?"
        )
    return ids


def _mask(row: Row, length: int) -> list[bool] | None:
    """Read which tokens the student wrote; a mask of all is none."""
    mask = row.values.get("mask")
    if mask is None:
        return None
    if not isinstance(mask, list) or len(mask) != length or any(value not in (0, 1) for value in mask):
        raise InputError(f"{row.where}: mask must be a list of 0 and 1, one for each of its {length} response_ids")
    if length and not any(mask):
        raise InputError(f"{row.where}: mask has no 1, so the student wrote nothing. Leave the line out")
    return None if all(mask) else [bool(value) for value in mask]


def _check_messages(row: Row) -> None:
    turns = row.values.get("messages") or []  # a column of a table may be empty
    plain = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if not plain or not all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content")):
        raise InputError(f'{row.where}: messages must be a list of {{"role": ..., "content": ...}}')


def _finish(row: Row, ended: bool) -> FinishReason:
    finish = row.values.get("finish") or ("stop" if ended else "length")
    if finish not in FINISH_REASONS:
        raise InputError(f"{row.where}: finish = {finish!r} must be one of {', '.join(FINISH_REASONS)}")
    return finish
