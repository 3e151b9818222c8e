"""Speed and memory of the head alone, against plain torch and against the bare matrix products as the limit.

    python benchmarks/heads.py [--width 576] [--positions 256 1024 2048] [--rounds 3] [--threads 1] [--json FILE]

Variants run in turn in one process; each ratio is the median over the rounds, followed by the ratio of the fastest
rounds (more reliable on a busy machine). Peak memory beyond the inputs is measured in a separate process for every
figure. The limits are bare matrix products with their outputs, the better of two: over full rows of logits, and over
tiles like those of the head.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_weave.heads import Head, candidate_logprobs, fused_log_residual_loss, top_candidates
from lightning_weave.heads.tiles import TILE_WIDTH, rows_within_budget
from lightning_weave.maths import log_residual_loss, tilted_target, with_other
from parts.measure import Clock, Variant, choose_clock, process_memory, reset_peak_memory, time_in_turn

VOCABULARY = 151_936
CANDIDATES = 16
ALPHA = 2.0
MEASURED = (  # for memory
    "candidates",
    "log_softmax + gather",
    "top",
    "log_softmax + topk",
    "one-pass",
    "one-pass, frozen",
    "autograd",
)
LIMITS = ("one product", "two products", "three products")
# (title, ours, others): each ratio is ours over theirs
COMPARISONS = (
    ("candidate log-probs", "candidates", ("one product", "log_softmax + gather")),
    ("top candidates", "top", ("one product", "log_softmax + topk")),
    ("loss and gradients", "one-pass", ("three products", "autograd")),
    ("the same, head frozen", "one-pass, frozen", ("two products",)),
)


def make_variants(positions: int, width: int) -> dict[str, Variant]:
    """Make the inputs and return every variant as a function without arguments."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(positions, width)
    weight_VD = torch.randn(VOCABULARY, width) * (3 / width**0.5)
    ids_NC = torch.randint(0, VOCABULARY, (positions, CANDIDATES)).sort(dim=1).values
    ids_NC += torch.arange(CANDIDATES)  # distinct
    ids_NC.clamp_(max=VOCABULARY - 1)
    sampled_N = ids_NC[:, 0]
    log_b_NO = torch.log_softmax(3 * torch.randn(positions, CANDIDATES + 1), dim=1)
    log_q_NO = tilted_target(log_b_NO, torch.randn(positions, CANDIDATES), ALPHA)
    head = Head(weight_VD, VOCABULARY)

    def one_pass(frozen: bool) -> None:
        inputs = hidden_ND.detach().requires_grad_(), weight_VD.detach().requires_grad_(not frozen)
        fused_log_residual_loss(*inputs, ids_NC, log_b_NO, log_q_NO, ALPHA, positions).backward()

    def autograd() -> None:
        h_ND, w_VD = hidden_ND.detach().requires_grad_(), weight_VD.detach().requires_grad_()
        log_pi_NO = with_other(torch.log_softmax(h_ND @ w_VD.T, dim=1).gather(1, ids_NC))
        (log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, ALPHA).sum() / positions).backward()

    def gather_softmax() -> Tensor:
        return torch.log_softmax(hidden_ND @ weight_VD.T, dim=1).gather(1, ids_NC)

    def top_of_softmax() -> tuple[Any, Tensor]:
        logp_NV = torch.log_softmax(hidden_ND @ weight_VD.T, dim=1)
        return logp_NV.topk(CANDIDATES), logp_NV.gather(1, sampled_N[:, None])

    return {
        "candidates": lambda: candidate_logprobs(hidden_ND, head, ids_NC),
        "top": lambda: top_candidates(hidden_ND, head, sampled_N, CANDIDATES),
        "one-pass": lambda: one_pass(frozen=False),
        "one-pass, frozen": lambda: one_pass(frozen=True),
        "log_softmax + gather": gather_softmax,
        "log_softmax + topk": top_of_softmax,
        "autograd": autograd,
        **make_limits(hidden_ND, weight_VD),
    }


def make_limits(hidden_ND: Tensor, weight_VD: Tensor) -> dict[str, Variant]:
    """One, two and three matrix products in chunks of positions, over full rows and over tiles of logits."""
    positions = len(hidden_ND)
    chunk = min(rows_within_budget(VOCABULARY, hidden_ND.device), positions)

    def products(width: int, count: int) -> None:
        room, d_hidden_ND, d_weight_VD = (
            torch.empty(shape) for shape in (chunk * VOCABULARY, hidden_ND.shape, weight_VD.shape)
        )
        columns = [slice(start, start + width) for start in range(0, VOCABULARY, width)]
        for start in range(0, positions, chunk):
            h_ND, d_h_ND = hidden_ND[start : start + chunk], d_hidden_ND[start : start + chunk]
            tiles = []
            for tile in columns:
                w_WD = weight_VD[tile]
                free = room[tile.start * len(h_ND) :][: len(w_WD) * len(h_ND)]
                tiles.append(torch.mm(h_ND, w_WD.T, out=free.view(len(h_ND), len(w_WD))))
            for tile, logits_NW in zip(columns, tiles, strict=True):
                if count > 1:
                    d_h_ND.addmm_(logits_NW, weight_VD[tile], beta=0 if tile.start == 0 else 1)
                if count > 2:
                    d_weight_VD[tile].addmm_(logits_NW.T, h_ND, beta=0 if start == 0 else 1)

    return {
        f"{name} ({layout})": lambda width=width, count=count: products(width, count)
        for count, name in enumerate(LIMITS, start=1)
        for layout, width in (("rows", VOCABULARY), ("tiles", TILE_WIDTH))
    }


def measure_times(positions: int, width: int, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Time every variant once per round; of a limit, the better layout counts."""
    times = time_in_turn(make_variants(positions, width), rounds, clock)
    for name in LIMITS:
        kinds = [seconds for other, seconds in times.items() if other.startswith(name + " (")]
        times[name] = min(kinds, key=median)
    return times


def measure_memory(name: str, positions: int, width: int) -> float:
    """Run one variant in a separate process and return its peak memory beyond the inputs, in MB."""
    command = [sys.executable, __file__, "--memory-of", name, "--positions", str(positions), "--width", str(width)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_beyond_inputs(name: str, positions: int, width: int) -> float:
    """Peak memory of a variant in this process beyond its inputs, in MB."""
    variant = make_variants(positions, width)[name]
    before = reset_peak_memory()
    variant()
    return (process_memory("VmHWM") - before) / 2**20


def compare(times: dict[str, list[float]], positions: int) -> list[dict[str, Any]]:
    """Turn times into ratios, ours over theirs."""
    rows = []
    for title, ours, others in COMPARISONS:
        for other in others:
            ratios = [a / b for a, b in zip(times[ours], times[other], strict=True)]
            rows.append(
                {
                    "what": title,
                    "positions": positions,
                    "against": other,
                    "ours_ms": 1e3 * median(times[ours]),
                    "theirs_ms": 1e3 * median(times[other]),
                    "ratio": median(ratios),
                    "ratio_of_fastest": min(times[ours]) / min(times[other]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--positions", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="CPU time, for one thread on a busy machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(peak_beyond_inputs(options.memory_of, options.positions[0], options.width))
        return

    clock = choose_clock(options.processor_time)
    print(f"V = {VOCABULARY:,}, D = {options.width}, {CANDIDATES} candidates, float32, {options.threads} thread(s)")
    print(f"{'':22} {'positions':>9} {'against':<22} {'ours ms':>9} {'theirs ms':>9} {'ratio':>7} {'fastest':>8}")
    rows = []
    for positions in options.positions:
        for row in compare(measure_times(positions, options.width, options.rounds, clock), positions):
            rows.append(row)
            print(
                f"{row['what']:22} {positions:9} {row['against']:<22} {row['ours_ms']:9.0f} {row['theirs_ms']:9.0f} "
                f"{row['ratio']:7.3f} {row['ratio_of_fastest']:8.3f}",
                flush=True,
            )

    print(f"\n{'peak MB beyond inputs':22} " + " ".join(f"{positions:>9}" for positions in options.positions))
    memory = {}
    for name in MEASURED:
        memory[name] = [measure_memory(name, positions, options.width) for positions in options.positions]
        print(f"{name:22} " + " ".join(f"{megabytes:9.0f}" for megabytes in memory[name]), flush=True)
    print(f"(the weight gradient alone is {VOCABULARY * options.width * 4 / 2**20:.0f} MB)")
    if options.json:
        options.json.write_text(json.dumps({"times": rows, "memory_mb": memory}, indent=2))


if __name__ == "__main__":
    main()
