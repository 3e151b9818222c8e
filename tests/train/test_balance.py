"""Balance: an update's loss against loops over its groups, in micro-batches of any size and on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import keep_prompts
from lightning_weave.train.data import Balance
from lightning_weave.types import Prompt
from rows import read_row
from tiny import make_world, run_of
from train.cached import VOCABULARY, make_run
from train.launch import Plan, start
from train.test_fit import ROWS, gradients, open_fit, patchy, plain_loss_of
from train.test_ranks import UNEVEN, assert_same

TAGS = {"rules": {"even": "even", "third": "third"}}


def tag(prompt: int) -> str:
    return "even" if prompt % 2 == 0 else "third" if prompt % 3 == 0 else "default"


def balanced_run(root: Path, balance: str, groups: int = 6, **train: Any) -> Run:
    """A run whose prompts have three tags of unequal numbers; some rows have nothing to learn from."""
    run = make_run(root, groups=groups, valid=patchy, train={"balance": "decisions", **train})
    section = run.recipe.train.model_copy(update={"balance": balance})
    tags = check_recipe({"name": "x", "student": {"model": "m"}, "tags": TAGS}).tags
    run = run.derive(recipe=run.recipe.model_copy(update={"train": section, "tags": tags}))
    prompts = [
        Prompt(str(place), [{"role": "user", "content": tag(place)}], "", [3], columns={}) for place in range(groups)
    ]
    keep_prompts(run, prompts, {})
    return run


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["decisions", "rows", "tags"])
@pytest.mark.parametrize("objective", ["tilted", "reverse-kl", "direct-opd"])
def test_groups_count_equally_whatever_the_token_budget(objective: str, balance: str, tmp_path: Path) -> None:
    """The mean over groups of the mean over their kept decisions, in loops."""
    run = balanced_run(tmp_path, balance, objective=objective)
    model = Checkpoint(str(run.student.path)).load(torch.float32, torch.device("cpu")).requires_grad_(True)
    cache = open_cache(run, "both")
    groups: dict[Any, list[torch.Tensor]] = {}
    for number in ROWS:
        row = read_row(cache, number)
        name = {"decisions": "all", "rows": number, "tags": tag(number // 2)}[balance]
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        logp_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0, :, :VOCABULARY], dim=-1)
        for t in np.flatnonzero(row.valid_KT.all(axis=0)).tolist():
            own = plain_loss_of(logp_TV[len(row.prompt_ids) + t - 1], row, t, objective)
            groups.setdefault(name, []).append(own.sum())
    loss = torch.stack([torch.stack(losses).mean() for losses in groups.values()]).mean()
    assert balance == "decisions" or len({len(losses) for losses in groups.values()}) > 1
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for budget in (1, 20, 10_000):
        fit = open_fit(run)
        fit.token_budget = budget
        found = gradients(fit)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert fit.update(1, ROWS)["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_levels_and_unknown_tags_have_the_groups_of_their_prompts() -> None:
    balance = Balance("tags", np.array([0, 1, 0]), responses=2)
    assert balance.groups([0, 1, 2, 5, 6, 8]).tolist() == [0, 0, 1, 0, 0, 1], "row 6 is row 0 of the next level"
    weights = balance.weights([0, 2, 4], {"group 0": 30.0, "group 1": 0.0})
    assert weights[0] == weights[4] == 1.0, "a tag without a kept decision leaves the others as they are"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("balance", ["rows", "tags"])
def test_two_ranks_balance_as_one_process(balance: str, tmp_path: Path) -> None:
    """Rank 0 has one row and rank 1 all others: neither knows the other's groups."""
    alone, together = (balanced_run(tmp_path / name, balance, 12, **UNEVEN) for name in ("alone", "together"))
    assert start(Plan([alone])) == [0]
    assert start(Plan([together], lopsided=True), ranks=2) == [0, 0]
    assert_same(alone, together, updates=4)


def test_rules_of_tags_are_part_of_what_is_trained(tmp_path: Path) -> None:
    """Other rules balance other rows."""
    recipe = make_world(tmp_path)
    keys = {}
    for balance in ("rows", "tags"):
        for pattern in ("3", "4"):
            train, tags = {**recipe["train"], "balance": balance}, {"rules": {"three": pattern}}
            keys[balance, pattern] = run_of({**recipe, "train": train, "tags": tags}).stage("train", "both").fingerprint
    assert keys["tags", "3"] != keys["tags", "4"]
    assert keys["rows", "3"] == keys["rows", "4"] != keys["tags", "3"]


def test_tags_are_needed_for_their_balance() -> None:
    with pytest.raises(InputError, match=r"train\.balance"):
        check_recipe({"name": "x", "student": {"model": "m"}, "train": {"balance": "tags"}})
