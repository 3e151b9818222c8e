"""A row alone and in any batch gives the same numbers, whatever the architecture."""

from typing import Any

import numpy as np
import pytest
import torch
from small_models import ARCHITECTURES, VOCABULARY, small_model

import rounding
from lightning_weave.models.packing import (
    enable_packing,
    packed_positions,
    packed_states,
    padded_states,
    use_efficient_attention,
)
from lightning_weave.models.sampler import HFSampler, RefillingSampler
from lightning_weave.models.scorer import Scorer
from lightning_weave.types import Request, SamplingSettings

LONGEST = 40  # several windows, and far beyond the length at which phi3 changes its frequencies
FEW, MANY = 3, 12  # `make test-fuzz` has batches of other sizes too, and other weights
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(FEW, MANY))]


def random_model(architecture: str, seed: int) -> Any:
    """Make one model for a few seeds, and then others, in float64: no two of their many tokens are nearly tied."""
    return small_model(architecture) if seed < FEW else small_model(architecture, seed).double()


def random_rows(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    size = 4 if seed < FEW else rng.integers(0, 12)
    lengths = [*rng.integers(2, LONGEST, size=size), 12, 13, LONGEST]  # phi3 changes after 12
    return [rng.integers(6, VOCABULARY, size=length).tolist() for length in rng.permutation(lengths)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scored(architecture: str, seed: int) -> None:
    rows = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in random_rows(seed)]
    scorer = Scorer.from_model(random_model(architecture, seed), VOCABULARY)
    alone = [scorer.candidates([row], 8)[0] for row in rows]
    for together, single in zip(scorer.candidates(rows, 8), alone, strict=True):
        assert np.array_equal(together[0], single[0])
        for one, other in zip(together[1:], single[1:], strict=True):
            np.testing.assert_allclose(one, other, atol=rounding.LOGPROB, rtol=0)


@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trained(architecture: str, seed: int, cut: int) -> None:
    """Padded and packed; also where the end of a row is not run, since none of its decisions is kept."""
    model = random_model(architecture, seed)
    use_efficient_attention(model)
    rows = random_rows(seed)
    whole = [len(ids) for ids in rows]
    lengths = [max(1, length - cut) for length in whole]
    ids_T = torch.tensor([token for ids, length in zip(rows, lengths, strict=True) for token in ids[:length]])
    alone = [padded_states(model, torch.tensor(ids), [len(ids)])[:end] for ids, end in zip(rows, lengths, strict=True)]
    expected_TD = torch.cat(alone)
    torch.testing.assert_close(padded_states(model, ids_T, lengths, whole), expected_TD, atol=1e-4, rtol=1e-4)
    if enable_packing(model, VOCABULARY):
        packed_TD = packed_states(model, ids_T, packed_positions(lengths), lengths, whole)
        torch.testing.assert_close(packed_TD, expected_TD, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [HFSampler, RefillingSampler])
@pytest.mark.parametrize("seed", [SEEDS[0], *SEEDS[FEW : FEW + 3]])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled(architecture: str, seed: int, kind: type[HFSampler]) -> None:
    model = random_model(architecture, seed)
    use_efficient_attention(model)
    requests = [Request(ids, number, 0) for number, ids in enumerate(random_rows(seed))]
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=20, seed=1)
    sampler = kind(model, frozenset({2, 3}), VOCABULARY, batch_size=3)
    assert sampler.sample(requests, settings) == [sampler.sample([one], settings)[0] for one in requests]
