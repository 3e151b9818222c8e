"""Texts that are hard to cut, and small tokenizers that show one rule each."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = """Solve $\\frac{a^2 + b^2}{\\sqrt{2\\pi}} \\le \\int_0^\\infty e^{-x}\\,dx$; the answer is \\boxed{1234567}.

```python
def f(xs: list[int]) -> int:\r\n\treturn sum(x ** 2 for x in xs if x != 0)  # <s>not a token</s>
```
数学题：求 x 的值。これはテスト。Καλημέρα, Привет, שלום, नमस्ते!  naïve cafe\u0301 e\u0301 \u212b ﬁ
👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 😀\u200b\u00a0▁▁ <think>\n\n</think>\n\n\n    <0x0A> Ġthe   \t end"""

# Ends of characters, starts of characters, bytes that no UTF-8 text has.
BROKEN = [
    b"\xe6",
    b"\x98\xaf",
    b"\xf0\x9f",
    b" \xf0\x9f\x98",
    b"\x80a",
    b"\xff\xfe",
    b"\xc3",
    b"ok\xe4\xbd",
    b"\xe2\x96",
]


def fast(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level(merges: list[str], added: tuple[AddedToken | str, ...] = (), special: tuple[str, ...] = ()) -> Any:
    """Build a byte-level tokenizer with all 256 bytes and the given merges (as text: 't he' joins b't' and b'he')."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(part.replace("_", "Ġ") for part in merge.split(" ")) for merge in merges]
    vocabulary = {string: id for id, string in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    backend.add_special_tokens(list(special))
    return fast(backend)


def sentencepiece(
    pieces: list[str],
    added: tuple[AddedToken | str, ...] = (),
    special: tuple[str, ...] = ("<unk>", "<s>", "</s>"),
    dummy_space: bool = False,
) -> Any:
    """Build a SentencePiece-like tokenizer: byte fallback, U+2581 for a space, merges from the order of `pieces`.

    Gemma's shape, or with `dummy_space` Llama 2's.
    """
    strings = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {string: id for id, string in enumerate(strings)}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in vocabulary and p[i:] in vocabulary]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens([AddedToken(token, normalized=False) if isinstance(token, str) else token for token in added])
    backend.add_special_tokens(list(special))
    return fast(backend)
