"""Speed and memory of training, against a plain implementation, against TRL, and against the bare matrix products.

    python benchmarks/training.py [--threads 1] [--processor-time] [--json FILE]

Eight tables: the fused loss against autograd on full logits and against its three matrix products; its memory; an
update of a student of about 100 million parameters, with the share of loading and composing, against TRL's GKDTrainer
on the same student and tokens if TRL is installed; rows of unequal length, packed, padded and with the plain
transformers Trainer; reading rows of 8k tokens and waiting for them; the time that an update waits for a checkpoint;
memory of an update while rows grow eightfold; memory while the cache grows tenfold. Variants run in turn, and medians
are shown. Memory is measured in separate processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_weave.cache.block import Cache
from lightning_weave.heads import Head, fused_log_residual_loss
from lightning_weave.maths import log_residual_loss, with_other
from lightning_weave.plan.architecture import find_gpu, find_shape
from lightning_weave.plan.costs import HOUR, PlannedMachine, Workload, offline_hours
from lightning_weave.train.checkpoint import CheckpointWriter
from lightning_weave.train.data import Batch, compose
from lightning_weave.train.loop import Fit, adam
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import Loss, Trainee
from parts.gkd import trl_update
from parts.measure import Clock, Variant, choose_clock, process_memory, reset_peak_memory, time_in_turn
from parts.plain import trainer_update
from parts.student import CANDIDATES, VOCABULARY, make_student, open_cache, write_cache, write_rows

HEAD_VOCABULARY, HEAD_WIDTH = 151_936, 1024  # of a head that matters
NARROW = 128  # the width of a head whose memory is measured: it is the vocabulary's that counts
ALPHA = 2.0
RATE = 1e-6
LONG, PAPER_ROWS = 8192, 64  # tokens of a long row, and rows of an update as in the paper
EVERY = 50  # updates between two checkpoints, as recipes do by default
ALONE = Ranks(0, 1, torch.device("cpu"))


class PlainLoss(Loss):
    """The same objective in plain torch: all logits at once, and autograd."""

    def __call__(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        logp_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1)
        log_pi_NO = with_other(logp_NV.gather(1, batch.candidate_ids_NC))
        loss_N = log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
        return loss_N.sum() / normalizer, log_pi_NO.detach()


def make_fit(cache: Cache, layers: int, variant: str) -> Fit:
    trainee = Trainee(make_student(layers), VOCABULARY)
    trainee.look(pack=True)
    optimizer = adam(trainee, RATE, (0.9, 0.999), 0.01)
    loss = (Loss if variant == "ours" else PlainLoss)("tilted", ALPHA)
    return Fit(trainee, optimizer, cache, loss, 1.0, 1 << 20, 0, ALONE, Path())


def random_head(positions: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_ND = torch.randn(positions, width).requires_grad_()
    weight_VD = (0.05 * torch.randn(HEAD_VOCABULARY, width)).requires_grad_()
    ids_NC = torch.randint(0, HEAD_VOCABULARY - CANDIDATES, (positions, 1)) + torch.arange(CANDIDATES)
    log_b_NO, log_q_NO = torch.log_softmax(2 * torch.randn(2, positions, CANDIDATES + 1), dim=-1)
    return hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO


def head_variants(positions: int, width: int) -> dict[str, Variant]:
    """Loss and both gradients of one head: fused, with autograd, and the bare matrix products."""
    hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO = random_head(positions, width)

    def ours() -> None:
        hidden_ND.grad = weight_VD.grad = None
        fused_log_residual_loss(hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO, ALPHA, positions).backward()

    def plain() -> None:
        hidden_ND.grad = weight_VD.grad = None
        logp_NV = torch.log_softmax(nn.functional.linear(hidden_ND, weight_VD), dim=-1)
        log_pi_NO = with_other(logp_NV.gather(1, ids_NC))
        (log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, ALPHA).sum() / positions).backward()

    @torch.no_grad()
    def limit() -> None:
        logits_NV = hidden_ND @ weight_VD.t()
        torch.mm(logits_NV, weight_VD)
        torch.mm(logits_NV.t(), hidden_ND)

    return {"ours": ours, "plain": plain, "limit": limit}


def step_variants(cache: Cache, layers: int, rows: list[int], shares: list[float]) -> dict[str, Variant]:
    """One update of the same student on the same rows."""
    fits = {variant: make_fit(cache, layers, variant) for variant in ("ours", "plain")}
    return {
        "ours": lambda: shares.append(fits["ours"].update(1, rows)["loading"]),
        "plain": lambda: fits["plain"].update(1, rows),
    }


# Memory, in a separate process


def child(*arguments: Any) -> dict[str, float]:
    """Run this script again for one measurement."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(what: str, *arguments: str) -> dict[str, float]:
    torch.set_num_threads(1)
    if what == "cache":
        return measure_cache(Path(arguments[0]))
    if what == "head":
        variant = head_variants(int(arguments[1]), NARROW)[arguments[0]]
    else:
        fit = make_fit(open_cache(Path(arguments[1])), int(arguments[2]), arguments[0])
        fit.update(1, [0])  # so that the optimizer's state is there

        def variant() -> None:
            fit.update(2, [1])

    before = reset_peak_memory()
    variant()
    return {"extra": process_memory("VmHWM") - before, "peak": process_memory("VmHWM")}


def measure_cache(folder: Path) -> dict[str, float]:
    """Read and compose a whole cache in updates of 64, and return the memory at the end and at the peak."""
    cache = open_cache(folder)
    held = []
    for start in range(0, len(cache), 64):
        block = cache.block(range(start, min(start + 64, len(cache))))
        for place in range(0, len(block), 8):
            compose(block.pick(range(len(block))[place : place + 8]), cache.weights, ALPHA)
        held.append(process_memory("RssAnon"))
    return {"rows": len(cache), "held": held[-1], "most": max(held)}


# The tables


def show_head(options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    print(f"\nLoss and gradients of a head, V = {HEAD_VOCABULARY:,}, width {HEAD_WIDTH}, median of {options.repeat}")
    print(f"{'positions':>9} {'ours':>9} {'plain':>9} {'limit':>9}  x limit  x plain  of the bests  (goals: 1.10, 1)")
    rows = []
    for positions in (options.positions, 8 * options.positions):
        taken = time_in_turn(head_variants(positions, HEAD_WIDTH), options.repeat, clock)
        # On a shared machine the fastest runs are closer to those of a free one.
        seconds, best = ({name: pick(times) for name, times in taken.items()} for pick in (statistics.median, min))
        print(
            f"{positions:9} {seconds['ours']:7.2f} s {seconds['plain']:7.2f} s {seconds['limit']:7.2f} s "
            f"{seconds['ours'] / seconds['limit']:7.2f}x {seconds['ours'] / seconds['plain']:7.2f}x"
            f"  {best['ours'] / best['limit']:.2f}x {best['ours'] / best['plain']:.2f}x",
            flush=True,
        )
        rows.append({"table": "head", "positions": positions, "seconds": seconds, "best": best})
    return rows


def show_head_memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    gradient = HEAD_VOCABULARY * NARROW * 4 / 1e6
    print(f"\nMemory of the same at width {NARROW}, of which the weight's gradient is {gradient:.0f} MB")
    rows = []
    for positions in (8 * options.positions, 64 * options.positions):
        extra = {variant: child("head", variant, positions)["extra"] / 1e6 for variant in ("ours", "plain")}
        print(f"{positions:9} positions: ours {extra['ours']:6.0f} MB, plain {extra['plain']:6.0f} MB", flush=True)
        rows.append({"table": "head memory", "positions": positions, "extra_mb": extra})
    return rows


def show_step(options: argparse.Namespace, folder: Path, clock: Clock) -> list[dict[str, Any]]:
    rows, length = list(range(options.rows)), options.length
    write_cache(folder / "step", max(options.rows, 2), length)
    cache = open_cache(folder / "step")
    count = sum(parameter.numel() for parameter in make_student(options.layers).parameters())
    print(f"\nOne update, {count / 1e6:.0f} M parameters, {options.rows} rows of {length} tokens")
    shares: list[float] = []
    variants = step_variants(cache, options.layers, rows, shares)
    trl = trl_update(cache, options.layers, rows, RATE, clock)
    if trl is not None:
        variants["TRL"] = trl[0]
    seconds = {name: statistics.median(times) for name, times in time_in_turn(variants, options.repeat, clock).items()}
    loading = statistics.median(shares[1:])
    if trl is not None:
        teacher = trl[1].seconds / (options.repeat + 1)
        seconds["TRL's teacher"] = teacher
        seconds["TRL"] -= teacher
    for variant, taken in seconds.items():
        print(f"{variant:14} {taken:7.2f} s   {taken / seconds['ours']:.2f} x ours")
    if trl is None:
        print("TRL is not installed here (scripts/peers-env makes an environment that has it)")
    print(f"loading and composing: {100 * loading:.2f} % of the update (goal: under 3 %)", flush=True)
    return [{"table": "step", "parameters": count, "seconds": seconds, "loading": loading}]


def paper_lengths(rows: int, shorter: int) -> list[int]:
    """Log-normal responses (median 900, sigma 0.7) up to the paper's 2,048, and an eighth of prompt; shortened."""
    drawn = np.minimum(np.random.default_rng(0).lognormal(np.log(900), 0.7, rows), 2048)
    return (drawn * 8 / 7 / shorter).astype(int).tolist()


def show_packing(options: argparse.Namespace, folder: Path, clock: Clock) -> list[dict[str, Any]]:
    """One rank's share of the paper's update on 8 ranks: 8 rows within the default token budget, all made shorter."""
    count, shorter = 8, options.shorter
    budget = 16384 // shorter
    lengths = paper_lengths(16 * count, shorter)
    write_rows(folder / "packing", lengths)
    cache = open_cache(folder / "packing")
    dealt = [
        list(range(start, start + count)) for start in range(0, len(lengths), count)
    ]  # of one update after another
    fits = {variant: make_fit(cache, options.layers, "ours") for variant in ("packed", "padded")}
    fits["padded"].trainee.packs = False
    waited: list[float] = []

    def update(fit: Fit, at: int) -> dict[str, float]:
        fit.token_budget = budget
        return fit.update(at + 1, dealt[at % len(dealt)], dealt[(at + 1) % len(dealt)])

    seconds: dict[str, list[float]] = {"packed": [], "padded": [], "Trainer": []}
    for at in range(options.repeat + 1):
        plain = trainer_update(cache, options.layers, dealt[at], count // 2, RATE)
        plain()  # the first pass warms it up
        variants = {name: partial(update, fit, at) for name, fit in fits.items()} | {"Trainer": plain}
        for name, variant in variants.items():
            started = clock()
            figures = variant()
            seconds[name].append(clock() - started)
            if name == "packed":
                waited.append(figures["loading"])
    tokens = [sum(lengths[row] for row in rows) for rows in dealt[1 : options.repeat + 1]]
    rates = {name: sum(tokens) / sum(taken[1:]) for name, taken in seconds.items()}
    print(
        f"\nUpdates of {count} rows of {min(lengths)} to {max(lengths)} tokens, {budget} at a time; padding not counted"
    )
    for name, rate in rates.items():
        print(f"{name:14} {rate:7.1f} tokens/s   packed is {rates['packed'] / rate:.2f} x that")
    waiting = statistics.mean(waited[1:])
    print(f"waiting for rows, read one update ahead: {100 * waiting:.2f} % of the time (goal: under 1 %)", flush=True)
    return [{"table": "packing", "tokens_per_s": rates, "waiting": waiting}]


def show_long(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time of reading, in CPU time of the thread; of an update and its waiting, in wall-clock time."""
    write_cache(folder / "long", PAPER_ROWS, LONG)
    fit = make_fit(open_cache(folder / "long"), options.few_layers, "ours")
    fit.token_budget = 2 * LONG
    taken = []
    for _ in range(options.repeat + 1):
        started = time.thread_time()
        fit.prepare(range(PAPER_ROWS))
        taken.append(time.thread_time() - started)
    reading = statistics.median(taken[1:])
    print(f"\nUpdates of rows of {LONG:,} tokens, {CANDIDATES} candidates, two anchors")
    print(f"reading {PAPER_ROWS} rows, composing and packing them: {reading:.2f} s of one thread", flush=True)
    figures = [fit.update(at + 1, [at], [at + 1]) for at in range(options.repeat + 1)][1:]
    update, waiting = (statistics.median(row[key] for row in figures) for key in ("seconds", "loading"))
    print(
        f"one update of one row here, {options.few_layers} layers: {update:.0f} s, of which {100 * waiting:.3f} % "
        "waiting for rows, read one update ahead (goal: under 1 %)"
    )
    for utilisation in (None, 0.4):
        seconds = planned_update("Qwen/Qwen3-4B", utilisation)
        at = "as lweave plan has it" if utilisation is None else f"at {utilisation:.0%} of its peak"
        print(
            f"one update of {PAPER_ROWS} rows of a 4B on one H100, {at}: {seconds:.0f} s; reading ahead takes "
            f"{100 * reading / seconds:.1f} % of that, in another thread",
            flush=True,
        )
    return [{"table": "long rows", "reading": reading, "update": update, "waiting": waiting}]


def planned_update(model: str, utilisation: float | None) -> float:
    """The seconds of one update of long rows on one H100, predicted by `lweave plan`."""
    load = Workload(PAPER_ROWS, LONG // 8, LONG - LONG // 8, epochs=1, rounds=1, trajectories_per_round=PAPER_ROWS)
    machine = PlannedMachine(find_gpu("H100"), 1, utilisation)
    return HOUR * offline_hours(find_shape(model), [], load, machine).train


def show_checkpoint(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Wall-clock time that an update waits for a checkpoint, and that the checkpoint takes to be written."""
    write_cache(folder / "checkpoint", 2, options.length)
    fit = make_fit(open_cache(folder / "checkpoint"), options.few_layers, "ours")
    fit.update(1, [0])
    started = time.perf_counter()
    fit.update(2, [1])
    update = time.perf_counter() - started  # of one row: the shortest there is
    rows = []
    with CheckpointWriter(folder / "checkpoints", "benchmark", ALONE) as writer:
        for number in range(1, options.repeat + 1):
            started = time.perf_counter()
            writer.save(number, fit.trainee, fit.optimizer)
            copied = time.perf_counter()
            writer.wait()
            rows.append({"waits": copied - started, "written": time.perf_counter() - started})
    found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    size = sum(
        file.stat().st_size for file in (folder / "checkpoints" / f"{options.repeat:06d}").rglob("*") if file.is_file()
    )
    print(f"\nA checkpoint of {size / 1e6:.0f} MB: training waits {found['waits']:.2f} s of {found['written']:.2f} s")
    share = found["waits"] / (EVERY * update)
    print(
        f"every {EVERY} updates of one row of {options.length} tokens ({update:.2f} s): {share:.2%} (goal: under 2 %)"
    )
    return [{"table": "checkpoint", "bytes": size, "update": update, **found}]


def show_lengths(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    print(f"\nMemory of an update of one row, {options.few_layers} layers, above weights and optimizer state")
    rows = []
    for length in (options.length, 8 * options.length):
        write_cache(folder / f"length-{length}", 2, length)
        found = {
            variant: child("step", variant, folder / f"length-{length}", options.few_layers)["extra"] / 1e6
            for variant in ("ours", "plain")
        }
        print(f"{length:6} tokens: ours {found['ours']:6.0f} MB, plain {found['plain']:6.0f} MB", flush=True)
        rows.append({"table": "lengths", "length": length, "extra_mb": found})
    return rows


def show_cache(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    print("\nAnonymous memory after reading and composing a whole cache")
    rows = []
    for count in (options.cached, 10 * options.cached):
        write_cache(folder / f"cache-{count}", count, 256)
        size = sum(file.stat().st_size for file in (folder / f"cache-{count}").rglob("*.safetensors"))
        found = child("cache", folder / f"cache-{count}")
        print(
            f"{count:6} rows, {size / 1e6:6.0f} MB on disk: {found['held'] / 1e6:.0f} MB, at most "
            f"{found['most'] / 1e6:.0f} MB",
            flush=True,
        )
        rows.append({"table": "cache", "bytes": size, **found})
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=32, help="of the head; then eight times as many")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--few-layers", type=int, default=4)
    parser.add_argument("--shorter", type=int, default=8, help="divide the paper's lengths by this")
    parser.add_argument("--only", choices=["head", "step", "packing", "long", "checkpoint"], help="one table alone")
    parser.add_argument("--cached", type=int, default=256, help="rows of the smaller cache")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="CPU time, for one thread on a busy machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    torch.set_num_threads(options.threads)
    clock = choose_clock(options.processor_time)
    print(f"{options.threads} threads, {'processor' if options.processor_time else 'wall-clock'} time")
    with tempfile.TemporaryDirectory() as root:
        tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "head": lambda: show_head(options, clock),
            "head memory": lambda: show_head_memory(options),
            "step": lambda: show_step(options, Path(root), clock),
            "packing": lambda: show_packing(options, Path(root), clock),
            "long": lambda: show_long(options, Path(root)),
            "checkpoint": lambda: show_checkpoint(options, Path(root)),
            "lengths": lambda: show_lengths(options, Path(root)),
            "cache": lambda: show_cache(options, Path(root)),
        }
        results = [row for name, show in tables.items() if options.only in (None, name) for row in show()]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
