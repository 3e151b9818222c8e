"""From messages to the very text and token ids that the student is given."""

import re
from typing import TYPE_CHECKING, Any

from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(
    messages: list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase", chat: bool = True, thinking: bool = True
) -> str:
    """Render messages with the tokenizer's chat template and open the assistant's turn, or as they are.

    `thinking` is told to a template that knows it (`enable_thinking`); others have no such switch.
    """
    if not chat:
        return _raw(messages)
    switch = {"enable_thinking": thinking} if knows_thinking(tokenizer) else {}
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
    except TemplateError as error:
        raise InputError(f"the chat template refuses the messages: {error}") from error
    return str(text)


def knows_thinking(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether the chat template has a switch for thinking."""
    return re.search(r"\benable_thinking\b", chat_template(tokenizer)) is not None


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the source of the chat template."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template. "
            "Set chat = false to give prompts as plain text."
        ) from error


def encode(texts: list[str], tokenizer: "PreTrainedTokenizerBase", rendered: bool) -> list[list[int]]:
    """Turn prompts into token ids.

    A chat template writes its own beginning-of-sequence token, so nothing is added to what one rendered. Plain text
    gets what the tokenizer puts before every text (Llama's and Gemma's BOS, nothing for Qwen) unless it is there
    already, and never what some put after it: an end of sequence would end the prompt. A BOS put here is in the ids
    only, not in the text.
    """
    encoded = _encode(tokenizer, texts, add_special_tokens=False)
    sample = next((sample for sample in zip(texts, encoded, strict=True) if sample[1]), None)
    before = [] if rendered or sample is None else _ids_before(tokenizer, *sample)
    return [ids if ids[: len(before)] == before else before + ids for ids in encoded]


def _raw(messages: list[dict[str, str]]) -> str:
    if len(messages) > 1:
        raise InputError(f"a conversation of {len(messages)} turns cannot be plain text; it needs chat = true")
    return messages[0]["content"]


def _ids_before(tokenizer: "PreTrainedTokenizerBase", text: str, bare: list[int]) -> list[int]:
    """Find the special tokens that the tokenizer puts before a text, whose bare ids are not none."""
    [dressed] = _encode(tokenizer, [text], add_special_tokens=True)
    start = next(i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare)
    return dressed[:start]


def _encode(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    if not texts:  # which transformers does not take
        return []
    # verbose=False: a prompt longer than the model's context is ours to count, not worth a warning.
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False)
    return [list(ids) for ids in encoded["input_ids"]]
