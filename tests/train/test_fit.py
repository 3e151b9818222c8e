"""One update of the real loop against the plain formula, and what it does when something is wrong."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_weave.cache.block import Block, Cache
from lightning_weave.errors import InputError, Mismatch, WeaveError
from lightning_weave.maths import direct_opd_loss, log_residual_loss, reverse_kl, tilted_target, with_other
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.train import student
from lightning_weave.train.loop import BAD_ROWS, Fit, Training, make_fit
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import open_trainee
from rows import Row, block_of, read_row
from train.cached import QUIET, VOCABULARY, context, make_run

ALONE = Ranks(0, 1, torch.device("cpu"))
CAPPED = {"family": "gemma3", "final_logit_softcapping": 5.0}
ROWS = list(range(12))


def patchy(anchor: str, row: int, decisions: int) -> np.ndarray:
    return (np.arange(decisions) % 4 != (1 if anchor == "long" else 2)) & (row % 5 != 0)


def open_fit(run: Run, name: str = "both") -> Fit:
    trainee = open_trainee(run, context(ALONE))
    return make_fit(run, name, trainee, open_cache(run, name), alpha=2.0, ranks=ALONE)


def gradients(fit: Fit) -> dict[str, Tensor]:
    """Run one update with the optimizer held, to see what it would have been given."""
    fit.clip = 1e9
    seen: dict[str, Tensor] = {}
    fit.optimizer.step = lambda: seen.update(  # type: ignore[method-assign,assignment]
        {name: p.grad.clone() for name, p in fit.trainee.named_parameters() if p.grad is not None}
    )
    fit.update(1, ROWS)
    return {name.removeprefix("model."): gradient for name, gradient in seen.items()}


@pytest.mark.parametrize(
    ("memory", "train", "expected"),
    [
        (None, {}, (False, 16384)),  # a CPU
        (80e9, {}, (False, 16384)),
        (1e6, {}, (True, 4096)),  # nothing fits
        (1e6, {"gradient_checkpointing": False}, (False, 4096)),
        (1e6, {"token_budget": 99}, (True, 99)),
        (80e9, {"gradient_checkpointing": True, "token_budget": 99}, (True, 99)),
    ],
)
def test_memory_decides_unless_the_recipe_does(
    memory: float | None, train: dict, expected: tuple[bool, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, train=train)
    monkeypatch.setattr(student, "memory_left", lambda device: memory and (memory, memory))
    monkeypatch.setattr(student, "memory_of", lambda device: memory)
    fit = open_fit(run)
    assert (fit.trainee.model.is_gradient_checkpointing, fit.token_budget) == expected
    monkeypatch.setattr(student, "find_shape", unknown_architecture)
    checkpointing = train.get("gradient_checkpointing", False)
    assert student.fit_memory(run, ALONE) == (checkpointing, train.get("token_budget", 16384)), "as on a CPU"


def unknown_architecture(*_: object, **__: object) -> None:
    raise InputError("plan does not know it")


def plain_loss(model: Any, rows: list[Row], objective: str) -> Tensor:
    """Say the objective again: a row at a time, whole logits, everything through autograd, mean over kept decisions."""
    losses = []
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        logp_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0, :, :VOCABULARY], dim=-1)
        for t in range(len(row.response_ids)):
            if row.valid_KT[:, t].all():
                losses.append(plain_loss_of(logp_TV[len(row.prompt_ids) + t - 1], row, t, objective))
    return torch.cat(losses).mean()


def plain_loss_of(logp_V: Tensor, row: Row, t: int, objective: str) -> Tensor:
    chosen = torch.tensor(row.candidate_ids_TC[t]).long()
    others = [v for v in range(VOCABULARY) if v not in set(chosen.tolist())]
    other = torch.logsumexp(logp_V[others], dim=0) if others else torch.tensor(-100.0)
    log_pi_NO = with_other(logp_V[chosen][None], other[None])
    log_b_NO = with_other(torch.tensor(row.logp_TC[t])[None], torch.tensor([row.other_logp_T[t]]))
    r_NC = torch.tensor(0.5 * row.r_KTC[0, t] + 0.5 * row.r_KTC[1, t])[None]
    match objective:
        case "tilted":
            return log_residual_loss(log_pi_NO, log_b_NO, tilted_target(log_b_NO, r_NC, 2.0), 2.0)
        case "reverse-kl":
            return reverse_kl(log_pi_NO, tilted_target(log_b_NO, r_NC, 2.0), 2.0)
        case "reverse-kl-full":
            return reverse_kl(log_pi_NO[:, :-1], torch.log_softmax(log_b_NO[:, :-1] + r_NC / 2, dim=-1), 2.0)
    sampled = logp_V[row.response_ids[t]][None], torch.tensor([row.sampled_logp_T[t]])
    return direct_opd_loss(log_pi_NO[:, :-1], r_NC, *sampled, 2.0)


@pytest.mark.parametrize(
    ("objective", "student", "candidates"),
    [
        ("tilted", {}, 4),
        ("tilted", {"tie_word_embeddings": False}, 4),
        ("tilted", CAPPED, 4),
        ("reverse-kl", {}, 4),
        ("direct-opd", {}, 4),
        ("reverse-kl-full", {}, VOCABULARY),
    ],
)
@pytest.mark.slow
def test_an_update_follows_the_plain_formula_whatever_the_token_budget(
    objective: str, student: dict[str, Any], candidates: int, tmp_path: Path
) -> None:
    run = make_run(tmp_path, valid=patchy, candidates=candidates, student=student, train={"objective": objective})
    model = Checkpoint(str(run.student.path)).load(torch.float32, torch.device("cpu")).requires_grad_(True)
    rows = [read_row(open_cache(run, "both"), number) for number in ROWS]
    loss = plain_loss(model, rows, objective)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for budget in (1, 20, 10_000):
        fit = open_fit(run)
        fit.token_budget = budget
        found = gradients(fit)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert fit.update(1, ROWS)["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_what_is_watched_is_what_the_batch_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, valid=patchy)
    fit = open_fit(run)
    rows = [read_row(fit.cache, number) for number in ROWS]
    masks = [row.valid_KT.all(axis=0) for row in rows]
    figures = fit.update(1, ROWS)
    assert figures["kept"] == pytest.approx(np.concatenate(masks).mean())
    assert figures["rows_without"] == sum(not mask.any() for mask in masks) > 0
    assert figures["tokens"] == sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    covered = np.concatenate([np.exp(row.logp_TC).sum(axis=1)[mask] for row, mask in zip(rows, masks, strict=True)])
    assert figures["covered_mass"] == pytest.approx(covered.mean(), rel=1e-5)
    assert min(figures["reverse_kl"], figures["forward_kl"], figures["total_variation"]) > 0


def test_drift_is_the_kl_between_the_student_and_who_sampled(tmp_path: Path) -> None:
    """Against plain transformers, on the kept decisions."""
    run = make_run(tmp_path, valid=patchy)
    fit = open_fit(run)
    assert fit.update(1, ROWS)["drift"] == pytest.approx(0, abs=1e-5), "it begins as the student that sampled"
    kl_N = []
    for row in (read_row(fit.cache, number) for number in ROWS):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
        with torch.no_grad():
            logits_TV = fit.trainee.model(ids).logits[0, len(row.prompt_ids) - 1 : -1, : run.student.vocabulary]
        asked_TC = torch.tensor(row.candidate_ids_TC).long()
        now_TC, then_TC = logits_TV.softmax(-1).gather(1, asked_TC).double().numpy(), np.exp(row.logp_TC)
        now_TO, then_TO = (np.c_[p_TC, 1 - p_TC.sum(axis=1)] for p_TC in (now_TC, then_TC))
        kl_N += (now_TO * np.log(now_TO / then_TO)).sum(axis=1)[row.valid_KT.all(axis=0)].tolist()
    assert np.mean(kl_N) > 1e-4
    assert fit.measure(ROWS)["drift"] == pytest.approx(np.mean(kl_N), rel=1e-2)


def test_one_update_at_the_papers_learning_rate_moves_nearly_all_master_weights(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-6, "agreement": False}
    run = make_run(tmp_path, student={"dtype": torch.bfloat16}, train=settings)
    fit = open_fit(run)
    before = {name: p.detach().clone() for name, p in fit.trainee.named_parameters()}
    assert all(torch.equal(p, p.bfloat16().float()) for p in before.values()), "the checkpoint is in bfloat16"
    has_gradient = {name: gradient != 0 for name, gradient in gradients(open_fit(run)).items()}
    fit.update(1, ROWS)
    moved = total = 0
    for name, p in fit.trainee.named_parameters():
        mask = has_gradient[name.removeprefix("model.")]
        moved += int(((p != before[name]) & mask).sum())
        total += int(mask.sum())
    assert total > 2000
    assert moved > 0.99 * total
    stuck = sum(int((p.bfloat16() == before[name].bfloat16()).sum()) for name, p in fit.trainee.named_parameters())
    assert stuck > 0.99 * sum(p.numel() for p in before.values()), "in bfloat16 nothing would have happened"


def test_an_update_without_a_single_kept_decision_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, valid=lambda anchor, row, decisions: np.zeros(decisions, dtype=bool))
    fit = open_fit(run)
    before = [p.detach().clone() for p in fit.trainee.parameters()]
    figures = fit.update(1, ROWS)
    assert (figures["loss"], figures["kept"], figures["rows_without"]) == (0, 0, len(ROWS))
    assert all(torch.equal(p, old) for p, old in zip(fit.trainee.parameters(), before, strict=True))


@dataclass(frozen=True)
class Spoilt:
    """A cache of which one number of one row is not a number."""

    cache: Cache
    row: int
    place: int

    @property
    def weights(self) -> list[float]:
        return self.cache.weights

    def length(self, number: int) -> int:
        return self.cache.length(number)

    def block(self, rows: Sequence[int]) -> Block:
        read = [read_row(self.cache, number) for number in rows]
        return block_of([self._spoil(row) if row.number == self.row else row for row in read])

    def _spoil(self, row: Row) -> Row:
        logp_TC = row.logp_TC.copy()
        logp_TC[self.place, 1] = np.nan
        return replace(row, logp_TC=logp_TC)


def test_a_loss_that_is_not_finite_stops_with_the_rows_that_caused_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fit = open_fit(run)
    cache = open_cache(run, "both")
    bad = next(number for number in ROWS if len(read_row(cache, number).response_ids) > 3)
    fit.cache = Spoilt(cache, bad, place=2)
    before = [p.detach().clone() for p in fit.trainee.parameters()]
    with pytest.raises(WeaveError, match=rf"the loss is nan, from the rows {bad} "):
        fit.update(1, ROWS)
    written = json.loads((fit.folder / BAD_ROWS).read_text())
    assert written == {"what": "loss", "value": "nan", "rows": [{"row": bad, "positions": [2]}]}
    assert all(torch.equal(p, old) for p, old in zip(fit.trainee.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path: Path) -> None:
    fit = open_fit(make_run(tmp_path))
    parameter = next(fit.trainee.parameters())
    parameter.register_hook(lambda gradient: gradient / 0)
    before = [p.detach().clone() for p in fit.trainee.parameters()]
    with pytest.raises(WeaveError, match=r"the gradient is (nan|inf)"):
        fit.update(1, ROWS)
    assert all(torch.equal(p, old) for p, old in zip(fit.trainee.parameters(), before, strict=True))


def test_too_little_memory_halves_the_micro_batches_and_not_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    expected = open_fit(run).update(1, ROWS)["loss"]
    fit = open_fit(run)
    forward = fit.trainee.forward

    def small_memory(batch: Any, *rest: Any) -> Any:
        if batch.input_ids_T.numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch, *rest)

    fit.trainee.forward = small_memory  # type: ignore[method-assign]
    assert fit.update(1, ROWS)["loss"] == pytest.approx(expected, rel=1e-6)
    assert fit.token_budget < 60, "of 120 tokens"
    assert f"halved to {fit.token_budget}" in fit.notes[-1]


@pytest.mark.slow
def test_no_memory_for_a_single_row_is_said(tmp_path: Path) -> None:
    fit = open_fit(make_run(tmp_path))

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fit.trainee.forward = no_memory  # type: ignore[method-assign]
    with pytest.raises(WeaveError, match=r"out of memory at update 1 .* train\.gradient_checkpointing = true"):
        fit.update(1, ROWS)


def test_a_trainer_that_sees_another_student_than_the_cache_is_found_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, valid=patchy)
    fit = open_fit(run)
    training = Training(run, "both", make_schedule(run.recipe, groups=6), fit, QUIET)
    assert training.check(torch.float32)["zero_shift_loss"] < 1e-9
    with torch.no_grad():
        for parameter in fit.trainee.parameters():
            parameter.mul_(1.02)
    assert fit.measure(ROWS)["zero_shift_loss"] > 1e-4
    with pytest.raises(Mismatch, match=r"the loss at zero shift is .*, over 0\.0001 \(train\.agreement\)"):
        training.check(torch.float32)


def test_a_frozen_head_gets_no_gradient_and_only_adapters_move(tmp_path: Path) -> None:
    fit = open_fit(make_run(tmp_path, train={"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}))
    before = {name: p.detach().clone() for name, p in fit.trainee.named_parameters()}
    fit.update(1, ROWS)
    fit.update(2, ROWS)  # the first one moves only one of the two factors
    moved = {name for name, p in fit.trainee.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert not fit.trainee.head().weight_VD.requires_grad


def test_looking_leaves_the_student_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path, student={"attention_dropout": 0.5})
    fit = open_fit(run)
    held_out = make_schedule(run.recipe, groups=6).rows(0)
    before = fit.measure(held_out)
    assert fit.measure(held_out) == before, "no dropout while looking"
    assert fit.measure(held_out)["zero_shift_loss"] < 1e-9
    assert fit.trainee.training
