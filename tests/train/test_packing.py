"""Packed and padded rows give the same loss and the same gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from train.cached import make_run
from train.test_fit import ROWS, gradients, open_fit, patchy

WINDOWS = {"family": "gemma3"}  # of 8 tokens, where rows have up to 24
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped queries, tied head": ({"num_attention_heads": 4, "num_key_value_heads": 2}, {}),
    "untied head": ({"tie_word_embeddings": False}, {}),
    "sliding windows": (WINDOWS, {}),
    "LoRA": ({}, {"lora": {"rank": 2}}),
    "gradient checkpointing": (WINDOWS, {"gradient_checkpointing": True}),
    "LoRA and gradient checkpointing": ({}, {"lora": {"rank": 2}, "gradient_checkpointing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_train_as_padded_ones(case: str, tmp_path: Path) -> None:
    student, train = CASES[case]
    steps = make_run(tmp_path, valid=patchy, longest=20, student=student, train=train)
    found = {}
    for packs in (True, False):
        fit = open_fit(steps)
        assert fit.trainee.packs
        fit.trainee.packs = packs
        found[packs] = gradients(fit), fit.update(1, ROWS)["loss"]
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-5)
    assert found[True][0].keys() == found[False][0].keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in found[False][0].values())
    for name, gradient in found[False][0].items():
        torch.testing.assert_close(found[True][0][name], gradient, rtol=1e-5, atol=1e-5)
