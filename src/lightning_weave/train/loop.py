"""The training loop: one update is 64 trajectories, normalised over all their kept decisions, on all ranks."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_weave.cache.block import Block
from lightning_weave.devices import copies_while_it_computes, make_current
from lightning_weave.errors import StartAgain, WeaveError
from lightning_weave.heads.tiles import checked_ids
from lightning_weave.maths import log_residual_loss
from lightning_weave.models.memory import free_memory, is_out_of_memory
from lightning_weave.store import write_json
from lightning_weave.store.ledger import peak_memory
from lightning_weave.train.data import Batch, compose, kept_decisions
from lightning_weave.train.objectives import DISTANCES, Loss, Trainee, distances, without_dropout
from lightning_weave.train.parallel import Ranks, can_recover, clip_gradients, recover
from lightning_weave.train.schedule import deal_rows

T = TypeVar("T")
BAD_ROWS = "bad_rows.json"
ROUNDING = 100.0  # how much more a trainer in low precision may disagree with its cache


class Rows(Protocol):
    """Trajectories with shifts, by row number: cached, or made a moment ago."""

    @property
    def weights(self) -> list[float]: ...

    def length(self, number: int) -> int: ...

    def block(self, rows: Sequence[int]) -> Block: ...


@dataclass(frozen=True)
class Work:
    """One update's rows on this rank, ready to be run."""

    numbers: tuple[int, ...]  # of the whole update, on all ranks
    token_budget: int
    batches: list[Batch]  # on the host; one without decisions where other ranks run more
    counts: dict[str, float]


@dataclass
class Fit:
    """A student, its optimizer, and the composition that it is fitted to."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    cache: Rows
    loss: Loss
    clip: float
    token_budget: int  # as it is now
    seed: int
    ranks: Ranks
    folder: Path
    leave_budget: Callable[[int], None] = lambda smaller: None  # to the next start, where this one cannot go on
    notes: list[str] = field(default_factory=list)  # what happened that a person should know
    _noted: bool = False  # that an update had nothing to learn from
    _reader: ThreadPoolExecutor | None = None
    _ahead: Future[Work] | None = None

    def update(self, step: int, numbers: Sequence[int], upcoming: Sequence[int] = ()) -> dict[str, float]:
        """Take one optimizer step on these rows, and read the upcoming ones meanwhile; returns what there is to watch.

        `loading` is the share of the time in which nothing was computed because rows were not there yet.
        """
        started = time.perf_counter()
        work = self._take(numbers)
        loading = time.perf_counter() - started
        if upcoming:
            self._read_ahead(upcoming)
        totals = self.ranks.total(work.counts)
        if not totals["kept"]:
            self._note_once(f"update {step} has no valid decision and changes nothing; lweave doctor says why")
        sums = self._accumulate(step, work, totals["kept"])
        loading += sums.pop("loading")
        figures = self.ranks.total(sums)
        norm = self._step(step, totals["kept"])
        self._stop_unless_finite("gradient", norm, [{"row": row} for row in numbers] if self.ranks.first else [])
        seconds = time.perf_counter() - started
        kept = max(totals["kept"], 1)
        return {
            "loss": figures.pop("loss"),
            **{name: value / kept for name, value in figures.items()},
            "kept": totals["kept"] / max(totals["decisions"], 1),
            "rows_without": totals["rows_without"],
            "grad_norm": norm,
            "tokens": totals["tokens"],
            "tokens_per_s": totals["tokens"] / seconds,
            "seconds": seconds,
            "loading": loading / seconds,
            "memory": peak_memory(),
        }

    def _take(self, numbers: Sequence[int]) -> Work:
        """Give an update's work: read ahead, or read now."""
        work = self._ahead.result() if self._ahead else None
        self._ahead = None
        if work and (work.numbers, work.token_budget) == (tuple(numbers), self.token_budget):
            return work
        return self.prepare(numbers)

    def _read_ahead(self, numbers: Sequence[int]) -> None:
        """Read, compose and pin rows in a thread, one update ahead."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "read-ahead", initializer=make_current, initargs=(self.ranks.device,))
        self._ahead = self._reader.submit(self.prepare, numbers)

    def prepare(self, numbers: Sequence[int]) -> Work:
        """Read this rank's share of an update, compose it, and pin it where a GPU will copy it."""
        token_budget = self.token_budget
        dealt = self._dealt(numbers)
        share = sorted(index for members in dealt for index in members)  # rows that follow one another are read at once
        block = self.cache.block([numbers[index] for index in share or [0]])
        picked = [block.pick([share.index(index) for index in members]) if members else None for members in dealt]
        batches = [self._compose(part, numbers[0]) for part in picked]
        if copies_while_it_computes(self.ranks.device):
            batches = [batch.pinned() for batch in batches]
        return Work(tuple(numbers), token_budget, batches, self._counts(block if share else block.pick([])))

    def _dealt(self, numbers: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this rank, as indices into `numbers`."""
        lengths = [self.cache.length(number) for number in numbers]
        width = self.trainee.head_description.weight_VD.shape[1]
        ranks = deal_rows(lengths, self.ranks.world, self.token_budget, width=width, packed=self.trainee.packs)
        return ranks[self.ranks.rank]

    def _counts(self, block: Block) -> dict[str, float]:
        kept_P = kept_decisions(block, self.cache.weights)
        row_P = np.repeat(np.arange(len(block)), block.decisions_R)
        kept_R = np.bincount(row_P[kept_P], minlength=len(block))
        return {
            "kept": int(kept_P.sum()),
            "decisions": len(kept_P),
            "rows_without": int((kept_R == 0).sum()),
            "tokens": int(block.tokens_R.sum()),
        }

    def _accumulate(self, step: int, work: Work, kept: float) -> dict[str, float]:
        """Run all micro-batches forward and backward; too little memory halves them and starts the update again."""
        while True:
            sums = self._in_memory(
                lambda batches: self._run_micro_batches(step, batches, kept), work.batches, f"at update {step}"
            )
            if sums is not None:
                return sums
            work = self.prepare(work.numbers)

    def _in_memory(self, run: Callable[[list[Batch]], T], batches: list[Batch], when: str) -> T | None:
        """Run something; where memory runs out, halve the micro-batches and return None, or say that it cannot be."""
        try:
            return run(batches)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            longest = max(max(batch.lengths) for batch in batches)
            half = min(self.token_budget, max(self._tokens(batch) for batch in batches)) // 2
            if self.token_budget <= longest or self.ranks.world > 1 or not can_recover(self.trainee):
                raise self._out_of_memory(when, half if self.token_budget > longest else None) from error
        # Here the error is gone, and with it the tensors that its frames held.
        free_memory()
        recover(self.trainee)
        self.token_budget = half
        self.notes.append(f"out of memory: train.token_budget halved to {self.token_budget}; the loss is the same")
        return None

    def _out_of_memory(self, when: str, smaller: int | None) -> WeaveError:
        """Say what to do where this process cannot go on; with a smaller budget, where there is one, it can again."""
        rank = f" on rank {self.ranks.rank}" if self.ranks.world > 1 else ""
        what = f"out of memory{rank} {when} with train.token_budget = {self.token_budget}"
        if smaller is None:
            return WeaveError(
                f"{what}. Its longest row alone is too much: set train.gradient_checkpointing = true, or use more ranks"
            )
        self.leave_budget(smaller)
        return StartAgain(what, f"it resumes with {smaller} on every rank, and the loss is the same")

    def _tokens(self, batch: Batch) -> int:
        """Tokens that a batch puts through the model."""
        return sum(batch.lengths) if self.trainee.packs else len(batch.lengths) * max(batch.lengths)

    def _run_micro_batches(self, step: int, batches: Sequence[Batch], kept: float) -> dict[str, float]:
        """Run forward and backward; what is watched stays on the device until all are done."""
        # Dropout of a student that has any follows from the update, so nothing random needs to be kept for a resume.
        torch.manual_seed(int(np.random.SeedSequence([self.seed, step, self.ranks.rank]).generate_state(1)[0]))
        normalizer = max(kept, 1) / self.ranks.world  # sharded gradients are averaged over ranks
        watched: list[Tensor] = []
        finite: list[tuple[Tensor, Tensor, Tensor]] = []
        loading = 0.0
        for composed in batches:
            started = time.perf_counter()
            batch = composed.to(self.ranks.device)
            loading += time.perf_counter() - started
            loss, log_pi_NO = self.trainee(batch, self.loss, normalizer)
            loss.backward()
            watched.append(torch.cat([loss.detach()[None], distances(log_pi_NO, batch)]))
            finite.append((composed.rows_N, composed.places_N, _finite(batch, log_pi_NO)))
        values = np.array(torch.stack(watched).tolist())  # the only wait for the device
        values[:, 0] /= self.ranks.world
        sums = dict(zip(("loss", *DISTANCES), values.sum(axis=0).tolist(), strict=True))
        bad = [row for at in np.flatnonzero(~np.isfinite(values[:, 0])) for row in _culprits(*finite[at])]
        self._stop_unless_finite("loss", self.ranks.total({"loss": sums["loss"]})["loss"], bad)
        return {**sums, "loading": loading}

    def _step(self, step: int, kept: float) -> float:
        """Clip and step, unless there was nothing to learn from; returns the gradient's norm."""
        norm = clip_gradients(self.trainee, self.clip) if kept else 0.0
        if kept and math.isfinite(norm):
            try:
                self.optimizer.step()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise WeaveError(
                    f"out of memory at update {step}: no room for the optimizer's state (two values per parameter). "
                    "Use more ranks, or train.lora"
                ) from error
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _note_once(self, note: str) -> None:
        if not self._noted:
            self.notes.append(note)
        self._noted = True

    def _compose(self, block: Block | None, some: int) -> Batch:
        """The batch of a block; without one, a batch that has nothing to learn from, made from some row."""
        batch = compose(block or self.cache.block([some]), self.cache.weights, self.loss.alpha)
        checked_ids(batch.candidate_ids_NC, self.trainee.head_description.vocabulary)  # here, where no device waits
        return batch if block else batch.first(0)

    def _stop_unless_finite(self, what: str, value: float, rows: list[dict[str, Any]]) -> None:
        """Stop on all ranks with the rows that caused it, before they can spoil the weights."""
        if math.isfinite(value):
            return
        rows = self.ranks.gathered(rows)
        path = self.folder / BAD_ROWS
        if self.ranks.first:
            write_json(path, {"what": what, "value": str(value), "rows": rows})
        names = ", ".join(str(row["row"]) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        raise WeaveError(
            f"{self.folder}: the {what} is {value}, from the rows {names} (all in {path}). The last checkpoint is kept."
            "\nLook at them with lweave inspect; a smaller learning rate or a larger alpha often helps"
        )

    @torch.no_grad()
    def disagreement(self, numbers: Sequence[int]) -> float:
        """The loss at zero shift before training: how far trainer and cache disagree about the student itself."""

        def loss(batch: Batch, log_pi_NO: Tensor) -> Tensor:
            return log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_b_NO, self.loss.alpha).sum()[None]

        return self._mean(numbers, ("loss",), loss)["loss"]

    @torch.no_grad()
    def distance(self, numbers: Sequence[int]) -> dict[str, float]:
        """How far the student is from its target on some rows, on average over kept decisions."""
        means = self._mean(numbers, DISTANCES, lambda batch, log_pi_NO: distances(log_pi_NO, batch))
        return {name: means[name] for name in ("reverse_kl", "forward_kl", "total_variation")}

    def _mean(
        self, numbers: Sequence[int], names: Sequence[str], measure: Callable[[Batch, Tensor], Tensor]
    ) -> dict[str, float]:
        """Sum what is measured of every micro-batch, and divide by the kept decisions of all ranks."""
        kept = 0
        measured: list[Tensor] = []
        for batch, log_pi_NO in self._look(numbers):
            kept += len(batch)
            measured.append(measure(batch, log_pi_NO))
        sums = np.array(torch.stack(measured).tolist()).sum(axis=0).tolist()
        total = self.ranks.total({**dict(zip(names, sums, strict=True)), "kept": kept})
        return {name: total[name] / max(total["kept"], 1) for name in names}

    def _look(self, numbers: Sequence[int]) -> Iterator[tuple[Batch, Tensor]]:
        """Run rows forward only, a micro-batch at a time: their batches and the student's outcomes."""
        with without_dropout(self.trainee):
            for members in self._dealt(numbers):
                block = self.cache.block([numbers[index] for index in members]) if members else None
                yield from self._outcomes(block, numbers[0])

    def _outcomes(self, block: Block | None, some: int) -> Iterator[tuple[Batch, Tensor]]:
        """Run one micro-batch forward, in halves where it does not fit in memory."""
        composed = self._compose(block, some)
        rows = len(composed.lengths)
        if rows == 1 or self._tokens(composed) <= self.token_budget:  # it may have been planned with a larger budget
            batch = composed.to(self.ranks.device)
            log_pi_NO = self._in_memory(
                lambda batches: self.trainee(batches[0], self.loss, 1.0)[1], [batch], "before an update"
            )
            if log_pi_NO is not None:
                yield batch, log_pi_NO
                return
        assert block is not None, "a batch without rows fits in memory"
        for half in (range(rows // 2), range(rows // 2, rows)):
            yield from self._outcomes(block.pick(half), some)


def check_agreement(fit: Fit, numbers: Sequence[int], largest: float, dtype: torch.dtype) -> tuple[float, str | None]:
    """Measure the loss at zero shift; also say what is wrong where trainer and cache see two different students.

    The bound is for float32. Rounding to bfloat16 alone is worth more: 1.3e-3 on SmolLM2-135M.
    """
    loss = fit.disagreement(numbers)
    bound = largest if dtype == torch.float32 else ROUNDING * largest
    if loss <= bound:
        return loss, None
    return loss, (
        f"before training, the loss at zero shift is {loss:.2e}, over {bound:g} (train.agreement): trainer and "
        "reference/ disagree about the student (another dtype, checkpoint or engine?)"
    )


def adam(trainee: Trainee, learning_rate: float, betas: Sequence[float], weight_decay: float) -> torch.optim.AdamW:
    """Adam with decoupled weight decay, on matrices only: norms and biases have no scale to shrink towards."""
    trained = [parameter for parameter in trainee.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    nonempty_groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(nonempty_groups, learning_rate, (betas[0], betas[1]), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Take the next steps with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _finite(batch: Batch, log_pi_NO: Tensor) -> Tensor:
    """Tell at which decisions everything is finite."""
    checked = (log_pi_NO, batch.log_b_NO, batch.log_q_NO, batch.r_NC, batch.sampled_log_b_N[:, None])
    return torch.stack([values.isfinite().all(dim=1) for values in checked]).all(dim=0)


def _culprits(rows_N: Tensor, places_N: Tensor, finite_N: Tensor) -> list[dict[str, Any]]:
    """Find the decisions at which something is not finite; where nothing is, all rows of the batch are suspect."""
    finite_N = finite_N.cpu()
    chosen_N = ~finite_N if not finite_N.all() else finite_N
    places: dict[int, list[int]] = {}
    for row, place in zip(rows_N[chosen_N].tolist(), places_N[chosen_N].tolist(), strict=True):
        places.setdefault(row, []).append(place)
    return [{"row": row, "positions": positions} for row, positions in places.items()]
