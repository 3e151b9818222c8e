"""Speed and peak memory of the scorer, against plain torch and against the forward pass alone.

    python benchmarks/scoring.py [--lengths 128 256 512 1024] [--threads 1] [--json FILE]

Per length, the same model and rows, variants in turn: `ours` (Scorer), `plain` (full logits, log_softmax, then gather
or topk) and `limit` (the forward pass and the matrix product of the head).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_weave.heads import hidden_states
from lightning_weave.models.scorer import Scorer, ScoreRow
from parts.measure import Clock, Variant, choose_clock, process_memory, reset_peak_memory

VOCABULARY = 151_936
CANDIDATES = 16
PRODUCT_ROWS = 256  # of the limit's product: large enough to be at full speed, small enough to cost no memory


def random_model(width: int, layers: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a Qwen3 as wide as the smallest real one, with its vocabulary and few layers: the head is what costs."""
    torch.manual_seed(0)
    heads = width // 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=32768,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)


def random_rows(length: int, count: int) -> list[ScoreRow]:
    """Make rows of which an eighth is prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        positions = np.arange(length // 8 - 1, length - 1)
        candidates = rng.integers(0, VOCABULARY, size=(len(positions), CANDIDATES)).astype(np.int32)
        ids = rng.integers(0, VOCABULARY, size=length).astype(np.int32)
        rows.append(ScoreRow(ids, positions, candidates, np.ones_like(candidates, dtype=bool)))
    return rows


def scoring_variants(model: Any, rows: list[ScoreRow]) -> dict[str, dict[str, Variant]]:
    """Return the three variants, for scoring and for the reference, as functions without arguments."""
    scorer = Scorer.from_model(model, VOCABULARY)
    ids_BT = torch.from_numpy(np.stack([row.ids for row in rows])).long().to(model.device)
    start = int(rows[0].positions_T[0])
    candidates_BTC = torch.from_numpy(np.stack([row.candidate_ids_TC for row in rows])).long().to(model.device)
    pairs = [(row.ids[: start + 1], row.ids[start + 1 :]) for row in rows]

    @torch.inference_mode()
    def plain_score() -> Any:
        logp_BTV = model(ids_BT).logits.float().log_softmax(dim=-1)
        logp_BTC = logp_BTV[:, start:-1].gather(2, candidates_BTC)
        return logp_BTC.cpu().numpy(), logp_BTC.exp().sum(dim=-1).cpu().numpy()

    @torch.inference_mode()
    def plain_reference() -> Any:
        logp_BTV = model(ids_BT).logits.float().log_softmax(dim=-1)[:, start:-1]
        top = logp_BTV.topk(CANDIDATES)
        other_BT = torch.log1p(-top.values.exp().sum(dim=-1))
        sampled_BT = logp_BTV.gather(2, ids_BT[:, start + 1 :, None])[..., 0]
        return [array.cpu().numpy() for array in (top.indices, top.values, other_BT, sampled_BT)]

    weight_DV = model.lm_head.weight.t()
    room = torch.empty(PRODUCT_ROWS, VOCABULARY, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def limit() -> Any:
        hidden_ND = hidden_states(model, ids_BT)[:, start:-1].flatten(0, 1)
        for chunk_ND in hidden_ND.split(PRODUCT_ROWS):
            torch.mm(chunk_ND, weight_DV, out=room[: len(chunk_ND)])
        return room[0, 0].item()

    return {
        "score": {"ours": lambda: scorer.score(rows), "plain": plain_score, "limit": limit},
        "reference": {
            "ours": lambda: scorer.candidates(pairs, CANDIDATES),
            "plain": plain_reference,
            "limit": limit,
        },
    }


def measure(variant: Variant, device: torch.device, clock: Clock) -> tuple[float, float]:
    """Run once; return seconds and the megabytes that the peak lies above what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = reset_peak_memory()
    began = clock()
    variant()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - began
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else process_memory("VmHWM")
    return seconds, (peak - before) / 1e6


def compare(
    variants: dict[str, Variant], repeat: int, device: torch.device, clock: Clock
) -> dict[str, dict[str, float]]:
    """Run the variants in turn, so that other load affects all of them, and keep the fastest runs."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for variant in variants.values():
        variant()  # warm
    for _ in range(repeat):
        for name, variant in variants.items():
            runs[name].append(measure(variant, device, clock))
    return {
        name: {
            "seconds": min(seconds for seconds, _ in taken),
            "peak_mb": max(megabytes for _, megabytes in taken),
        }
        for name, taken in runs.items()
    }


def main() -> None:
    """Print one line per stage and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--processor-time", action="store_true", help="CPU time, for one thread on a busy machine")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    clock = choose_clock(options.processor_time)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    model = random_model(options.width, options.layers, device, dtype)
    threads = torch.get_num_threads()
    print(
        f"V = {VOCABULARY}, width {options.width}, {options.layers} layers, {options.rows} rows, {dtype}, {device}, "
        f"{threads} threads, best of {options.repeat}"
    )
    print(f"{'stage':10} {'length':>6} {'ours':>12} {'plain':>12} {'limit':>12}  x plain  x limit  peak MB")
    results = []
    for length in options.lengths:
        rows = random_rows(length, options.rows)
        for stage, variants in scoring_variants(model, rows).items():
            found = compare(variants, options.repeat, device, clock)
            seconds = {name: entry["seconds"] for name, entry in found.items()}
            rate = {name: f"{options.rows * length / taken:8.0f} t/s" for name, taken in seconds.items()}
            print(
                f"{stage:10} {length:6} {rate['ours']} {rate['plain']} {rate['limit']}"
                f"  {seconds['plain'] / seconds['ours']:8.2f}x {seconds['ours'] / seconds['limit']:7.2f}x"
                f"  {found['ours']['peak_mb']:.0f} against {found['plain']['peak_mb']:.0f}",
                flush=True,
            )
            results.append({"stage": stage, "length": length, "rows": options.rows, "threads": threads, **found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
