"""Random decisions over a small vocabulary, as a cache would have them."""

import numpy as np
from tokenizers import Tokenizer, decoders, models

from lightning_weave.cache.block import Block
from lightning_weave.report.survey import Vocabulary
from rows import decisions_block

WORDS = ["<|end|>", "7", " 42", "the", "+", " ", "</think>", "x1", "\n", "é", "=", "done"]
STOPS = frozenset({0})


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="x1"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["</think>"])
    return Vocabulary.from_tokenizer(tokenizer, STOPS)


def decisions(seed: int = 1, positions: int = 40, candidates: int = 4) -> Block:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(len(WORDS))[:candidates] for _ in range(positions)]).astype(np.int32)
    logits = np.sort(rng.normal(size=(positions, candidates + 1)), axis=1)[:, ::-1]
    logp = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    mapped = rng.random((2, positions, candidates)) < 0.93
    mapped[:, rng.random(positions) < 0.1] = False
    return decisions_block(
        rng.integers(0, len(WORDS), positions).astype(np.int32),
        ids,
        logp,
        mapped,
        r_KPC=np.where(mapped, rng.normal(size=mapped.shape), 0).astype(np.float32),
        # The second anchor counts per candidate; a rule leaves out some positions of the first.
        valid_KP=np.stack([mapped[0].all(axis=1) & (rng.random(positions) < 0.9), mapped[1].any(axis=1)]),
    )
