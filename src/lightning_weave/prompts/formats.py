"""Prompt formats. Models react to every character of these strings: do not reword them."""

from collections.abc import Mapping
from typing import Any, assert_never

from lightning_weave.config import PromptContext
from lightning_weave.config.fields import PromptFormat, named_columns
from lightning_weave.errors import InputError

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


def apply_format(format: PromptFormat, messages: list[dict[str, str]], starter: str = "") -> list[dict[str, str]]:
    """Format the last turn; earlier turns are unchanged."""
    problem = messages[-1]["content"]
    match format:
        case "plain":
            return messages
        case "dapo":
            content = dapo(problem)
        case "question-answer":
            content = question_answer(problem)
        case "boxed":
            content = boxed(problem)
        case "template":
            raise ValueError("a template is filled by fill_template")
        case "livecodebench":
            if len(messages) > 1:
                raise InputError("the livecodebench format takes a single question, not a conversation")
            return livecodebench(problem, starter)
        case _:
            assert_never(format)
    return [*messages[:-1], {"role": "user", "content": content}]


def dapo(problem: str) -> str:
    """Use the format of DAPO-Math-17k. A problem already in this format is unchanged."""
    if problem.startswith(_DAPO_BEFORE) and problem.endswith(_DAPO_AFTER):
        return problem
    return f"{_DAPO_BEFORE}{problem}{_DAPO_AFTER}"


def ask(
    format: PromptFormat,
    messages: list[dict[str, str]],
    *,
    template: str | None = None,
    system: str | None = None,
    columns: Mapping[str, Any] | None = None,
    starter: str = "",
) -> list[dict[str, str]]:
    """Put a problem to a model: in a named format or in a template's words, after a system prompt if there is one."""
    if template is None:
        turns = apply_format(format, messages, starter)
    else:
        content = fill_template(template, messages[-1]["content"], columns or {})
        turns = [*messages[:-1], {"role": "user", "content": content}]
    if system is None:
        return turns
    if turns[0]["role"] == "system":
        raise InputError("has a system turn of its own beside the recipe's `system`; remove one of them")
    return [{"role": "system", "content": system}, *turns]


def template_columns(template: str | None) -> set[str]:
    """List the columns that a template names, beside the problem itself."""
    return named_columns(template or "") - {"problem"}


def fill_template(template: str, problem: str, columns: Mapping[str, Any]) -> str:
    r"""Fill a template of the user's: `{problem}` is the problem whatever its column is called.

    >>> fill_template("{problem} ({unit})\n\\boxed{{}}", "How far?", {"unit": "km"})
    'How far? (km)\n\\boxed{}'
    """
    for name in sorted(template_columns(template)):
        if columns.get(name) is None:
            raise InputError(f"no column {name!r}, which the template names")
    return template.format(**{**columns, "problem": problem})


def in_context(
    messages: list[dict[str, str]], context: PromptContext, columns: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Put what the student is asked into the context of one side of an anchor.

    >>> in_context([{"role": "user", "content": "2+2?"}], PromptContext(template="{prompt} (It is {sum}.)"), {"sum": 4})
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


def boxed(problem: str) -> str:
    r"""Ask for the answer in a `\boxed{}`, in the words that Qwen and DeepSeek recommend."""
    return f"{problem}{_BOXED_AFTER}"


def question_answer(problem: str) -> str:
    """Use the format of the paper's maths evaluation (appendix: Mathematics prompt)."""
    return f"Question: {problem}\nAnswer:"


def livecodebench(question: str, starter: str = "") -> list[dict[str, str]]:
    """Use LiveCodeBench's CodeQwenInstruct format (appendix: LiveCodeBench prompt).

    Render these messages with `chatml`, not with the student's chat template. As in the benchmark, the user's turn
    begins with one newline and ends with two.
    """
    interface = f"{_LCB_STARTER}\n```python\n{starter}" if starter else f"{_LCB_STDIN}\n```python\n# YOUR CODE HERE"
    content = f"\n{_LCB_TASK}\n\nQuestion: {question}\n\n{interface}\n```\n\n"
    return [{"role": "system", "content": _LCB_SYSTEM}, {"role": "user", "content": content}]


def chatml(messages: list[dict[str, str]]) -> str:
    """Render messages with Qwen's delimiters and open the assistant's turn."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
