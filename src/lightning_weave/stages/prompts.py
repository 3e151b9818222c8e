"""prompts/: what the student is asked, from data of any kind or from the user's own trajectories."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError
from lightning_weave.models.load import load_tokenizer
from lightning_weave.progress import Progress
from lightning_weave.prompts import build_prompts, read_prompts
from lightning_weave.stages.steps import Steps
from lightning_weave.store import write_atomic
from lightning_weave.types import FINISH_REASONS, FinishReason, Prompt, Response


def make(steps: Steps, progress: Progress) -> list[Prompt]:
    """Read the prompts of this run, building them first if they are not there or stale. Any rank may; all agree."""
    stage = steps.store.stage(steps.prompts)
    path = stage.folder / "prompts.jsonl"
    if stage.state() == "done":
        return read_prompts(path)
    tokenizer = load_tokenizer(steps.student_path, steps.recipe.student.trust_remote_code)
    if steps.recipe.rollout.from_ is not None:
        groups = own_trajectories(Path(steps.recipe.rollout.from_), steps.recipe.rollout.responses)
        prompts = [group.as_prompt(tokenizer) for group in groups]
        counts: dict[str, Any] = {"read": len(prompts) * steps.recipe.rollout.responses, "kept": len(prompts)}
    else:
        settings = steps.recipe.prompts.model_dump()
        prompts, report = build_prompts(tokenizer, **settings)
        counts = asdict(report)
        progress.say(str(report))
    if not prompts:
        raise InputError("no prompt is left after reading and filtering; see the counts above and [prompts]")
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomic(path, lines.encode())
    stage.record([path], {"rows": len(prompts), "report": counts})
    return prompts


@dataclass(frozen=True)
class OwnGroup:
    """The trajectories that a user brings for one prompt."""

    prompt_ids: tuple[int, ...]
    row: dict[str, Any]
    responses: list[Response]

    def as_prompt(self, tokenizer: Any) -> Prompt:
        text = self.row.get("prompt") or tokenizer.decode(self.prompt_ids)
        messages = self.row.get("messages") or [{"role": "user", "content": text}]
        digest = zlib.crc32(repr(self.prompt_ids).encode())
        name = str(self.row.get("id", f"own-{digest:08x}"))
        return Prompt(name, messages, text, list(self.prompt_ids), self.row.get("answer"))


def own_trajectories(path: Path, responses: int) -> list[OwnGroup]:
    """Read `[rollout] from`: JSONL of prompt_ids, response_ids and, if known, finish, id, prompt, messages, answer."""
    groups: dict[tuple[int, ...], OwnGroup] = {}
    for where, row in _rows(path):
        prompt_ids = tuple(_ids(row, "prompt_ids", where))
        if not prompt_ids:
            raise InputError(f"{where}: prompt_ids is empty; every prompt needs at least one token")
        response = Response(_ids(row, "response_ids", where), _finish(row, where))
        groups.setdefault(prompt_ids, OwnGroup(prompt_ids, row, [])).responses.append(response)
    for group in groups.values():
        if len(group.responses) != responses:
            raise InputError(
                f"{path}: the prompt {group.row.get('id', group.prompt_ids[:8])} has {len(group.responses)} responses, "
                f"but rollout.responses = {responses}. Give every prompt as many, or set that key"
            )
    return list(groups.values())


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: must be an object with prompt_ids and response_ids")
        yield where, row


def _ids(row: dict[str, Any], key: str, where: str) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{where}: {key} must be a list of token ids")
    return ids


def _finish(row: dict[str, Any], where: str) -> FinishReason:
    finish = row.get("finish", "stop")
    if finish not in FINISH_REASONS:
        raise InputError(f"{where}: finish = {finish!r} must be one of {', '.join(FINISH_REASONS)}")
    return finish
