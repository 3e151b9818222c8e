"""From a problem to the text and token ids of a prompt: prompt formats, chat templates and encoding."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from lightning_weave.config import Control, Eval, PromptContext, Prompts
from lightning_weave.config.fields import named_columns
from lightning_weave.errors import InputError, first_line
from lightning_weave.types import PromptForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
CHAT = PromptForm("chat")
EFFORT_VARIABLE = "reasoning_effort"  # of the chat templates that are written, and of gpt-oss
MARK = "\U000f0000"  # a private character, before one that stands for a special token; twice: itself
_MARKED = re.compile(f"{MARK}(.)", re.DOTALL)

# Models react to every character of these strings: do not reword them.
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

_BOXED_AFTER = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."

_LCB_SYSTEM = "You are a helpful assistant."
_LCB_TASK = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches "
    "the specification and passes all tests. You will NOT return anything except for the program."
)
_LCB_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
_LCB_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)


def format_messages(
    section: Prompts | Eval, messages: list[Message], columns: Mapping[str, Any] | None = None, starter: str = ""
) -> list[Message]:
    r"""Format the last turn by the section's format or template, and prepend its system prompt.

    In a template, `{problem}` is the problem whatever its column is called.

    >>> section = Prompts(format="{problem} ({unit})\n\\boxed{{}}")
    >>> format_messages(section, [{"role": "user", "content": "How far?"}], {"unit": "km"})
    [{'role': 'user', 'content': 'How far? (km)\n\\boxed{}'}]
    """
    problem = messages[-1]["content"]
    match section.format:
        case "plain":
            content = problem
        case "dapo":
            is_formatted = problem.startswith(_DAPO_BEFORE) and problem.endswith(_DAPO_AFTER)
            content = problem if is_formatted else f"{_DAPO_BEFORE}{problem}{_DAPO_AFTER}"
        case "question-answer":  # appendix: Mathematics prompt
            content = f"Question: {problem}\nAnswer:"
        case "boxed":  # as Qwen and DeepSeek recommend
            content = f"{problem}{_BOXED_AFTER}"
        case "livecodebench":
            if len(messages) > 1:
                raise InputError("the livecodebench format takes a single question, not a conversation")
            return livecodebench(problem, starter)
        case template:
            columns = columns or {}
            for name in sorted(named_columns(template) - {"problem"}):
                if columns.get(name) is None:
                    raise InputError(f"no column {name!r}, which the template names")
            content = template.format(**{**columns, "problem": problem})
    turns = [*messages[:-1], {"role": "user", "content": content}]
    if section.system is None:
        return turns
    if turns[0]["role"] == "system":
        raise InputError("has a system turn, and the recipe sets `system`; remove one of them")
    return [{"role": "system", "content": section.system}, *turns]


def livecodebench(question: str, starter: str = "") -> list[Message]:
    """Use LiveCodeBench's CodeQwenInstruct format (appendix: LiveCodeBench prompt).

    Rendered as ChatML (`PromptForm.is_code`), not with the student's chat template. As in the benchmark, the user's
    turn begins with one newline and ends with two.
    """
    interface = f"{_LCB_STARTER}\n```python\n{starter}" if starter else f"{_LCB_STDIN}\n```python\n# YOUR CODE HERE"
    content = f"\n{_LCB_TASK}\n\nQuestion: {question}\n\n{interface}\n```\n\n"
    return [{"role": "system", "content": _LCB_SYSTEM}, {"role": "user", "content": content}]


def add_context(messages: list[Message], context: PromptContext, columns: Mapping[str, Any]) -> list[Message]:
    """Put the student's messages into the context of one side of an anchor.

    >>> context = PromptContext(template="{prompt} (It is {sum}.)")
    >>> add_context([{"role": "user", "content": "2+2?"}], context, {"sum": 4})
    [{'role': 'user', 'content': '2+2? (It is 4.)'}]
    """
    *before, last = messages
    turn = last["content"]
    if context.template is not None:
        turn = context.template.format(**{**columns, "prompt": turn})
    if context.system is not None:
        others = [message for message in before if message["role"] != "system"]
        before = [{"role": "system", "content": context.system}, *others]
    return [*before, {**last, "content": f"{context.prefix or ''}{turn}"}]


def render_at_level(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    form: PromptForm,
    day: str | None,
    control: Control,
    level: str,
) -> str:
    """Render messages with an effort level: after the system turn, before the user's, or by a variable."""
    if control.variable is not None:
        return render(messages, tokenizer, form, day, variables={control.variable: level})
    text = control.text(level)
    if control.prefix is not None:
        return render(add_context(messages, PromptContext(prefix=text), {}), tokenizer, form, day)
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else ({"content": ""}, messages)
    system = f"{first['content']}\n\n{text}" if first["content"] else text
    return render([{"role": "system", "content": system}, *rest], tokenizer, form, day)


def template_with_levels(tokenizer: "PreTrainedTokenizerBase", control: Control, levels: Sequence[str] | None) -> str:
    """Wrap the chat template so that EFFORT_VARIABLE does what `render_at_level` did in training.

    Without the variable it renders as before; so it does with a value other than `levels`, if these are given.
    """
    template = chat_template(tokenizer)
    name = EFFORT_VARIABLE
    known = f"in {json.dumps(list(levels))}" if levels is not None else "not in [none, '']"
    condition = f"{{%- if {name} is defined and {name} {known} -%}}"
    if control.variable is not None:
        if control.variable == name:
            return template
        return f"{condition}{{%- set {control.variable} = {name} -%}}{{%- endif %}}{{{{- '' }}}}{template}"
    level = name if levels is not None else f"({name} | int if {name} == {name} | int else {name})"  # 1.0 as "1"
    text = f" ~ {level} ~ ".join(json.dumps(part, ensure_ascii=False) for part in control.text("\0").split("\0"))
    if control.prefix is not None:  # before the last user's turn; tools may have answered since
        change = (
            "{%- set effort = namespace(at=-1) -%}{%- for turn in messages -%}{%- if turn['role'] == 'user' -%}"
            "{%- set effort.at = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- if effort.at >= 0 -%}"
            "{%- set own = messages[effort.at]['content'] -%}"
            f"{{%- set own = {text} ~ own if own is string else [{{'type': 'text', 'text': {text}}}] + own -%}}"
            "{%- set turn = [{'role': 'user', 'content': own}] -%}"
            "{%- set messages = messages[:effort.at] + turn + messages[effort.at + 1:] -%}{%- endif -%}"
        )
    else:
        change = (
            "{%- set own = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}"
            "{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages -%}"
            f"{{%- set own = (own ~ '\\n\\n' if own else '') ~ {text} if own is string "
            f"else own + [{{'type': 'text', 'text': '\\n\\n' ~ {text}}}] -%}}"
            "{%- set messages = [{'role': 'system', 'content': own}] + rest -%}"
        )
    return f"{condition}{change}{{%- endif %}}{{{{- '' }}}}{template}"


def form_of(section: Prompts | Eval, is_code: bool) -> PromptForm:
    """Choose how the messages of a section are rendered."""
    return PromptForm("chatml" if is_code else "chat" if section.chat else "plain", section.thinking)


def render(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    form: PromptForm = CHAT,
    day: str | None = None,
    *,
    opens: bool = True,
    reader: "PreTrainedTokenizerBase | None" = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages for `encode`, and open the assistant's turn.

    Special tokens in the messages are marked: they stay text, only those of the template are control tokens. Plain text
    is taken as it is. `day` is what the template takes for today; `reader` encodes the text, if another tokenizer does.
    """
    if variables and form.style != "chat":
        raise InputError("template and control.variable set variables of the chat template, which is not used here")
    if form.style == "plain":
        if len(messages) > 1:
            raise InputError(f"a conversation of {len(messages)} turns cannot be plain text. Set chat = true")
        return str(messages[0]["content"]).replace(MARK, MARK + MARK)
    if form.style == "chat":
        chat_template(tokenizer)  # refused where there is none
    special = special_tokens(reader or tokenizer)
    written = _turn_tokens(tokenizer, str(tokenizer.chat_template)) if form.style == "chat" else frozenset(special)
    turns = []
    for message in messages:  # an assistant may write special tokens, such as those around its thoughts
        kept = [token for token in special if token in written] if message["role"] == "assistant" else [*special]
        turns.append({key: value if key == "role" else _mark(value, kept, special) for key, value in message.items()})
    if form.style == "chatml":
        lines = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns]
        return "".join(lines) + "<|im_start|>assistant\n"
    settings: dict[str, Any] = {"enable_thinking": form.thinking} if knows_thinking(tokenizer) else {}
    settings |= variables or {}
    template = str(tokenizer.get_chat_template(tools=form.tools))
    if day is not None and "strftime_now" in template:
        settings["chat_template"] = macro_of_date(day) + template
    tools = _mark(form.tools, [*special], special)
    return _apply_template(tokenizer, turns, tools=tools, add_generation_prompt=opens, **settings)


def macro_of_date(day: str | None) -> str:
    """Define `strftime_now` for a chat template: transformers passes data to templates, no functions."""
    if day is None:
        return ""
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdHIjmMpSuUwWxXyY"]
    values = [json.dumps([name, datetime.fromisoformat(day).strftime(name)])[1:-1] for name in directives]
    replaced = "".join(f" | replace({value})" for value in values)
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{replaced} -}}}}{{%- endmacro -%}}"


def _apply_template(tokenizer: "PreTrainedTokenizerBase", turns: list[Message], **settings: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))
    except Exception as error:  # a template is a program
        raise InputError(f"the chat template rejects the messages: {first_line(error)}") from error


@lru_cache(maxsize=16)
def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Map the control tokens of a tokenizer to their ids."""
    special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: id for token, id in special.items() if token and token != tokenizer.unk_token}


@lru_cache(maxsize=16)
def _turn_tokens(tokenizer: "PreTrainedTokenizerBase", _template: str) -> frozenset[str]:
    """Find the special tokens that end a turn or that the chat template writes around turns."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "a reply"}]
    try:
        text = _apply_template(tokenizer, turns, add_generation_prompt=True)
    except InputError:  # a template that wants more than two plain turns
        return frozenset(special_tokens(tokenizer))
    return frozenset(token for token in special_tokens(tokenizer) if token in text or token == tokenizer.eos_token)


def _mark(value: Any, tokens: Sequence[str], special: Mapping[str, int]) -> Any:
    """Replace special tokens in all text by a mark and a character that stands for the token."""
    if isinstance(value, Mapping):
        return {key: _mark(inner, tokens, special) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mark(inner, tokens, special) for inner in value]
    if not isinstance(value, str):
        return value
    value = value.replace(MARK, MARK + MARK)
    for token in sorted((token for token in tokens if token in value), key=len, reverse=True):
        value = value.replace(token, MARK + chr(ord(MARK) + 1 + list(special).index(token)))
    return value


def unmark(text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Turn rendered text into what the model reads as characters."""
    if MARK not in text:
        return text
    special = [MARK, *special_tokens(tokenizer)]
    return _MARKED.sub(lambda match: special[ord(match[1]) - ord(MARK)], text)


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the source of the chat template."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template. "
            "Set chat = false to use plain text."
        ) from error


def knows_thinking(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Check whether the chat template has a switch for thinking."""
    return re.search(r"\benable_thinking\b", chat_template(tokenizer)) is not None


ChatMode = Literal["base", "chat", "thinking", "switch"]
CHAT_MODES: dict[ChatMode, str] = {
    "base": "a base model without a chat template: prompts are plain text (chat = false)",
    "chat": "a chat model: prompts are rendered with its chat template",
    "thinking": "a thinking model: it thinks before every answer, so responses are long",
    "switch": "a chat model that thinks first, so responses are long; thinking = false switches that off",
}


def detect_chat_mode(tokenizer: "PreTrainedTokenizerBase") -> ChatMode:
    """Find out from its chat template which prompts a checkpoint expects."""
    if not tokenizer.chat_template:
        return "base"
    if knows_thinking(tokenizer):
        return "switch"
    return "thinking" if re.search(r"think>|\[THINK\]|<\|channel\|>", chat_template(tokenizer)) else "chat"


def encode(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", rendered: bool | Sequence[bool]
) -> list[list[int]]:
    """Turn what `render` returns into token ids.

    A chat template writes its own beginning-of-sequence token, so nothing is added to `rendered` text. Other text gets
    what the tokenizer puts before every text (BOS for Llama and Gemma, nothing for Qwen) unless it already has it, but
    never what some put after it: an end of sequence would end the prompt. This BOS is only in the ids, not in the text.
    """
    if not texts:  # transformers rejects an empty list
        return []
    # verbose=False: no warning about prompts longer than the model's context, which are counted elsewhere.
    settings: dict[str, Any] = {"verbose": False, "return_attention_mask": False}
    plain = [unmark(text, tokenizer) for text in texts]
    encoded = [list(ids) for ids in tokenizer(plain, add_special_tokens=False, **settings)["input_ids"]]
    complete = [rendered] * len(texts) if isinstance(rendered, bool) else rendered
    prefix: list[int] = []
    sample = next((place for place, ids in enumerate(encoded) if ids and not complete[place]), None)
    if sample is not None:
        ids = encoded[sample]
        with_special = list(tokenizer([plain[sample]], add_special_tokens=True, **settings)["input_ids"][0])
        start = next(i for i in range(len(with_special)) if with_special[i : i + len(ids)] == ids)
        prefix = with_special[:start]
    for place, text in enumerate(texts):
        ids = encoded[place]
        if MARK in text:
            ids = _split_marked(text, ids, tokenizer)
        encoded[place] = ids if complete[place] or ids[: len(prefix)] == prefix else prefix + ids
    return encoded


def _split_marked(text: str, ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Replace each special token that is marked in the text by the pieces of its spelling."""
    special = special_tokens(tokenizer)
    names = [MARK, *special]
    pattern = "|".join([_MARKED.pattern, *map(re.escape, sorted(special, key=len, reverse=True))])
    matches = [match for match in re.finditer(pattern, text, re.DOTALL) if match[1] != MARK]
    found = [match[0] if match[1] is None else names[ord(match[1]) - ord(MARK)] for match in matches]
    read = [id for id in ids if id in special.values()]
    pieces = {
        name: tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"] for name in set(found)
    }
    if read != [special[name] for name in found] or any(special[name] in pieces[name] for name in found):
        names = sorted({name for match, name in zip(matches, found, strict=True) if match[1]})
        raise InputError(f"contains {', '.join(names)}, which the tokenizer reads as special tokens. Remove them")
    split: list[int] = []
    following = zip(matches, found, strict=True)
    for id in ids:
        match, name = next(following) if id in special.values() else (None, "")
        split += pieces[name] if match and match[1] else [id]
    return split
