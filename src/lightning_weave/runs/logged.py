"""Logged runs of several turns, with tools: messages as the student's tokens, and which of them it wrote."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jinja2 import TemplateError

from lightning_weave.errors import InputError
from lightning_weave.prompts.render import chat_template, knows_thinking
from lightning_weave.store.tables import Row

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT |= {"tool": "tool", "observation": "tool", "function_call": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool")


class LoggedRun(NamedTuple):
    """One logged run in the student's tokens. It begins where the student first writes and ends where it last does."""

    prompt_ids: list[int]
    response_ids: list[int]
    decided: list[bool]
    asked: list[dict[str, Any]]  # the messages before its first turn


def is_log(row: Row) -> bool:
    """Whether a line gives messages to be rendered, not token ids."""
    return "prompt_ids" not in row.values and (bool(row.values.keys() & {"messages", "conversations"}) or _is_pair(row))


def _is_pair(row: Row) -> bool:
    """Whether the messages are in two columns, as trainers that learn from completions have them."""
    return all(isinstance(row.values.get(key), list) for key in ("prompt", "completion"))


def read_log(row: Row, tokenizer: Any, stops: Collection[int]) -> LoggedRun:
    """Render a run with the student's chat template and find what the student wrote: the assistant's turns.

    A turn is the text that follows the opened turn, up to its first stop token. One with weight 0 is context.
    """
    messages = read_messages(row)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(messages[at].get("weight", 1) for at in turns):
        raise InputError(f"{row.where}: no turn of the assistant in its messages, so there is nothing to learn from")
    spans = []
    for at in turns:
        opened = _render(row, messages[:at], tokenizer, opens=True)
        closed = _render(row, messages[: at + 1], tokenizer, opens=False)
        if not closed.startswith(opened):
            raise InputError(f"{row.where}: the chat template opens turn {at + 1} otherwise than it writes it. {_IDS}")
        spans.append((at, len(opened), len(closed), closed))
    text = spans[-1][3]
    for at, _, _, closed in spans:
        if not text.startswith(closed):
            raise InputError(
                f"{row.where}: the chat template writes turn {at + 1} otherwise once more turns follow (some drop the "
                f"reasoning of earlier turns). {_IDS}"
            )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    decided = [False] * len(ids)
    for at, start, end, _ in spans:
        for place, (first, last) in enumerate(encoded["offset_mapping"]):
            if first >= start and last <= end and messages[at].get("weight", 1):
                decided[place] = True
                if ids[place] in stops:
                    break
    if not any(decided):
        raise InputError(f"{row.where}: the turns of the assistant have no token of their own. Leave the line out")
    first = decided.index(True)
    last = len(decided) - decided[::-1].index(True)
    if first == 0:
        raise InputError(f"{row.where}: nothing stands before the first turn of the assistant")
    return LoggedRun(ids[:first], ids[first:last], decided[first:last], messages[: turns[0]])


_IDS = "Give token ids instead: prompt_ids, response_ids and mask"


def read_messages(row: Row) -> list[dict[str, Any]]:
    """Read OpenAI-style `messages`, `prompt` and `completion` of such, or ShareGPT's `conversations`."""
    messages: Any
    if _is_pair(row):
        prompt = [{**turn, "weight": 0} if isinstance(turn, Mapping) else turn for turn in row.values["prompt"]]
        messages = [*prompt, *row.values["completion"]]
    elif "messages" not in row.values:
        turns = row.values["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise InputError(f'{row.where}: conversations must be a list of {{"from": ..., "value": ...}}')
        unknown = [turn.get("from") for turn in turns if turn.get("from") not in SHAREGPT]
        if unknown:
            raise InputError(f"{row.where}: from = {unknown[0]!r} must be one of {', '.join(SHAREGPT)}")
        messages = [{"role": SHAREGPT[turn["from"]], "content": turn.get("value")} for turn in turns]
    else:
        messages = row.values["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{row.where}: messages must be a list of {{"role": ..., "content": ...}}')
    return [_message(row, number, message) for number, message in enumerate(messages, start=1)]


def _message(row: Row, number: int, message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise InputError(f"{row.where}: message {number} has the role {role!r}; it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which only text can be read
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise InputError(f"{row.where}: message {number} has content that is not text")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or []
    if not isinstance(content, str) and not (content is None and calls):
        raise InputError(f"{row.where}: message {number} has no content, nor tool_calls")
    turn = {**message, "content": content or ""}
    if calls:
        turn["tool_calls"] = [_call(row, number, call) for call in calls]
    return turn


def _call(row: Row, number: int, call: Any) -> dict[str, Any]:
    """Give a call's arguments as chat templates want them: an object, not its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{row.where}: message {number} has a tool call without function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise InputError(
                f"{row.where}: message {number}: the arguments of {function['name']} are no JSON"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(row: Row, tools: str) -> Any:
    try:
        return json.loads(tools)
    except ValueError:
        raise InputError(f"{row.where}: tools are no JSON") from None


def _render(row: Row, messages: list[dict[str, Any]], tokenizer: Any, *, opens: bool) -> str:
    chat_template(tokenizer)  # refused where there is none
    switch = {"enable_thinking": bool(row.values.get("thinking", True))} if knows_thinking(tokenizer) else {}
    tools = row.values.get("tools") or None
    if isinstance(tools, str):  # as some tables keep them
        tools = _parsed(row, tools)
    turns = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=opens, **switch)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"{row.where}: the chat template rejects its messages or tools: {error}") from None
    return str(text)
