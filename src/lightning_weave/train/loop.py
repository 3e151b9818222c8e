"""The training loop: one update is 64 trajectories, normalised over all their kept decisions, on all ranks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_weave.errors import Mismatch, WeaveError
from lightning_weave.maths import log_residual_loss
from lightning_weave.store import write_json
from lightning_weave.train.cache import Cache, Row
from lightning_weave.train.data import Batch, compose, micro_batches, share_rows, valid_decisions
from lightning_weave.train.objectives import Loss, Trainee, distances
from lightning_weave.train.parallel import Ranks, clip_gradients


@dataclass
class Fit:
    """A student, its optimizer, and the composition that it is fitted to."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    cache: Cache
    weights: Sequence[float]
    loss: Loss
    clip: float
    token_budget: int
    ranks: Ranks
    folder: Path
    notes: list[str] = field(default_factory=list)  # what happened that a person should know

    def update(self, numbers: Sequence[int]) -> dict[str, float]:
        """Take one optimizer step on these rows; returns what there is to watch."""
        started = time.perf_counter()
        rows = self._read_share(numbers)
        kept = sum(valid_decisions(row, self.weights) for row in rows)
        totals = self.ranks.total(
            {
                "kept": kept,
                "decisions": sum(len(row.response_ids) for row in rows),
                "rows_without": sum(valid_decisions(row, self.weights) == 0 for row in rows),
                "tokens": sum(len(row.prompt_ids) + len(row.response_ids) for row in rows),
            }
        )
        sums, loading = self._accumulate(rows, totals["kept"], time.perf_counter() - started)
        figures = self.ranks.total(sums)
        self._stop_if_not_finite(figures["loss"], "loss", numbers)
        norm = clip_gradients(self.trainee, self.clip) if totals["kept"] else 0.0
        self._stop_if_not_finite(norm, "gradient", numbers)
        if totals["kept"]:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        means = {name: value / max(totals["kept"], 1) for name, value in figures.items() if name != "loss"}
        return {
            "loss": figures["loss"],
            **means,
            "kept": totals["kept"] / max(totals["decisions"], 1),
            "rows_without": totals["rows_without"],
            "grad_norm": norm,
            "tokens": totals["tokens"],
            "seconds": seconds,
            "loading": loading / seconds,
        }

    def _read_share(self, numbers: Sequence[int]) -> list[Row]:
        if self.ranks.world == 1:
            return [self.cache.read(number) for number in numbers]
        share = share_rows([self.cache.length(number) for number in numbers], self.ranks.rank, self.ranks.world)
        return [self.cache.read(numbers[index]) for index in share]

    def _accumulate(self, rows: list[Row], kept: float, loading: float) -> tuple[dict[str, float], float]:
        """Run all micro-batches forward and backward; too little memory halves them and starts the update again."""
        while True:
            try:
                return self._run_micro_batches(rows, kept, loading)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error) or self.ranks.world > 1 or self.token_budget <= 1:
                    raise
            self.optimizer.zero_grad(set_to_none=True)
            self.token_budget //= 2
            self.notes.append(f"out of memory: train.token_budget halved to {self.token_budget}; the loss is the same")

    def _run_micro_batches(self, rows: list[Row], kept: float, loading: float) -> tuple[dict[str, float], float]:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        micro = [[rows[index] for index in batch] for batch in micro_batches(lengths, self.token_budget)]
        # Ranks agree on the number of micro-batches; short ones run empty ones, or a collective would wait for ever.
        micro += [[]] * (self.ranks.most(len(micro)) - len(micro))
        normalizer = max(kept, 1) / self.ranks.world  # sharded gradients are averaged over ranks
        sums = dict.fromkeys(("loss", "reverse_kl", "forward_kl", "total_variation", "covered_mass"), 0.0)
        for members in micro:
            started = time.perf_counter()
            batch = self.compose(members).to(self.ranks.device)
            loading += time.perf_counter() - started
            loss, log_pi_NO = self.trainee(batch, self.loss, normalizer)
            loss.backward()
            sums["loss"] += loss.item() / self.ranks.world
            for name, value in distances(log_pi_NO, batch).items():
                sums[name] += value
        return sums, loading

    def compose(self, rows: Sequence[Row]) -> Batch:
        """The batch of some rows; without rows, one that has nothing to learn from."""
        if rows:
            return compose(rows, self.weights, self.loss.alpha)
        first = self.cache.read(0)
        return compose([first], self.weights, self.loss.alpha).emptied()

    def _stop_if_not_finite(self, value: float, what: str, numbers: Sequence[int]) -> None:
        if not torch.isfinite(torch.tensor(value)):
            path = self.folder / "bad_rows.json"
            write_json(path, {"what": what, "rows": list(numbers), "value": str(value)})
            raise WeaveError(
                f"{self.folder}: the {what} is {value}; the rows of this update are in {path}. The last checkpoint is "
                "kept. Look at them with lweave inspect; a smaller learning rate or a larger alpha often helps"
            )

    @torch.no_grad()
    def disagreement(self, numbers: Sequence[int]) -> float:
        """The loss at zero shift before training: how far trainer and cache disagree about the student itself."""
        rows = self._read_share(numbers)
        total = {"loss": 0.0, "kept": 0.0}
        for batch, log_pi_NO in self.look(rows):
            total["loss"] += log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_b_NO, self.loss.alpha).sum().item()
            total["kept"] += len(log_pi_NO)
        total = self.ranks.total(total)
        return total["loss"] / max(total["kept"], 1)

    @torch.no_grad()
    def distance(self, numbers: Sequence[int]) -> dict[str, float]:
        """How far the student is from its target on some rows, on average over kept decisions."""
        rows = self._read_share(numbers)
        total = dict.fromkeys(("reverse_kl", "forward_kl", "total_variation", "kept"), 0.0)
        for batch, log_pi_NO in self.look(rows):
            for name, value in distances(log_pi_NO, batch).items():
                if name in total:
                    total[name] += value
            total["kept"] += len(log_pi_NO)
        total = self.ranks.total(total)
        kept = max(total.pop("kept"), 1)
        return {name: value / kept for name, value in total.items()}

    def look(self, rows: list[Row]) -> list[tuple[Batch, torch.Tensor]]:
        """Run rows forward only: their batches and the student's outcomes."""
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        micro = [[rows[index] for index in batch] for batch in micro_batches(lengths, self.token_budget)]
        micro += [[]] * (self.ranks.most(len(micro)) - len(micro))
        batches = [self.compose(members).to(self.ranks.device) for members in micro]
        return [(batch, self.trainee(batch, self.loss, 1.0)[1]) for batch in batches]


def check_agreement(fit: Fit, numbers: Sequence[int], largest: float, go_on: bool) -> float:
    """Measure the loss at zero shift and stop where trainer and cache see two different students."""
    found = fit.disagreement(numbers)
    if found > largest and not go_on:
        raise Mismatch(
            f"before training, the loss at zero shift is {found:.2e}, over train.agreement = {largest:g}: trainer and "
            "reference/ disagree about the student (another dtype or checkpoint?).\nMake the reference again, or set "
            "train.allow_disagreement = true"
        )
    return found


def adam(trainee: Trainee, learning_rate: float, betas: Sequence[float], weight_decay: float) -> torch.optim.AdamW:
    """Adam with decoupled weight decay, on matrices only: norms and biases have no scale to shrink towards."""
    trained = [parameter for parameter in trainee.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], learning_rate, (betas[0], betas[1]))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
