"""The map between two tokenizers: contexts keep their bytes at every boundary, candidates one to one."""

import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from lightning_weave.errors import InputError
from lightning_weave.tokens import TokenMap, spell
from lightning_weave.tokens.spelling import Origin, Spelling
from tokens.samples import TEXT, byte_level, fast, sentencepiece

PAIRS = [
    ("qwen3", "deepseek"),
    ("qwen3", "qwen2"),
    ("qwen3", "mistral"),
    ("qwen3", "tekken"),
    ("small_bytes", "small_pieces"),
    ("small_pieces", "small_llama"),
    ("qwen3", "small_pieces"),
    ("small_llama", "deepseek"),
]


Align = Callable[[Any, Any], TokenMap]


def both_ways(one: str, other: str) -> list[Any]:
    marks = [pytest.mark.slow] if "tekken" in (one, other) else []
    return [pytest.param(names, marks=marks, id="-".join(names)) for names in ((one, other), (other, one))]


@pytest.fixture(params=[param for names in PAIRS for param in both_ways(*names)])
def pair(request: pytest.FixtureRequest, align: Align) -> tuple[Any, Any, TokenMap]:
    student, anchor = (request.getfixturevalue(name) for name in request.param)
    return student, anchor, align(student, anchor)


def contexts(student: Any) -> list[list[int]]:
    """Make text, the same tokens in an order that breaks characters apart, and tokens from all over the vocabulary."""
    rng = random.Random(0)
    text = student.encode(TEXT, add_special_tokens=False)
    spelling = Spelling.from_tokenizer(student)
    specials = [id for id in spelling.strings if spelling.origins[id] <= Origin.ADDED][:20]
    halves = [id for id, spelt in spelling.bytes_of.items() if "\ufffd" in spelt.decode(errors="replace")]
    anything = rng.sample(sorted(spelling.strings), k=min(1000, len(spelling.strings)))
    broken = rng.sample(text + specials + halves[:1000], k=len(text + specials + halves[:1000]))
    return [text, broken, anything, []]


def test_a_context_has_the_same_bytes_at_every_boundary(pair: tuple[Any, Any, TokenMap]) -> None:
    student, anchor, tokens = pair
    for ids in contexts(student):
        projected, boundaries = tokens.project(ids)
        assert tokens.lossless_prefix(ids) == len(ids)
        assert (boundaries[0], boundaries[-1], len(boundaries)) == (0, len(projected), len(ids) + 1)
        spelt = list(accumulate((spell(anchor, id) for id in projected), initial=b""))
        for t, prefix in enumerate(accumulate((spell(student, id) for id in ids), initial=b"")):
            assert spelt[boundaries[t]] == prefix
        for id, (start, end) in zip(ids, pairwise(boundaries), strict=True):
            assert end == start + 1 or not alike(tokens, id)  # never two tokens where the anchor has one


def alike(tokens: TokenMap, id: int) -> list[int]:
    """List the anchor's tokens of the same bytes, but for controls that text only looks like, and the reverse."""
    kind, origins = tokens.student.origins[id], tokens.anchor.origins
    found = tokens.anchor.ids_of.get(tokens.student.bytes_of[id], [])
    return [a for a in found if not (min(kind, origins[a]) == Origin.CONTROL and max(kind, origins[a]) >= Origin.PIECE)]


def test_every_candidate_is_one_token_of_the_same_bytes(pair: tuple[Any, Any, TokenMap]) -> None:
    student, anchor, tokens = pair
    ids = torch.tensor(sorted(Spelling.from_tokenizer(student).strings))
    anchor_ids, mapped = tokens.candidate_map(ids)
    images = anchor_ids[mapped].tolist()
    taken = set(images)
    assert len(taken) == len(images)
    for id, anchor_id, one in zip(ids.tolist(), anchor_ids.tolist(), mapped.tolist(), strict=True):
        if one:
            assert spell(anchor, anchor_id) == spell(student, id)
            assert anchor_id in alike(tokens, id)
        else:  # no such token, or taken by a twin of the same spelling
            assert anchor_id == 0
            assert taken.issuperset(alike(tokens, id))


def test_a_candidate_of_two_anchor_tokens_masks_its_position(qwen3: Any, deepseek: Any, align: Align) -> None:
    tokens = align(qwen3, deepseek)
    whole, parts = qwen3.convert_tokens_to_ids("Ġthe"), qwen3.convert_tokens_to_ids("<|im_end|>")
    assert len(tokens.project([parts])[0]) > 1
    ids_TC = torch.tensor([[whole, 0], [whole, parts], [1, 2]], dtype=torch.int32)
    anchor_ids_TC, valid_T = tokens.candidates(ids_TC)
    assert valid_T.tolist() == [True, False, True]
    assert anchor_ids_TC[0, 0] == deepseek.convert_tokens_to_ids("Ġthe")
    assert anchor_ids_TC.dtype == torch.int32
    assert tokens.candidate_map(ids_TC)[1].tolist() == [[True, True], [True, False], [True, True]]


def test_ids_outside_the_vocabulary_are_unmapped_and_end_a_context(qwen3: Any, deepseek: Any, align: Align) -> None:
    tokens = align(qwen3, deepseek)
    outside = [-1, 151669, 151935, 10**6]
    assert tokens.candidate_map(torch.tensor(outside))[1].tolist() == [False] * 4
    before = qwen3.encode("so be it", add_special_tokens=False)
    for id in outside:
        ids = [*before, id, *before]
        projected, boundaries = tokens.project(ids)
        assert tokens.lossless_prefix(ids) == len(before)
        assert projected == tokens.project(before)[0]
        assert boundaries == tokens.project(before)[1] + [len(projected)] * (1 + len(before))


def test_an_added_token_without_lossless_text_ends_a_context() -> None:
    student = byte_level(["a b"], added=("é!",))
    ids = student.convert_tokens_to_ids(["a", "é!", "b"])
    tokens = TokenMap.between(student, byte_level(["b a"], added=("é!",)))
    assert tokens.lossless_prefix(ids) == 1
    assert tokens.project(ids)[1] == [0, 1, 1, 1]
    assert tokens.candidate_map(torch.tensor(ids))[1].tolist() == [True, False, True]


def test_bytes_that_the_anchor_cannot_write_end_a_context() -> None:
    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    letters.decoder = decoders.ByteLevel()
    student = byte_level(["a b"])
    ids = student.convert_tokens_to_ids(["a", "ab", "c", "a"])
    tokens = TokenMap.between(student, letters)
    assert tokens.project(ids) == ([0, 0, 1], [0, 1, 3, 3, 3])
    assert tokens.lossless_prefix(ids) == 2


@pytest.mark.parametrize("name", ["qwen3", "mistral", "small_bytes", "small_pieces"])
@pytest.mark.slow
def test_the_same_tokenizer_is_the_identity(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    twin = fast(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    tokens = TokenMap.between(tokenizer, twin)
    ids = sorted(tokenizer.get_vocab().values())
    assert tokens.project(ids) == (ids, list(range(len(ids) + 1)))
    assert tokens.lossless_prefix(ids) == len(ids)
    ids_TC = torch.tensor(ids)[:, None]
    assert torch.equal(tokens.candidates(ids_TC)[0], ids_TC)
    assert tokens.candidates(ids_TC)[1].all()


def test_the_identity_holds_for_tokens_without_spelling() -> None:
    tokenizer, twin = byte_level([], added=("é!",)), byte_level([], added=("é!",))
    assert TokenMap.between(tokenizer, twin).project([256, 97]) == ([256, 97], [0, 1, 2])


def test_equal_strings_in_another_script_are_not_the_same_tokenizer() -> None:
    plain, bytewise = (Tokenizer(models.BPE(vocab={"Ġ": 0, "a": 1}, merges=[])) for _ in range(2))
    plain.decoder, bytewise.decoder = decoders.Fuse(), decoders.ByteLevel()
    assert TokenMap.between(plain, bytewise).candidate_map(torch.tensor([0, 1]))[1].tolist() == [False, True]


def test_qwen3_and_qwen2_differ_by_four_tokens(qwen3: Any, qwen2: Any, align: Align) -> None:
    ordinary = qwen3.encode(TEXT.replace("<think>", "").replace("</think>", ""))
    four = qwen3.convert_tokens_to_ids(["<tool_response>", "</tool_response>", "<think>", "</think>"])
    for tokens in (align(qwen3, qwen2), align(qwen2, qwen3)):
        assert tokens.project(ordinary) == (ordinary, list(range(len(ordinary) + 1)))
        ids_TC = torch.arange(151665)[:, None]
        assert torch.equal(tokens.candidates(ids_TC)[0], ids_TC)
        assert tokens.candidates(ids_TC)[1].all()
    tokens = align(qwen3, qwen2)
    assert not tokens.candidate_map(torch.tensor(four))[1].any()
    for id in four:
        pieces, _ = tokens.project([id])
        assert pieces == qwen2.encode(qwen3.decode([id]))
        assert len(pieces) > 1


def test_rows_may_be_lists_arrays_or_tensors(qwen3: Any, deepseek: Any, align: Align) -> None:
    tokens = align(qwen3, deepseek)
    ids = qwen3.encode(TEXT)
    for kind in (np.array(ids, dtype=np.int32), torch.tensor(ids)):
        assert tokens.project(kind) == tokens.project(ids)
        assert tokens.lossless_prefix(kind) == len(ids)


def test_text_that_looks_like_a_control_token_stays_text() -> None:
    writes_tags = byte_level(["< s", "<s >", "< /"])  # an HTML tag as one ordinary token
    controls = sentencepiece([*"▁<>/s", "<s"])  # where <s> begins a sequence
    tag, begin = writes_tags.convert_tokens_to_ids("<s>"), controls.convert_tokens_to_ids("<s>")
    there, back = TokenMap.between(writes_tags, controls), TokenMap.between(controls, writes_tags)
    assert there.project([tag])[0] == controls.convert_tokens_to_ids(["<s", ">"])
    assert back.project([begin])[0] == [tag]  # as context the same bytes,
    assert not there.candidate_map(torch.tensor([tag]))[1].any()
    assert not back.candidate_map(torch.tensor([begin]))[1].any()  # but not the same decision


def test_twins_of_one_spelling_stay_one_to_one(small_pieces: Any, small_llama: Any, small_bytes: Any) -> None:
    letter, byte = small_pieces.convert_tokens_to_ids(["a", "<0x61>"])
    assert spell(small_pieces, letter) == spell(small_pieces, byte) == b"a"
    to_bytes, to_llama = TokenMap.between(small_pieces, small_bytes), TokenMap.between(small_pieces, small_llama)
    anchor_ids, mapped = to_bytes.candidate_map(torch.tensor([letter, byte]))
    assert (anchor_ids[0], mapped.tolist()) == (small_bytes.convert_tokens_to_ids("a"), [True, False])
    # Where the anchor has both, each is itself; a context may use either.
    anchor_ids, mapped = to_llama.candidate_map(torch.tensor([letter, byte]))
    assert anchor_ids.tolist() == small_llama.convert_tokens_to_ids(["a", "<0x61>"])
    assert to_bytes.project([letter, byte])[0] == small_bytes.convert_tokens_to_ids(["a", "a"])


def test_a_token_leads_to_the_one_that_the_anchor_prefers(small_pieces: Any, small_llama: Any) -> None:
    only, piece, byte = (
        small_llama.convert_tokens_to_ids("<0x0A>"),
        *small_pieces.convert_tokens_to_ids(["\n", "<0x0A>"]),
    )
    there, back = TokenMap.between(small_llama, small_pieces), TokenMap.between(small_pieces, small_llama)
    assert there.candidate_map(torch.tensor([only]))[0].tolist() == there.project([only])[0] == [piece]
    anchor_ids, mapped = back.candidate_map(torch.tensor([piece, byte]))
    assert (anchor_ids[0], mapped.tolist()) == (only, [True, False])


def test_an_alias_maps_the_candidate_and_never_the_context(qwen3: Any, deepseek: Any, align: Align) -> None:
    plain = align(qwen3, deepseek)
    tokens = TokenMap.between(qwen3, deepseek, aliases={"<|im_end|>": "<｜end▁of▁sentence｜>"})
    ids_V = torch.arange(len(qwen3))
    aliased, mapped = tokens.candidate_map(ids_V)
    end = qwen3.convert_tokens_to_ids("<|im_end|>")
    assert (aliased[end], bool(mapped[end])) == (deepseek.eos_token_id, True)
    others = ids_V != end
    assert torch.equal(aliased[others], plain.candidate_map(ids_V)[0][others])
    assert torch.equal(mapped[others], plain.candidate_map(ids_V)[1][others])
    assert tokens.project([end, 1]) == plain.project([end, 1])


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        (
            {"<|im_end|>": "</s>", "<|endoftext|>": "</s>"},
            r"'<\|endoftext\|>' -> '</s>' is not one to one.*'<\|im_end\|>'",
        ),
        ({"<|im_end|>": "\n"}, r"is not one to one: the student's 'Ċ'"),
        ({"<|im_ende|>": "</s>"}, r"'<\|im_ende\|>' is not a token of the student's.*'<\|im_end\|>'"),
        ({"<|im_end|>": "</S>"}, r"'</S>' is not a token of the anchor's.*'</s>'"),
    ],
)
def test_bad_aliases_are_refused(qwen3: Any, small_pieces: Any, aliases: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TokenMap.between(qwen3, small_pieces, aliases)


def test_an_alias_between_two_tokens_of_one_tokenizer_is_refused(qwen3: Any) -> None:
    with pytest.raises(InputError, match="not one to one"):
        TokenMap.between(qwen3, qwen3, {"<|im_end|>": "<|endoftext|>"})
    assert TokenMap.between(qwen3, qwen3, {"<|im_end|>": "<|im_end|>"}).candidates(torch.arange(9)[:, None])[1].all()


def test_an_alias_may_overrule_a_counterpart_that_it_frees() -> None:
    student = byte_level([], special=("<end>", "<stop>"))
    anchor = byte_level(["a b"], special=("<end>", "<eos>"))
    tokens = TokenMap.between(student, anchor, {"<end>": "<eos>", "<stop>": "<end>"})
    anchor_ids, mapped = tokens.candidate_map(torch.tensor(student.convert_tokens_to_ids(["<end>", "<stop>"])))
    assert anchor_ids.tolist() == anchor.convert_tokens_to_ids(["<eos>", "<end>"])
    assert mapped.all()
