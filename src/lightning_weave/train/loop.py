"""Training: one update covers 64 trajectories by default, normalised over their kept decisions on all ranks.

`train.balance` weighs these decisions so that rows or tags count equally; their mean weight is 1.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.cache.block import Block
from lightning_weave.config import Recipe, is_own_function
from lightning_weave.devices import free_memory, is_out_of_memory, set_device, supports_async_copy
from lightning_weave.errors import Mismatch, StartAgain, WeaveError
from lightning_weave.grading.graders import Grader
from lightning_weave.heads.tiles import check_ids
from lightning_weave.maths import aes, log_residual_loss
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.packing import is_recurrent
from lightning_weave.models.sampler import HFSampler
from lightning_weave.plugins import load_function
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import render_problems, sampling_settings
from lightning_weave.store import Stage, append_line, read_json, read_lines, write_atomic, write_json
from lightning_weave.store.ledger import Meter, measure, peak_memory
from lightning_weave.trackers import TrackedRun, open_trackers
from lightning_weave.train.checkpoint import CheckpointWriter, restore_checkpoint
from lightning_weave.train.data import Balance, Batch, compose, find_dose
from lightning_weave.train.export import MEASURED, files_of_levels, model_card, round_weights, write_model
from lightning_weave.train.parallel import Ranks, clip_gradients, recover
from lightning_weave.train.schedule import Schedule, complete_checkpoints, deal_rows, make_schedule, rate_share
from lightning_weave.train.student import (
    DISTANCES,
    Loss,
    TrainContext,
    Trainee,
    as_sampler,
    distances,
    fit_memory,
    is_quantised,
    open_trainee,
    without_dropout,
)
from lightning_weave.types import Request

AGREEMENT = 1e-4  # largest loss at zero shift with which trainer and cache count as equal
BAD_ROWS = "bad_rows.json"
LINE = "loss {loss:.4f}  KL {reverse_kl:.4f}  kept {kept:.1%}  |g| {grad_norm:.2f}  {tokens_per_s:,.0f} tok/s"
TOKEN_BUDGET_FILE = "token_budget.json"
LOW_PRECISION_FACTOR = 100.0  # on AGREEMENT, below float32
EXPORT_ROWS = 4
EXPORT_DECISIONS = 64  # of each row, where the exported weights are compared with the trained ones
RECORDED = {"alpha", "levels", "budgets", "loss", "parts", *(key for key, _ in MEASURED.values())}  # in the manifest

# One update's micro-batches on this rank, in host memory, and counts of its rows. All ranks run equally many
# micro-batches; a rank that runs out of rows gets empty ones.
Prepared = tuple[list[Batch], Mapping[str, float]]


class Rows(Protocol):
    """Trajectories with shifts, by row number: from the cache, or sampled in this round."""

    @property
    def weights(self) -> list[float]: ...

    def length(self, number: int) -> int: ...

    def block(self, rows: Sequence[int]) -> Block: ...


@dataclass
class Fit:
    """A student, its optimizer, and the composition that it is fitted to."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    cache: Rows
    loss: Loss
    clip: float
    token_budget: int  # halved when memory runs out
    seed: int
    ranks: Ranks
    folder: Path
    save_budget: Callable[[int], None] = lambda smaller: None  # for the restart after an out-of-memory error
    balance: Balance = field(default_factory=Balance)
    notes: list[str] = field(default_factory=list)  # for people
    _warned_empty: bool = False  # of an update without a valid decision
    _prefetched: dict[Any, Future[Prepared]] = field(default_factory=dict)  # by rows and token budget

    def update(self, step: int, numbers: Sequence[int], upcoming: Sequence[int] = ()) -> dict[str, float]:
        """Take one optimizer step on these rows, and read the upcoming ones meanwhile; returns metrics.

        `loading` is the share of the time spent waiting for rows.
        """
        started = time.perf_counter()
        ahead = self._prefetched.pop((tuple(numbers), self.token_budget), None)
        batches, counts = ahead.result() if ahead else self.prepare(numbers)
        self._prefetched.clear()
        if upcoming:
            self._prefetched[tuple(upcoming), self.token_budget] = self._reader.submit(self.prepare, upcoming)
        loading = time.perf_counter() - started
        totals = self.ranks.all_reduce(counts)
        if not totals["kept"] and not self._warned_empty:
            self.notes.append(f"update {step} has no valid decision and changes nothing; lweave doctor says why")
            self._warned_empty = True
        weights = self.balance.weights(numbers, totals) if self.balance.kind != "decisions" else None
        normalizer = max(totals["kept"], 1) / self.ranks.world_size  # FSDP averages gradients over ranks: now a sum
        loss: Tensor | None
        while True:
            # The dropout seed depends only on the update, so a resume needs no saved random state.
            torch.manual_seed(int(np.random.SeedSequence([self.seed, step, self.ranks.rank]).generate_state(1)[0]))
            watched: list[Tensor] = []
            finite: list[Tensor] = []
            try:
                for number, composed in enumerate(batches, start=1):
                    if isinstance(self.trainee, FSDPModule):  # reduced across machines after the last one only
                        self.trainee.set_requires_all_reduce(number == len(batches))
                    began = time.perf_counter()
                    batch = (composed if weights is None else composed.weighted(weights)).to(self.ranks.device)
                    loading += time.perf_counter() - began
                    loss, log_pi_NO = self.trainee(batch, self.loss, normalizer)
                    loss.backward()
                    watched.append(torch.cat([loss.detach()[None], distances(log_pi_NO, batch)]))
                    read = (log_pi_NO, batch.log_b_NO, batch.log_q_NO, batch.r_NC, batch.sampled_log_b_N[:, None])
                    finite.append(torch.stack([values.isfinite().all(dim=1) for values in read]).all(dim=0))
                values = np.array(torch.stack(watched).tolist())  # one synchronization for all micro-batches
                break
            except (MemoryError, RuntimeError) as error:
                self._lower_budget(error, numbers, f"at update {step}")
            # Outside the except block, so that the traceback and the partial graph can be freed.
            loss = None
            free_memory()
            recover(self.trainee)
            batches, _ = self.prepare(numbers)
        values[:, 0] /= self.ranks.world_size
        bad: dict[int, list[int]] = {}  # row -> the decisions at which something is not finite
        for at in np.flatnonzero(~np.isfinite(values[:, 0])):
            finite_N = finite[at].cpu()
            suspect_N = finite_N if finite_N.all() else ~finite_N  # if everything is, all rows are suspect
            rows_N, places_N = batches[at].rows_N[suspect_N], batches[at].places_N[suspect_N]
            for row, place in zip(rows_N.tolist(), places_N.tolist(), strict=True):
                bad.setdefault(row, []).append(place)
        figures = self.ranks.all_reduce(dict(zip(("loss", *DISTANCES), values.sum(axis=0).tolist(), strict=True)))
        suspects = [{"row": row, "positions": positions} for row, positions in bad.items()]
        self._stop_unless_finite("loss", figures["loss"], suspects)
        norm = clip_gradients(self.trainee, self.clip) if totals["kept"] else 0.0
        try:
            if totals["kept"] and math.isfinite(norm):
                self.optimizer.step()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise WeaveError(
                f"out of memory at update {step}: no room for the optimizer's state (two values per parameter). "
                "Use more ranks, or train.lora"
            ) from error
        self.optimizer.zero_grad(set_to_none=True)
        self._stop_unless_finite("gradient", norm, [{"row": row} for row in numbers] if self.ranks.rank == 0 else [])
        seconds = time.perf_counter() - started
        return {
            "loss": figures.pop("loss"),
            **{name: value / max(totals["kept"], 1) for name, value in figures.items()},
            "kept": totals["kept"] / max(totals["decisions"], 1),
            "rows_without": totals["rows_without"],
            "grad_norm": norm,
            "tokens": totals["tokens"],
            "tokens_per_s": totals["tokens"] / seconds,
            "seconds": seconds,
            "loading": loading / seconds,
            "memory": peak_memory(),
        }

    @cached_property
    def _reader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "read-ahead", initializer=set_device, initargs=(self.ranks.device,))

    def prepare(self, numbers: Sequence[int]) -> Prepared:
        """Read this rank's share of an update, compose it, and pin it where a GPU will copy it."""
        dealt = self._deal(numbers)
        share = sorted(index for members in dealt for index in members)  # consecutive rows are read together
        block = self.cache.block([numbers[index] for index in share or [0]])
        parts = [block.pick([share.index(index) for index in members]) if members else None for members in dealt]
        batches = [self._compose(part, numbers[0]) for part in parts]
        if supports_async_copy(self.ranks.device):
            batches = [batch.map(Tensor.pin_memory) for batch in batches]
        own = block if share else block.pick([])
        kept_P = own.kept(self.cache.weights)
        row_P = np.repeat(np.arange(len(own)), own.decisions_R)
        kept_R = np.bincount(row_P[kept_P], minlength=len(own))
        counts: dict[str, float] = {
            "kept": int(kept_P.sum()),
            "decisions": int(own.decided_P.sum()),
            "rows_without": int((kept_R == 0).sum()),
            "tokens": int(own.tokens_R.sum()),
        }
        if self.balance.kind != "decisions":
            counts |= self.balance.counts(numbers, share, kept_R)
        return batches, counts

    def _deal(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the micro-batches of this rank, as indices into `numbers`."""
        lengths = [self.cache.length(number) for number in numbers]
        width = self.trainee.head_description.weight_VD.shape[1]
        ranks = deal_rows(lengths, self.ranks.world_size, self.token_budget, width=width, packed=self.trainee.packs)
        return ranks[self.ranks.rank]

    def _compose(self, block: Block | None, fallback: int) -> Batch:
        """Compose a block into a batch; without a block, an empty batch, built from the fallback row."""
        batch = compose(block or self.cache.block([fallback]), self.cache.weights, self.loss.alpha)
        check_ids(batch.candidate_ids_NC, self.trainee.head_description.vocabulary)  # on the CPU, before the copy
        return batch if block else batch.first(0)

    def _lower_budget(self, error: Exception, numbers: Sequence[int], when: str) -> None:
        """Halve the token budget when memory ran out; raise other errors, or if this process cannot recover."""
        if not is_out_of_memory(error):
            raise error
        lengths = [self.cache.length(number) for number in numbers]
        rank = f" on rank {self.ranks.rank}" if self.ranks.world_size > 1 else ""
        what = f"out of memory{rank} {when} with train.token_budget = {self.token_budget}"
        if self.token_budget <= max(lengths):
            raise WeaveError(
                f"{what}. Its longest row does not fit: set train.gradient_checkpointing = true, or use more ranks"
            ) from error
        half = min(self.token_budget, sum(lengths) // self.ranks.world_size) // 2
        # From torch 2.13 on, a sharded module can be used after a pass that raised.
        can_recover = not isinstance(self.trainee, FSDPModule) or hasattr(self.trainee, "reset_iter_state")
        if self.ranks.world_size > 1 or not can_recover:
            self.save_budget(half)
            raise StartAgain(what, f"it resumes with {half} on every rank; the loss does not change") from error
        self.token_budget = half
        self.notes.append(f"out of memory: train.token_budget halved to {half}; the loss is the same")

    def _stop_unless_finite(self, what: str, value: float, rows: list[dict[str, Any]]) -> None:
        """Stop on all ranks with the rows that caused it, before they can spoil the weights."""
        if math.isfinite(value):
            return
        rows = self.ranks.all_gather(rows)
        path = self.folder / BAD_ROWS
        if self.ranks.is_main_process:
            write_json(path, {"what": what, "value": str(value), "rows": rows})
        names = ", ".join(str(row["row"]) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        raise WeaveError(
            f"{self.folder}: the {what} is {value}, from the rows {names} (all in {path}). The last checkpoint is kept."
            "\nLook at them with lweave inspect; a smaller learning rate or a larger alpha often helps"
        )

    @torch.no_grad()
    def measure(self, numbers: Sequence[int]) -> dict[str, float]:
        """Compare the student with its targets on some rows, without dropout; averages over all kept decisions.

        `zero_shift_loss` is the loss as if no anchor shifted anything. Before training it tells how far trainer and
        cache disagree about the student.
        """
        while True:
            kept = 0
            sums: list[Tensor] = []
            try:
                with without_dropout(self.trainee):
                    for members in self._deal(numbers):
                        block = self.cache.block([numbers[index] for index in members]) if members else None
                        batch = self._compose(block, numbers[0]).to(self.ranks.device)
                        log_pi_NO = self.trainee(batch, self.loss, 1.0)[1]
                        loss_N = log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_b_NO, self.loss.alpha)
                        sums.append(torch.cat([loss_N.sum()[None], distances(log_pi_NO, batch)]))
                        kept += len(batch)
                break
            except (MemoryError, RuntimeError) as error:
                self._lower_budget(error, numbers, "while measuring")
            free_memory()
            recover(self.trainee)
        values = np.array(torch.stack(sums).tolist()).sum(axis=0).tolist()
        total = self.ranks.all_reduce(dict(zip(("zero_shift_loss", *DISTANCES), values, strict=True)) | {"kept": kept})
        count = max(total.pop("kept"), 1)
        return {name: value / count for name, value in total.items()}


def adam(trainee: Trainee, learning_rate: float, betas: Sequence[float], weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only, not on norms and biases."""
    trained = [parameter for parameter in trainee.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    nonempty_groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(nonempty_groups, learning_rate, (betas[0], betas[1]), fused=True)


def make_fit(run: Run, name: str, trainee: Trainee, rows: Rows, *, alpha: float, ranks: Ranks) -> Fit:
    """Put student, objective and optimizer together, with the token budget saved after running out of memory."""
    train = run.recipe.train_section(name)
    objective = run.objective(name)
    loss = Loss(objective, alpha, load_function(objective, run.trust) if is_own_function(objective) else None)
    _, asked = fit_memory(run, ranks)
    file = run.directory / TOKEN_BUDGET_FILE
    left = read_json(file) if ranks.is_main_process and file.exists() else {}
    budget = ranks.broadcast(int(left["smaller"]) if left.get("asked") == asked else asked)
    note = f"train.token_budget is {budget}: {asked} did not fit into memory before ({file})"
    return Fit(
        trainee=trainee,
        optimizer=adam(trainee, train.learning_rate, train.optimizer.betas, train.optimizer.weight_decay),
        cache=rows,
        loss=loss,
        clip=train.optimizer.clip,
        token_budget=budget,
        save_budget=lambda smaller: write_json(file, {"asked": asked, "smaller": smaller}),
        seed=train.seed,
        ranks=ranks,
        folder=run.stage("train", name).folder,
        balance=Balance.from_run(run),
        notes=[note] if budget != asked else [],
    )


class Metrics:
    """metrics.jsonl, and the trackers that the recipe switches on."""

    def __init__(self, recipe: Recipe, name: str, folder: Path, start: int, fingerprint: str) -> None:
        self.path = folder / "metrics.jsonl"
        # After a kill the log may be ahead of the checkpoint: those updates are taken again.
        rows = [row for row in read_lines(self.path, step=int) if row["step"] <= start] if start else []
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.last: dict[str, float] = {key: value for row in rows for key, value in row.items() if key != "step"}
        self.first = next((row for row in rows if row["step"] == 0), None)
        self.trackers = open_trackers(recipe, TrackedRun(name, folder, fingerprint, start))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write one step."""
        row = {name: float(f"{value:.6g}") for name, value in figures.items()}
        self.last |= row  # as written: a resumed run has no other digits
        if step == 0:
            self.first = row
        append_line(self.path, {"step": step, **row})
        for tracker in self.trackers:
            tracker.log(step, figures)


class Probe:
    """Problems of the recipe's first benchmark, evenly spread: sampled by the recipe's protocol, once each."""

    def __init__(self, run: Run) -> None:
        section = run.recipe.eval
        loaded = load_eval_benchmark(run.recipe, section.benchmarks[0])
        count = len(loaded.problems)
        most = min(count, run.recipe.train.eval_problems)
        problems = tuple(loaded.problems[place * count // most] for place in range(most))
        self.benchmark = replace(loaded, problems=problems)
        self.student = run.student
        self.grader = Grader.from_section(self.benchmark, section, run.trust)
        asked = render_problems(self.benchmark, run.student.tokenizer, section, run.recipe.date)
        self.requests = [Request(one.token_ids, place, 0) for place, one in enumerate(asked)]
        self.settings = sampling_settings(section, self.benchmark)
        self.batch_size = section.batch_size

    def answer(self, trainee: Trainee, ranks: Ranks, base: dict[str, float] | None = None) -> dict[str, float]:
        """Sample and grade, each rank its share of the problems: the share that is right in %, the mean of tokens.

        With the figures of `base`, the student that training began with, also the AES, if `base` was ever right.
        """
        own = self.requests[ranks.rank :: ranks.world_size]
        with as_sampler(trainee):
            vocabulary = trainee.head_description.vocabulary
            sampler = HFSampler(trainee.model, self.student.stop_ids, vocabulary, self.batch_size)
            responses = sampler.sample(own, self.settings) if own else []
        texts = [str(self.student.tokenizer.decode(each.ids, skip_special_tokens=True)) for each in responses]
        problems = [self.benchmark.problems[request.prompt] for request in own]
        right = sum(one.correct for one in self.grader.grade(list(zip(problems, texts, strict=True))))
        total = ranks.all_reduce({"right": right, "tokens": sum(len(each.ids) for each in responses)})
        accuracy, tokens = 100 * total["right"] / len(self.requests), total["tokens"] / len(self.requests)
        figures = {"eval_accuracy": accuracy, "eval_tokens": tokens}
        score = aes(accuracy, tokens, base["eval_accuracy"], base["eval_tokens"]) if base else math.nan
        return figures if math.isnan(score) else {**figures, "eval_aes": score}


@dataclass(frozen=True)
class Training:
    """The training of one composition: its updates, with checkpoints between them, and its export."""

    run: Run
    name: str
    schedule: Schedule
    fit: Fit
    progress: Progress
    before_round: Callable[[int], None] | None = None  # samples the round's trajectories, in online training

    @property
    def stage(self) -> Stage:
        return self.run.stage("train", self.name)

    @property
    def checkpoints(self) -> Path:
        return self.stage.folder / "checkpoints"

    def say(self, message: str) -> None:
        self.progress.say(f"train {self.name}: {message}")

    def check(self, dtype: torch.dtype) -> dict[str, float]:
        """Check before training that trainer and cache compute the same student.

        The bound is for float32. Rounding to bfloat16 alone costs more: 1.3e-3 on SmolLM2-135M.
        """
        train = self.run.recipe.train
        head = self.fit.trainee.head_description
        if not head.plain and self.fit.loss.objective in ("tilted", "reverse-kl"):
            parts = {"bias": head.bias_V is not None, "scale": head.scale != 1, "soft cap": head.softcap is not None}
            named = " and ".join(f"a {part}" for part, there in parts.items() if there)
            self.say(f"the student's head has {named}: the plain loss is used, which is slower than the one-pass loss")
        if not self.fit.trainee.packs:
            hint = " without flash-linear-attention and causal-conv1d" if is_recurrent(self.fit.trainee.model) else ""
            leaks = f"packed rows would leak into each other in its layers{hint}"
            self.say(f"the student's rows are padded to one length: {leaks}")
        loss = self.fit.measure(self.schedule.plain_rows(0))["zero_shift_loss"]
        bound = (AGREEMENT if isinstance(train.agreement, bool) else train.agreement) * (
            1 if dtype == torch.float32 else LOW_PRECISION_FACTOR
        )
        if loss <= bound:
            self.say(f"trainer and cache agree to {loss:.1e} at zero shift")
        elif is_quantised(train):
            self.say(f"the quantised student differs from the one that was cached: {loss:.1e} at zero shift")
        else:
            complaint = (
                f"before training, the loss at zero shift is {loss:.2e}, over {bound:g} (train.agreement): the trainer "
                "and reference/ give different log-probabilities for the student (another dtype, checkpoint or engine?)"
            )
            if train.agreement is not False:
                raise Mismatch(f"{complaint}.\nRerun the reference, or set train.agreement = false")
            self.say(complaint)
        return {"zero_shift_loss": loss}

    def restore(self) -> int:
        """Begin the stage and restore the newest checkpoint that rank 0 sees; returns its update, or 0."""
        self.stage.begin()
        fingerprint, ranks = self.stage.fingerprint, self.fit.ranks
        saved = complete_checkpoints(self.checkpoints, fingerprint) if ranks.is_main_process else []
        start = ranks.broadcast(int(saved[-1].name) if saved else 0)
        if ranks.is_main_process:
            (self.stage.folder / BAD_ROWS).unlink(missing_ok=True)
            if not start:
                shutil.rmtree(self.checkpoints, ignore_errors=True)
        if start:
            restore_checkpoint(self.checkpoints, fingerprint, start, self.fit.trainee, self.fit.optimizer)
            self.say(f"resuming from update {start}")
        return start

    def run_updates(self, start: int, meter: Meter, end: int | None = None) -> dict[str, float]:
        """Run all updates that are left, or those up to `end`; rank 0 returns the last metrics."""
        train, fit, schedule, stage = self.run.recipe.train, self.fit, self.schedule, self.stage
        total = len(schedule)
        end = total if end is None else end
        held_out = schedule.held_out()
        metrics = None
        if fit.ranks.is_main_process:
            metrics = Metrics(self.run.recipe, self.name, stage.folder, start, stage.fingerprint)
        probe = Probe(self.run) if train.eval_every else None
        if probe and start == 0:
            figures = probe.answer(fit.trainee, fit.ranks)
            if metrics:
                metrics.add(0, figures)
        writer = CheckpointWriter(self.checkpoints, stage.fingerprint, fit.ranks)
        with writer, self.progress.bar(f"train {self.name}", end - start, "update") as bar:
            for step in range(start + 1, end + 1):
                this_round = schedule.round_of(step - 1)
                if self.before_round and this_round[0] == step - 1:
                    self.before_round(step - 1)
                rate = train.learning_rate * rate_share(step, total, train.warmup, train.decay)
                for group in fit.optimizer.param_groups:
                    group["lr"] = rate
                # An online round's rows do not exist before it begins.
                can_prefetch = step != end and (not self.before_round or step in this_round)
                figures = fit.update(step, schedule.rows(step - 1), schedule.rows(step) if can_prefetch else ())
                if held_out and (step % train.checkpoint_every == 0 or step == total):
                    measured = fit.measure(held_out)
                    figures |= {f"validation_{key}": measured[key] for key in DISTANCES if key != "covered_mass"}
                if probe and (step % train.eval_every == 0 or step == total):
                    figures |= probe.answer(fit.trainee, fit.ranks, metrics.first if metrics else None)
                    score = f", AES {figures['eval_aes']:.2f}" if "eval_aes" in figures else ""
                    right = f"{figures['eval_accuracy']:.1f} % of {len(probe.requests)} problems right"
                    self.say(f"update {step}: {right} with {figures['eval_tokens']:.0f} tokens{score}")
                if metrics:
                    metrics.add(step, figures | {"learning_rate": rate})
                    meter.add(tokens=int(figures["tokens"]))  # of all ranks
                while fit.notes:
                    self.say(fit.notes.pop(0))
                due = step % train.checkpoint_every == 0
                if self.before_round:  # at the end of a round, since a resume samples the round again
                    passed = [update for update in this_round if (update + 1) % train.checkpoint_every == 0]
                    due = step == this_round[-1] + 1 and bool(passed)
                if step == end or due:
                    writer.save(step, fit.trainee, fit.optimizer)
                bar.advance(note=LINE.format(**figures))
        if metrics is None:
            return {}
        for tracker in metrics.trackers:
            tracker.close()
        return {**metrics.last, "updates": end}

    def export(self, stage: Stage, updates: int, figures: dict[str, Any]) -> None:
        """Round the weights to the student's dtypes and write final/.

        Exported and trained weights are compared on a few decisions of the last update, row by row.
        """
        student, trainee, ranks, rows = self.run.student, self.fit.trainee, self.fit.ranks, self.fit.cache
        layout = student.layout
        if is_quantised(self.run.recipe.train):  # the adapter is added to the student's own weights
            compared = "trained on quantised weights, added to the student's own"
        else:
            blocks = [rows.block([number]) for number in self.schedule.rows(updates - 1)[:EXPORT_ROWS]]
            batches = [compose(block, rows.weights, self.fit.loss.alpha).first(EXPORT_DECISIONS) for block in blocks]
            lost = round_weights(trainee, layout.dtypes, [batch.to(ranks.device) for batch in batches])
            figures = {**figures, "export_kl": lost}
            compared = f"KL exported || trained {lost:.1e} nats"
        final = stage.folder / "final"
        card = model_card(self.run, self.name, figures) if ranks.is_main_process else ""
        files = write_model(final, trainee, layout, card, ranks, student, extra=files_of_levels(self.run, self.name))
        if ranks.is_main_process:
            stage.record(files, {key: value for key, value in figures.items() if key in RECORDED})
            self.say(f"{final} ({compared})")
        ranks.barrier()


def train_offline(
    run: Run, name: str, context: TrainContext, start: Checkpoint | None = None, prompts: range | None = None
) -> None:
    """Train one composition from the cache; a leg of a sequence starts from `start` and uses only `prompts`."""
    composition = run.recipe.compositions[name]
    cache = open_cache(run, name)
    groups = prompts or range(len(cache) // run.recipe.rollout.responses)
    schedule = make_schedule(run.recipe, groups, name, len(composition.slots))
    dose = find_dose(run, name, cache, schedule)
    trainee = open_trainee(run, context, name, start)
    fit = make_fit(run, name, trainee, cache, alpha=dose.alpha, ranks=context.ranks)
    training = Training(run, name, schedule, fit, context.progress)
    spent = {"method": composition.method, "fingerprint": training.stage.fingerprint}
    with measure(run.directory, "train", name, **spent) as meter:
        training.say(str(dose))
        figures = dose.figures() | ({} if start else training.check(context.dtype))
        figures |= training.run_updates(training.restore(), meter)
        training.export(training.stage, len(schedule), figures)
