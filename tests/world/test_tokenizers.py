"""Four tokenizers: each spells everything back, and they differ where alignment has to work."""

from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_weave.tokens import spell
from tiny_world.models import TOKENIZERS as SPECS
from tiny_world.models import make_tokenizer
from tiny_world.task import Errors, draw_problems, draw_style, make_rng, write_response

ANCHORS = ("accuracy", "brevity", "thorough")
TOKENIZERS = {name: make_tokenizer(spec, make_rng(4, name)) for name, spec in SPECS.items()}


def spellings(name: str) -> dict[bytes, int]:
    tokenizer = TOKENIZERS[name]
    special = set(tokenizer.all_special_ids)
    return {spell(tokenizer, token): token for token in range(len(tokenizer)) if token not in special}


def texts() -> list[str]:
    rng, errors = make_rng(4, "texts"), Errors.draw(make_rng(4, "slips"))
    return [
        problem.prompt + write_response(problem, draw_style(rng), errors, rng)
        for problem in islice(draw_problems(rng), 300)
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_text_comes_back_byte_for_byte(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in texts():
        ids = tokenizer.encode(text)
        assert b"".join(spell(tokenizer, token) for token in ids) == text.encode()
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompt_and_response_meet_at_a_token_boundary(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in texts():
        prompt, response = text[: text.index("Answer:") + 7], text[text.index("Answer:") + 7 :]
        assert tokenizer.encode(prompt) + tokenizer.encode(response) == tokenizer.encode(text)


def test_ids_and_ends_differ() -> None:
    ends = {tokenizer.eos_token for tokenizer in TOKENIZERS.values()}
    assert len(ends) == 4
    for name in ANCHORS:
        same = [token for text, token in spellings("student").items() if spellings(name).get(text) == token]
        assert len(same) < 10
        assert TOKENIZERS["student"].eos_token not in TOKENIZERS[name].get_vocab()


def test_only_the_student_has_its_merge() -> None:
    assert b"}." in spellings("student")
    assert all(b"}." not in spellings(name) for name in ANCHORS)


def test_anchors_have_the_words_that_decide_but_not_those_of_the_prompt() -> None:
    for name in ANCHORS:
        assert {b" hmm", b" so", b" wait", b" \\boxed{"} <= spellings(name).keys()
    pieces = {name: len(TOKENIZERS[name].encode("Question: 1\nAnswer:")) for name in TOKENIZERS}
    assert pieces == {"student": 7, "accuracy": 7, "brevity": 9, "thorough": 19}
    assert b"wer" not in spellings("student")


def test_saved_files_make_the_same_tokenizer(tmp_path: Path) -> None:
    made = TOKENIZERS["student"]
    made.save_pretrained(tmp_path)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == made.get_vocab()
    assert loaded.eos_token == "<|end|>"
    assert loaded.encode(texts()[0]) == made.encode(texts()[0])
    messages = [{"role": "user", "content": texts()[0]}]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == texts()[0]
