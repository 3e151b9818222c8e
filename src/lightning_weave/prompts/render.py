"""From messages to the text and token ids of a prompt."""

import re
from typing import TYPE_CHECKING, Any, Literal

from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(
    messages: list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase", chat: bool = True, thinking: bool = True
) -> str:
    """Render messages with the tokenizer's chat template and open the assistant's turn, or as plain text.

    `thinking` is passed to templates that have the switch `enable_thinking`.
    """
    if not chat:
        return _raw(messages)
    switch = {"enable_thinking": thinking} if knows_thinking(tokenizer) else {}
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
    except TemplateError as error:
        raise InputError(f"the chat template rejects the messages: {error}") from error
    return str(text)


def knows_thinking(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Check whether the chat template has a switch for thinking."""
    return re.search(r"\benable_thinking\b", chat_template(tokenizer)) is not None


Expectation = Literal["base", "chat", "thinking", "switch"]
EXPECTS: dict[Expectation, str] = {
    "base": "a base model without a chat template: prompts are plain text (chat = false)",
    "chat": "a chat model: prompts are rendered with its chat template",
    "thinking": "a thinking model: it thinks before every answer, so responses are long",
    "switch": "a chat model that thinks first, so responses are long; thinking = false switches that off",
}
_THINKS = re.compile(r"think>|\[THINK\]|<\|channel\|>")


def expected_of(tokenizer: "PreTrainedTokenizerBase") -> Expectation:
    """Say how a checkpoint wants to be asked, by its chat template."""
    if not tokenizer.chat_template:
        return "base"
    if knows_thinking(tokenizer):
        return "switch"
    return "thinking" if _THINKS.search(chat_template(tokenizer)) else "chat"


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the source of the chat template."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template. "
            "Set chat = false to use plain text."
        ) from error


def encode(texts: list[str], tokenizer: "PreTrainedTokenizerBase", rendered: bool) -> list[list[int]]:
    """Turn prompts into token ids.

    A chat template writes its own beginning-of-sequence token, so nothing is added to rendered text. Plain text gets
    what the tokenizer puts before every text (BOS for Llama and Gemma, nothing for Qwen) unless it already has it, but
    never what some put after it: an end of sequence would end the prompt. This BOS is only in the ids, not in the text.
    """
    encoded = _encode(tokenizer, texts, add_special_tokens=False)
    sample = next((sample for sample in zip(texts, encoded, strict=True) if sample[1]), None)
    prefix = [] if rendered or sample is None else _special_prefix(tokenizer, *sample)
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in encoded]


def _raw(messages: list[dict[str, str]]) -> str:
    if len(messages) > 1:
        raise InputError(f"a conversation of {len(messages)} turns cannot be plain text. Set chat = true")
    return messages[0]["content"]


def _special_prefix(tokenizer: "PreTrainedTokenizerBase", text: str, ids: list[int]) -> list[int]:
    """Find the special tokens that the tokenizer puts before a text with these ids."""
    [with_special] = _encode(tokenizer, [text], add_special_tokens=True)
    start = next(i for i in range(len(with_special)) if with_special[i : i + len(ids)] == ids)
    return with_special[:start]


def _encode(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    if not texts:  # transformers rejects an empty list
        return []
    # verbose=False: no warning about prompts longer than the model's context, which are counted here.
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False)
    return [list(ids) for ids in encoded["input_ids"]]
