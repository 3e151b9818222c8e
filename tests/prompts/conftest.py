"""Real tokenizers, small: a Qwen-like one with a thinking switch, a Llama-like one with BOS and EOS, a bare one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["Find the sum of all integers n such that n + 1 divides n^2.", "Question: what is x? Answer: 1\n"] * 4
QWEN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)
LLAMA_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
    "{{- '[' + message.role + ']' + message.content -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
)


def byte_level(special: list[str], **settings: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if "bos_token" in settings:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


@pytest.fixture(scope="session")
def qwen() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def llama() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(["<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def bare() -> PreTrainedTokenizerFast:
    return byte_level(["<|endoftext|>"], eos_token="<|endoftext|>")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows, given as values or as the bytes of a line, and say where."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
        return tmp_path / name

    return write
