"""Packed rows are run as if each were alone; a model that cannot do that is found out."""

from typing import Any

import pytest
import torch
from small_models import VOCABULARY, small_model
from torch import Tensor

from lightning_weave.heads import hidden_states
from lightning_weave.models.attention import SPARING, spare_memory
from lightning_weave.models.packing import RowMasks, pack_rows, packed_states, padded_states, positions_of

LENGTHS = (3, 19, 1, 8, 12)  # of which three are no longer than the sliding windows
IDS_T = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def alone(model: Any) -> Tensor:
    return torch.cat([hidden_states(model, ids[None])[0] for ids in IDS_T.split(LENGTHS)])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "olmo3"])
def test_a_packed_row_sees_itself_alone(architecture: str) -> None:
    model = small_model(architecture)
    expected_TD = alone(model)
    torch.testing.assert_close(padded_states(model, IDS_T, LENGTHS), expected_TD)
    assert pack_rows(model, VOCABULARY)
    torch.testing.assert_close(packed_states(model, IDS_T, positions_of(LENGTHS), LENGTHS), expected_TD)
    torch.testing.assert_close(alone(model), expected_TD, msg="a model that packs can still be run as before")
    torch.testing.assert_close(padded_states(model, IDS_T, LENGTHS), expected_TD)


def test_a_model_that_spares_memory_packs_too() -> None:
    model = small_model("gemma3")
    expected_TD = alone(model)
    spare_memory(model)
    assert model.config._attn_implementation == SPARING
    assert pack_rows(model, VOCABULARY)
    torch.testing.assert_close(packed_states(model, IDS_T, positions_of(LENGTHS), LENGTHS), expected_TD)


def test_what_would_carry_one_row_into_the_next_is_not_packed() -> None:
    recurrent = small_model("qwen3.5")
    expected_TD = alone(recurrent)
    assert not pack_rows(recurrent, VOCABULARY)
    assert recurrent.config._attn_implementation == "sdpa", "as it was"
    torch.testing.assert_close(padded_states(recurrent, IDS_T, LENGTHS), expected_TD)
    eager = small_model("llama")
    eager.set_attn_implementation("eager")
    assert not pack_rows(eager, VOCABULARY)


def test_masks_are_made_only_for_rows_longer_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never one over all rows: a row of two windows and more is seen in blocks, with a mask of a block and two."""
    model = small_model("gemma3")
    assert pack_rows(model, VOCABULARY)
    seen: list[RowMasks] = []
    layer = type(model.model.layers[0])
    forward = layer.forward

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["attention_mask"])
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", watched)
    packed_states(model, IDS_T, positions_of(LENGTHS), LENGTHS)
    shapes = [[None if mask is None else mask.shape[-1] for mask in masks.masks] for masks in seen]
    assert shapes == [[None, 16, None, None, 12], [None] * 5, [None, 16, None, None, 12]]
