"""The prompts of a run: how they are kept, and trajectories that a user brings with their prompts."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.errors import InputError
from lightning_weave.prompts import read_rows
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import make_room
from lightning_weave.store import write_atomic
from lightning_weave.store.tables import BadRow, Row, checked_rows
from lightning_weave.types import FINISH_REASONS, FinishReason, Prompt, Response

COLUMNS = ("prompt_ids", "response_ids", "finish", "id", "prompt", "messages", "answer")


def keep_prompts(steps: Steps, prompts: Sequence[Prompt], extra: Mapping[str, Any]) -> None:
    """Make these the prompts of the run."""
    make_room(steps.store.stage(steps.prompts))
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomic(steps.prompts_file, lines.encode())
    steps.store.stage(steps.prompts).record([steps.prompts_file], {"rows": len(prompts), **extra})


@dataclass(frozen=True)
class OwnGroup:
    """The trajectories that a user brings for one prompt."""

    prompt_ids: tuple[int, ...]
    row: dict[str, Any]
    responses: list[Response]

    def as_prompt(self, tokenizer: Any) -> Prompt:
        text = self.row.get("prompt") or tokenizer.decode(self.prompt_ids)
        digest = zlib.crc32(np.array(self.prompt_ids, "<i4").tobytes())
        known = self.row.get("id")
        name = f"own-{digest:08x}" if known is None else str(known)
        answer = self.row.get("answer")
        # No messages: the text of these ids is rendered already, and no anchor can render it in its own way.
        messages = self.row.get("messages") or []
        return Prompt(name, messages, text, list(self.prompt_ids), None if answer is None else str(answer))


def own_trajectories(steps: Steps) -> list[OwnGroup]:
    """Read `[rollout] from`: rows of prompt_ids, response_ids and, if known, finish, id, prompt, messages, answer.

    A JSONL or Parquet file, or a dataset directory, such as `lweave export` and other tools write.
    """
    path = Path(steps.recipe.rollout.from_ or "").expanduser()
    wanted = steps.recipe.rollout.responses
    vocabulary = steps.student.vocabulary
    stops = steps.student.stop_ids
    groups: dict[tuple[int, ...], OwnGroup] = {}
    for row in _rows(path):
        prompt_ids = tuple(_ids(row, "prompt_ids", vocabulary))
        if not prompt_ids:
            raise InputError(f"{row.where}: prompt_ids is empty; every prompt needs at least one token")
        response_ids = _ids(row, "response_ids", vocabulary)
        _check_messages(row)
        for key in ("id", "answer"):
            if not isinstance(row.values.get(key), str | int | float | None):
                raise InputError(f"{row.where}: {key} = {row.values[key]!r} must be text or a number")
        ended = bool(response_ids) and response_ids[-1] in stops
        response = Response(response_ids, _finish(row, ended))
        groups.setdefault(prompt_ids, OwnGroup(prompt_ids, row.values, [])).responses.append(response)
    if not groups:
        raise InputError(f"{path}: no trajectory in it; each line is one, with prompt_ids and response_ids")
    if not any(response.ids for group in groups.values() for response in group.responses):
        raise InputError(f"{path}: no response in it has a token; give response_ids as the student drew them")
    for group in groups.values():
        if len(group.responses) != wanted:
            raise InputError(
                f"{path}: the prompt {group.row.get('id', group.prompt_ids[:8])} has {len(group.responses)} responses, "
                f"but rollout.responses = {wanted}. Give every prompt as many, or set that key"
            )
    return list(groups.values())


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_dir():
        yield from checked_rows(path)
        return
    for row in read_rows(path, columns=COLUMNS):
        if isinstance(row, BadRow):
            raise InputError(f"{row.where}: {row.why}. Fix or remove this row.")
        yield row


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
