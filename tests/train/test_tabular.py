"""A student whose logits are its parameters shows where an objective leads when nothing else is in the way."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from lightning_weave.heads import Head
from lightning_weave.stages.caches import open_cache
from lightning_weave.train.data import Batch, compose
from lightning_weave.train.loop import Fit, adam
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import Loss
from rows import Row, block_of
from train.cached import VOCABULARY, make_run

LONGEST = 9
ALONE = Ranks(0, 1, torch.device("cpu"))


class Table(nn.Module):
    """Logits of every decision of a cache; a decision's hidden state is its own unit vector."""

    packs = True

    def __init__(self, rows: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits_VD = nn.Parameter(torch.randn(VOCABULARY, rows * LONGEST, generator=generator))
        self.head_description = Head(self.logits_VD.detach(), VOCABULARY)

    def forward(self, batch: Batch, loss: Loss, normalizer: float) -> tuple[Tensor, Tensor]:
        hidden_ND = nn.functional.one_hot(batch.rows_N * LONGEST + batch.places_N, self.logits_VD.shape[1]).float()
        return loss(hidden_ND, Head(self.logits_VD, VOCABULARY), batch, normalizer)


@pytest.mark.parametrize("objective", ["tilted", "reverse-kl"])
@pytest.mark.slow
def test_a_tabular_student_reaches_the_composed_target_and_stays(objective: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=4, longest=LONGEST, train={"prompts_per_round": 4})
    cache = open_cache(run, "both")
    rows = make_schedule(run.recipe, groups=4).rows(0)
    table = Table(len(cache))
    optimizer = adam(table, learning_rate=0.15, betas=(0.9, 0.999), weight_decay=0.0)
    fit = Fit(table, optimizer, cache, Loss(objective, 2.0), 1e9, 64, 0, ALONE, tmp_path)
    assert fit.measure(rows)["reverse_kl"] > 0.3
    for step in range(250):
        fit.update(step, rows)
    reached = fit.measure(rows)
    assert reached["reverse_kl"] < 1e-6
    for step in range(50):
        fit.update(step, rows)
    stayed = fit.measure(rows)
    assert max(stayed["reverse_kl"], stayed["forward_kl"]) < 1e-6


def counterexample() -> Batch:
    """Two actions, alpha 1, b = (1/2, 1/2), post = (3/4, 1/4), and as many cached actions of either kind."""
    half = np.log(np.full((2, 2), 0.5, dtype=np.float32))
    row = Row(
        number=0,
        prompt_ids=np.array([0], dtype=np.int32),
        response_ids=np.array([0, 1], dtype=np.int32),
        candidate_ids_TC=np.array([[0, 1], [0, 1]], dtype=np.int32),
        logp_TC=half,
        other_logp_T=np.full(2, -100, dtype=np.float32),
        sampled_logp_T=half[:, 0],
        r_KTC=np.log(np.array([[[1.5, 0.5], [1.5, 0.5]]], dtype=np.float32)),
        valid_KT=np.ones((1, 2), dtype=bool),
    )
    return compose(block_of([row]), [1.0], alpha=1.0)


def follow(objective: str, x: float, updates: int) -> tuple[float, float]:
    """Train p = (x, 1 - x) on the counterexample; returns d loss / d x at the start, and where it ends."""
    logits_VD = nn.Parameter(torch.tensor([[math.log(x)], [math.log(1 - x)]]))
    optimizer = torch.optim.SGD([logits_VD], lr=1.0)
    batch, slopes = counterexample(), []
    for _ in range(updates):
        optimizer.zero_grad()
        loss, _ = Loss(objective, 1.0)(torch.ones(len(batch), 1), Head(logits_VD, 2), batch, len(batch))
        loss.backward()
        slopes.append((logits_VD.grad[0, 0] / (x * (1 - x))).item())  # dx / dz = x (1 - x)
        optimizer.step()
    return slopes[0], torch.softmax(logits_VD.detach()[:, 0], dim=0)[0].item()


def test_tilted_rests_at_the_target_of_the_papers_counterexample_and_direct_opd_does_not() -> None:
    slope, end = follow("tilted", 0.75, updates=100)
    assert slope == pytest.approx(0, abs=1e-6)
    assert end == pytest.approx(0.75, abs=1e-5)
    assert follow("tilted", 0.2, updates=150)[1] == pytest.approx(0.75, abs=1e-5)

    slope, end = follow("direct-opd", 0.75, updates=150)
    assert slope == pytest.approx(20 / 9 - math.log(3), rel=1e-5)

    def derivative(x: float) -> float:
        return math.log(3) - 0.5 * (x - 0.5) / x**2 + 0.5 * ((1 - x) - 0.5) / (1 - x) ** 2

    rest = brentq(derivative, 0.5, 0.75)
    assert end == pytest.approx(rest, abs=1e-4)
    assert rest < 0.69, "it settles well short of the target"
