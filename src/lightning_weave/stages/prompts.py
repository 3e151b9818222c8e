"""prompts/: what the student is asked, from data of any kind or from the user's own trajectories."""

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_weave import prompts as sources
from lightning_weave.bench.definitions import Benchmark
from lightning_weave.checks.findings import Finding, listed, needs_prompts
from lightning_weave.checks.models import check_student, open_benchmarks
from lightning_weave.config import HELD_OUT, Eval, EvalAtLevel, Recipe
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.prompts import (
    PromptReport,
    Screen,
    encode,
    form_of,
    format_messages,
    livecodebench,
    read_columns,
    read_prompts,
    read_rows,
    render,
    render_at_level,
    unmark,
)
from lightning_weave.prompts.decontaminate import normalise
from lightning_weave.prompts.render import Message
from lightning_weave.run import ROLES, Run
from lightning_weave.store import write_atomic
from lightning_weave.store.tables import BadRow, Row, checked_rows
from lightning_weave.types import FINISH_REASONS, FinishReason, Prompt, PromptForm, Response, SamplingSettings

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT |= {"tool": "tool", "observation": "tool", "function_call": "assistant"}
_IDS = "Give token ids instead: prompt_ids, response_ids and mask"
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


def build_prompts(run: Run, progress: Progress) -> None:
    """Build the prompts of this run unless they are complete. Any rank may; all write the same."""
    stage = run.stage("prompts")
    if stage.complete:
        stage.settle()
        return
    prompts, report = planned_prompts(run)
    if report is None:
        counts: dict[str, Any] = {"read": len(prompts) * run.recipe.rollout.responses, "kept": len(prompts)}
    else:
        counts = asdict(report)
        progress.say(str(report))
    keep_prompts(run, prompts, {"report": counts})


def keep_prompts(run: Run, prompts: Sequence[Prompt], extra: Mapping[str, Any]) -> None:
    """Make these the prompts of the run."""
    run.stage("prompts").begin()
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False, default=str) + "\n" for prompt in prompts)
    write_atomic(run.prompts_file, lines.encode())
    run.stage("prompts").record([run.prompts_file], {"rows": len(prompts), **extra})


def load_prompts(run: Run, names: Collection[str], prompts: Sequence[Prompt] | None = None) -> list[Prompt]:
    """Load the prompts of the run with these columns of their rows, where a row has them."""
    if prompts is None:
        run.stage("prompts").require()
        prompts = read_prompts(run.prompts_file)
    from_source = names and any(prompt.columns is None for prompt in prompts)
    rows = read_columns(names, run.recipe.prompts) if from_source else {}
    loaded = []
    for prompt in prompts:
        row = rows.get(prompt.id, {}) if prompt.columns is None else prompt.columns
        for name in names:
            if prompt.columns is not None and name in row and row[name] is None:
                raise InputError(
                    f"rollout.from: the responses to prompt {prompt.id} have different values of {name!r}, so it has "
                    "no single one. Set rollout.responses = 1"
                )
        columns = {name: row[name] for name in names if row.get(name) is not None}
        loaded.append(replace(prompt, columns=columns))
    return loaded


def used_columns(recipe: Recipe) -> set[str]:
    """The columns of rows that contexts and tags name."""
    contexts = [anchor.context(role) for anchor in recipe.anchors.values() for role in ROLES]
    return tag_columns(recipe).union(*(context.columns for context in contexts))


def tag_columns(recipe: Recipe) -> set[str]:
    """The columns that tags are read from."""
    return set() if recipe.tags.column is None else {recipe.tags.column}


def tag_of(recipe: Recipe, prompt: Prompt) -> str:
    """The tag of one prompt, by its column or by its last turn."""
    return recipe.tags.of(prompt.messages[-1]["content"] if prompt.messages else prompt.text, prompt.columns or {})


def sampling_settings(section: Eval, benchmark: Benchmark) -> SamplingSettings:
    """How a benchmark is sampled: as the recipe says, else as the benchmark does."""
    longest = section.max_tokens or benchmark.max_tokens
    return SamplingSettings(section.temperature, section.top_p, longest, section.seed)


def render_problems(benchmark: Benchmark, tokenizer: Any, section: Eval, day: str | None) -> list[Prompt]:
    """Render every problem as the paper does: code in LiveCodeBench's form, others in the section's."""
    form = form_of(section, benchmark.kind == "code")
    questions = []
    for problem in benchmark.problems:
        if problem.row is not None:
            messages = livecodebench(problem.question, str(problem.row.get("starter_code") or ""))
            columns = problem.row
        else:
            try:
                messages = format_messages(section, [{"role": "user", "content": problem.question}], problem.columns)
            except InputError as error:
                raise InputError(f"eval.format: problem {problem.id}: {error}") from error
            columns = {**problem.columns, "answer": problem.answer}
        known = {name: value for name, value in columns.items() if value is not None}
        if isinstance(section, EvalAtLevel):
            text = render_at_level(messages, tokenizer, form, day, section.control, section.level)
        else:
            text = render(messages, tokenizer, form, day, variables=getattr(section, "template", None))
        questions.append(Prompt(problem.id, messages, text, [], form=form, columns=known))
    ids = encode([one.text for one in questions], tokenizer, form.style == "chat")
    return [
        replace(one, text=unmark(one.text, tokenizer), token_ids=own) for one, own in zip(questions, ids, strict=True)
    ]


class OwnGroup(NamedTuple):
    """The trajectories that a user brings for one prompt."""

    prompt: Prompt
    responses: list[Response]


def own_trajectories(run: Run) -> list[OwnGroup]:
    """Read `[rollout] from`: rows of token ids (prompt_ids, response_ids, perhaps mask) or of messages.

    If known, also finish, id, prompt, messages next to token ids, answer. A JSONL or Parquet file, or a dataset
    directory, such as `lweave export` and other tools write.
    """
    path = Path(run.recipe.rollout.from_ or "").expanduser()
    count = run.recipe.rollout.responses
    groups: dict[Any, OwnGroup] = {}
    of_student = run.student.vocabulary, run.student.stop_ids  # once: both look at the student's files
    for row in read_rows(path) if path.is_dir() else checked_rows(path):
        if isinstance(row, BadRow):
            raise InputError(f"{row.where}: {row.why}. Fix or remove this row.")
        if path.is_dir() or path.suffix == ".parquet":
            row = replace(row, values=_without_nulls(row.values))
        key: Any = None
        try:
            if is_log(row):
                prompt, response = read_log(row, run.student, run.recipe.date)
                key = ("log", len(groups)) if count == 1 else None  # a group of one, unless several are wanted
            else:
                prompt, response, key = _read_ids(row, run, *of_student)
        except InputError as error:
            raise InputError(f"{row.where}: {error}") from None
        columns = _columns(row, len(response.ids)) if prompt.columns is None else prompt.columns
        if key is None:  # of two runs with one first prompt, as logs have them, each has its own id
            key = (row.values.get("id") if count == 1 else None, *prompt.token_ids)
        group = groups.setdefault(key, OwnGroup(replace(prompt, columns=columns), []))
        group.responses.append(response)
        known = group.prompt.columns or {}
        known.update({name: None for name in {*known, *columns} if known.get(name) != columns.get(name)})
    if not groups:
        raise InputError(f"{path}: has no rows; each line needs prompt_ids and response_ids, or messages")
    responses = [response for group in groups.values() for response in group.responses]
    if not any(response.ids for response in responses):
        raise InputError(f"{path}: all responses are empty; give the response_ids that the student sampled")
    for group in groups.values():
        if len(group.responses) != count:
            raise InputError(
                f"{path}: the prompt {group.prompt.id} has {len(group.responses)} responses, "
                f"but rollout.responses = {count}. Give every prompt as many, or set that key"
            )
        if any(response.decided is not None for response in responses):  # all shards of a run hold the same arrays
            group.responses[:] = [replace(one, decided=one.decided or [True] * len(one.ids)) for one in group.responses]
    return list(groups.values())


def _columns(row: Row, tokens: int) -> dict[str, Any]:
    """Give what a context or a tag may name of a row: not its conversation, nor lists with a value for every token."""
    columns = {}
    for name, value in row.values.items():
        is_turns = name in ("messages", "conversations", "tools") or (
            name in ("prompt", "completion") and isinstance(value, list)
        )
        is_tokens = name == "prompt_ids" or (isinstance(value, list) and len(value) == tokens)
        if not is_turns and not is_tokens and value is not None:
            columns[name] = value
    return columns


def prompt_line(line: int, prompt: Prompt) -> str:
    """Write what rows of token ids say of their prompt, so that `rollout.from` reads it back as it is."""
    fields = {key: value for key, value in asdict(prompt).items() if key not in ("text", "token_ids")}
    return json.dumps({"line": line, **fields}, ensure_ascii=False, default=str)


def _without_nulls(value: Any) -> Any:
    """Drop the keys that a table only has because another of its rows does: a message's tool_calls, an argument."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_ids(row: Row, run: Run, vocabulary: int, stop_ids: frozenset[int]) -> tuple[Prompt, Response, int | None]:
    """Read a row of token ids: its prompt, its response with a mask, and the line of its prompt if known."""
    values = row.values
    for key in ("prompt_ids", "response_ids"):
        ids = values.get(key)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"{key} must be a list of token ids")
        if outside := [token for token in ids if not 0 <= token < vocabulary]:
            raise InputError(
                f"{key} holds {outside[0]}, but the student's tokenizer has the ids 0 to "
                f"{vocabulary - 1}. Were these tokens made with another tokenizer?"
            )
        if key == "prompt_ids" and not ids:
            raise InputError("prompt_ids is empty; every prompt needs at least one token")
    messages = values.get("messages") or []  # a column of a table may be empty
    plain = isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages)
    if not plain or not all(isinstance(turn.get(key), str) for turn in messages for key in ("role", "content")):
        raise InputError('messages must be a list of {"role": ..., "content": ...}')
    for column in ("id", "answer"):
        if not isinstance(values.get(column), str | int | float | None):
            raise InputError(f"{column} = {values[column]!r} must be text or a number")
    prompt_ids, ids = values["prompt_ids"], values["response_ids"]
    text = values.get("prompt")
    text = text if text and isinstance(text, str) else run.student.tokenizer.decode(prompt_ids)
    line = None
    if isinstance(values.get("prompt_line"), str):  # by `lweave export` or a rehearsal
        try:
            fields = json.loads(values["prompt_line"])
            line, form = fields.pop("line"), fields.pop("form")
            form = None if form is None else PromptForm(**form)
            prompt = Prompt(**fields, text=text, token_ids=prompt_ids, form=form)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"prompt_line is not what `lweave export` writes ({error}). Export it again") from None
    else:
        prompt = Prompt(
            _identity("own", row, prompt_ids), messages, text, prompt_ids, _answer(row), find_form(row, messages, run)
        )
    finish = _finish(row, bool(ids) and ids[-1] in stop_ids)
    mask = values.get("mask")
    if mask is None:
        return prompt, Response(ids, finish), line
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise InputError(f"mask must be a list of 0 and 1, one for each of its {len(ids)} response_ids")
    if ids and not any(mask):
        raise InputError("mask has no 1, so there is no token to train on. Remove the line")
    decided = None if all(mask) else [bool(value) for value in mask]
    return prompt, Response(ids, finish, decided), line


def find_form(row: Row, messages: list[Message], run: Run) -> PromptForm | None:
    """Find how messages next to token ids were rendered: the form that gives these ids, if any does."""
    if not messages:
        return None
    tokenizer = run.student.tokenizer
    thinking = bool(row.values.get("thinking", True))
    forms = [PromptForm("plain")]
    if tokenizer.chat_template:
        forms += [PromptForm("chat", switch, _tools(row)) for switch in (thinking, not thinking)]
    for form in forms:
        try:
            text = render(messages, tokenizer, form, run.recipe.date)
            if encode([text], tokenizer, form.style == "chat") == [row.values["prompt_ids"]]:
                return form
        except InputError:
            continue
    return None


def _identity(kind: str, row: Row, ids: Sequence[int]) -> str:
    own = row.values.get("id")
    return f"{kind}-{zlib.crc32(np.array(ids, '<i4').tobytes()):08x}" if own is None else str(own)


def _answer(row: Row) -> str | None:
    answer = row.values.get("answer")
    return None if answer is None else str(answer)


def _finish(row: Row, ended: bool) -> FinishReason:
    finish = row.values.get("finish") or ("stop" if ended else "length")
    if finish not in FINISH_REASONS:
        raise InputError(f"finish = {finish!r} must be one of {', '.join(FINISH_REASONS)}")
    return finish


def _tools(row: Row) -> list[Any] | None:
    tools = row.values.get("tools") or None
    if isinstance(tools, str):  # as some tables keep them
        try:
            tools = json.loads(tools)
        except ValueError:
            raise InputError("tools are not valid JSON") from None
    return tools


def is_log(row: Row) -> bool:
    """Whether a line has messages to be rendered, not token ids."""
    return "prompt_ids" not in row.values and (bool(row.values.keys() & {"messages", "conversations"}) or _is_pair(row))


def _is_pair(row: Row) -> bool:
    """Whether the messages are in two columns, as trainers that learn from completions have them."""
    return all(isinstance(row.values.get(key), list) for key in ("prompt", "completion"))


def read_log(row: Row, student: Checkpoint, day: str | None) -> tuple[Prompt, Response]:
    """Render a run with the student's chat template and find what the student wrote: the assistant's turns.

    The prompt is everything before the first turn that is learned from; a turn with weight 0 is context. A turn is what
    follows the opened turn, up to its first stop token. Each part is encoded as if it followed the part before, so that
    no token reaches across the beginning of a turn.
    """
    tokenizer, stop_ids = student.tokenizer, student.stop_ids
    messages = read_messages(row)
    form = PromptForm("chat", bool(row.values.get("thinking", True)), _tools(row))
    weights = [message.pop("weight", 1) for message in messages]
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(weights[at] for at in turns):
        raise InputError("its messages have no assistant turn to train on")
    starts, ends, closed = {}, {}, {}  # characters of the rendered text
    for at in turns:
        opened = render(messages[:at], tokenizer, form, day)
        closed[at] = render(messages[: at + 1], tokenizer, form, day, opens=False)
        if not closed[at].startswith(opened):
            raise InputError(f"turn {at + 1} does not begin with the generation prompt of the chat template. {_IDS}")
        starts[at], ends[at] = len(opened), len(closed[at])
    text = closed[turns[-1]]
    for at in turns:
        if not text.startswith(closed[at]):
            raise InputError(
                f"the chat template changes turn {at + 1} when later turns follow (some drop the reasoning of earlier "
                f"turns). {_IDS}"
            )
    learned = [at for at in turns if weights[at] and starts[at] < ends[at]]
    if not learned:
        raise InputError("all assistant turns are empty. Remove the line")
    if not starts[learned[0]]:
        raise InputError("there is no turn before the first assistant turn")
    cuts = sorted({*(starts[at] for at in learned), *(ends[at] for at in learned)})
    parts = encode_parts([text[start:end] for start, end in pairwise([0, *cuts])], tokenizer)
    prompt_ids, parts = parts[0], parts[1:]
    written = {starts[at] for at in learned}
    ids: list[int] = []
    decided: list[bool] = []
    for start, part in zip(cuts, parts, strict=False):
        stop = next((place for place, id in enumerate(part) if id in stop_ids), len(part))
        decided += [start in written and place <= stop for place in range(len(part))]
        ids += part
    if not prompt_ids or not any(decided):
        raise InputError("its prompt or its assistant turns contain no tokens. Remove the line")
    last = len(decided) - decided[::-1].index(True)
    ids, decided = ids[:last], decided[:last]
    asked = tokenizer.decode(prompt_ids)
    name = _identity("log", row, [*prompt_ids, *ids])
    prompt = Prompt(name, messages[: learned[0]], asked, prompt_ids, _answer(row), form)
    return prompt, Response(ids, _finish(row, ids[-1] in stop_ids), decided)


def encode_parts(parts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Encode text part by part: each as it is after the parts before, or alone where it would merge with them."""
    whole = encode(list(accumulate(parts)), tokenizer, rendered=True)
    encoded: list[list[int]] = []
    before: list[int] = []
    for part, ids in zip(parts, whole, strict=True):
        follows = ids[: len(before)] == before
        encoded.append(ids[len(before) :] if follows else encode([part], tokenizer, rendered=True)[0])
        before = before + encoded[-1]
    if tokenizer.decode(before) != tokenizer.decode(whole[-1]):
        raise InputError(f"a turn of the assistant merges with the tokens before it. {_IDS}")
    return encoded


def read_messages(row: Row) -> list[Message]:
    """Read OpenAI-style `messages`, `prompt` and `completion` of such, or ShareGPT's `conversations`."""
    messages: Any
    if _is_pair(row):
        prompt = [{**turn, "weight": 0} if isinstance(turn, Mapping) else turn for turn in row.values["prompt"]]
        messages = [*prompt, *row.values["completion"]]
    elif "messages" not in row.values:
        turns = row.values["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise InputError('conversations must be a list of {"from": ..., "value": ...}')
        unknown = [turn.get("from") for turn in turns if turn.get("from") not in SHAREGPT]
        if unknown:
            raise InputError(f"from = {unknown[0]!r} must be one of {', '.join(SHAREGPT)}")
        messages = [{"role": SHAREGPT[turn["from"]], "content": turn.get("value")} for turn in turns]
    else:
        messages = row.values["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError('messages must be a list of {"role": ..., "content": ...}')
    return [_message(number, message) for number, message in enumerate(messages, start=1)]


def _message(number: int, message: Any) -> Message:
    """Check one message; a call's arguments become what chat templates want: an object, not its JSON."""
    where = f"message {number}"
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in CHAT_ROLES:
        raise InputError(f"{where} has the role {role!r}; it must be one of {', '.join(CHAT_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which only text can be read
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise InputError(f"{where} has content that is not text")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or []
    if not isinstance(content, str) and not (content is None and calls):
        raise InputError(f"{where} has no content, nor tool_calls")
    turn = {**message, "content": content or ""}
    checked: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{where} has a tool call without function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise InputError(f"{where}: the arguments of {function['name']} are not valid JSON") from None
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return {**turn, "tool_calls": checked} if checked else turn


@lru_cache(maxsize=1)  # for one preflight, in which several stages ask for them
def planned_prompts(run: Run) -> tuple[list[Prompt], PromptReport | None]:
    """The prompts of the run; before they are written, as they will be, with a report on their rows."""
    stage = run.stage("prompts")
    if stage.complete:
        return read_prompts(run.prompts_file), None
    if run.recipe.rollout.from_ is not None:
        return [group.prompt for group in own_trajectories(run)], None
    holds_out = HELD_OUT in run.recipe.eval.benchmarks
    return sources.build_prompts(run.student.tokenizer, run.recipe.prompts, run.recipe.date, holds_out=holds_out)


GIVEN_AWAY = 0.05  # share of prompts that may contain their own answer by chance
QUESTION = 60  # characters of a prompt in a message


def validate(run: Run) -> Iterator[Finding]:
    """Check that the prompts can be built, do not overlap with benchmarks, and have answers but do not contain them."""
    if not needs_prompts(run):
        return
    if faults := check_student(run, "rollout"):
        yield from faults
        return
    section = run.recipe.prompts
    try:
        prompts, report = planned_prompts(run)
    except InputError as error:
        key = "prompts" if run.recipe.rollout.from_ is None else "rollout.from"
        yield Finding(key, "prompts", "error", str(error))
        return
    if report is not None and report.bad:
        first = report.bad[0]
        text = f"{len(report.bad):,} of {report.read:,} rows cannot be used; the first: {first.where}: {first.why}"
        yield Finding("prompts", "rows", "warning", text, {"bad": len(report.bad), "read": report.read})

    if report is not None and report.held_out:
        text = f"{report.held_out:,} of {report.read:,} rows are held out for evaluation, and not trained on"
        yield Finding("prompts", HELD_OUT, "ok", text, {"held_out": report.held_out, "read": report.read})

    others = [one for one in open_benchmarks(run)[0] if one.name != HELD_OUT]  # which is left out of the prompts
    problems = [(f"{one.name}: {each.id}", each) for one in others for each in one.problems]
    screen = Screen((where, problem.question) for where, problem in problems)
    turns = {}  # short problems overlap as whole turns, in the prompts' own words
    for where, problem in problems:
        try:
            asked = format_messages(section, [{"role": "user", "content": problem.question}], problem.columns)
            turns[normalise(asked[-1]["content"])] = where
        except InputError:  # the template names a column that this benchmark lacks
            turns[normalise(problem.question)] = where
    overlaps = []
    for prompt in prompts:
        for turn in [turn["content"] for turn in prompt.messages if turn["role"] == "user"] or [prompt.text]:
            overlap = screen.find(prompt.id, turn)
            if found := turns.get(normalise(turn)) or (overlap and overlap.problem):
                question = " ".join(turn.split())
                question = question if len(question) <= QUESTION else f"{question[:QUESTION].rstrip()}..."
                overlaps.append(f'"{question}" with {found}')
    if overlaps:
        text = (
            f"{len(overlaps):,} of {len(prompts):,} prompts overlap with benchmark problems, which inflates results: "
        )
        text += f"{listed(overlaps, most=3)}. To leave them out, name a file of problems in prompts.screen_against"
        yield Finding("prompts", "overlap", "warning", text, {"overlaps": len(overlaps), "prompts": len(prompts)})

    answered = [prompt for prompt in prompts if prompt.answer]
    if section.columns.answer and len(answered) < len(prompts) / 2:
        text = f"{len(prompts) - len(answered):,} of {len(prompts):,} prompts have no answer (prompts.columns.answer = "
        text += f"{section.columns.answer!r} is null there): responses to them cannot be graded"
        yield Finding("prompts", "no answers", "warning", text, {"answered": len(answered), "prompts": len(prompts)})
    graded = [] if answered or section.format == "livecodebench" else run.recipe.anchors.items()
    for key in [f"anchors.{name}.{anchor.graded}" for name, anchor in graded if anchor.graded]:
        text = "responses are to be graded, but no prompt has an answer. Add answers, or remove it"
        yield Finding(key, "answers", "error", text)
    given = [prompt.id for prompt in answered if contains_answer(prompt.text, prompt.answer or "")]
    if len(given) > GIVEN_AWAY * len(answered):
        text = f"{len(given):,} of {len(answered):,} prompts contain their own answer: {listed(given, most=3)}. Set "
        text += "prompts.columns to the column that holds only the problem"
        yield Finding("prompts", "answers", "warning", text, {"given": len(given), "answered": len(answered)})


def contains_answer(text: str, answer: str) -> bool:
    r"""Whether a text gives this answer: in a box, or after the word.

    >>> contains_answer("3 + 4? Answer: 7", "7"), contains_answer(r"It is \boxed{7}.", "7")
    (True, True)
    >>> contains_answer("3 + 7? Answer:", "7")
    False
    """
    value = re.escape(answer.strip())
    return re.search(rf"\\boxed\{{\s*{value}\s*\}}|\banswer\W+(is\W+)?{value}(?!\w)", text, re.IGNORECASE) is not None
