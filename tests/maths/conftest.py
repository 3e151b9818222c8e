"""One random decision of a small vocabulary, in float64."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray


@dataclass(frozen=True)
class Decision:
    """What the behaviour, K anchor pairs and a student say at one position."""

    b_V: NDArray[np.float64]
    post_KV: NDArray[np.float64]
    pre_KV: NDArray[np.float64]
    pi_V: NDArray[np.float64]
    candidates: list[int]  # the behaviour's favourites
    weights_K: list[float]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


@pytest.fixture(params=range(5))
def decision(request: pytest.FixtureRequest) -> Decision:
    rng = np.random.default_rng(request.param)
    vocabulary, anchors = 40, 3
    b_V = rng.dirichlet(np.full(vocabulary, 0.3)) + 1e-6
    b_V /= b_V.sum()
    return Decision(
        b_V=b_V,
        post_KV=rng.dirichlet(np.ones(vocabulary), size=anchors),
        pre_KV=rng.dirichlet(np.ones(vocabulary), size=anchors),
        pi_V=rng.dirichlet(np.ones(vocabulary)),
        candidates=np.argsort(-b_V)[:8].tolist(),
        weights_K=rng.dirichlet(np.ones(anchors)).tolist(),
    )
