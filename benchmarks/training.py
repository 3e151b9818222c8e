"""Speed and memory of training, beside the plain way, beside TRL's, and beside the least that any way must do.

    python benchmarks/training.py [--threads 1] [--processor-time] [--json FILE]

Five tables from one run: the one-pass loss against autograd on whole logits and against its three bare matrix products;
its memory; a whole update of a student of about 100 million parameters, with the share of loading and composing, beside
TRL's GKDTrainer on the same student and tokens where that is installed; an update's memory while rows grow eightfold;
memory while the cache grows tenfold. Ways take turns, over and over, and medians are shown. Memory is measured in
processes of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_weave.heads import Head, fused_log_residual_loss
from lightning_weave.maths import log_residual_loss, with_other
from lightning_weave.store import Stage, Step
from lightning_weave.train.cache import Cache
from lightning_weave.train.data import Batch, compose
from lightning_weave.train.loop import Fit, adam
from lightning_weave.train.objectives import Loss, Trainee
from lightning_weave.train.parallel import Ranks, clip_gradients
from lightning_weave.train.sources import Pair
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores

VOCABULARY, WIDTH = 49_152, 576  # of a small student
HEAD_VOCABULARY, HEAD_WIDTH = 151_936, 1024  # of a head that matters
NARROW = 128  # the width of a head whose memory is measured: it is the vocabulary's that counts
CANDIDATES, ALPHA = 16, 2.0
RATE = 1e-6
ALONE = Ranks(0, 1, torch.device("cpu"))
Clock = Callable[[], float]


# The cache and the student


def write_cache(folder: Path, rows: int, length: int, per_shard: int = 64) -> None:
    """Write random trajectories of one length, an eighth of it prompt, with two anchors' scores."""
    rng = np.random.default_rng(0)
    prompt, response = length // 8, length - length // 8
    for shard, start in enumerate(range(0, rows, per_shard)):
        count = min(per_shard, rows - start)
        positions = count * response
        logp = np.log(rng.dirichlet(np.ones(CANDIDATES + 1), positions)).astype(np.float32)
        ids = rng.integers(0, VOCABULARY - CANDIDATES, (positions, 1)) + np.arange(CANDIDATES)
        offsets = np.arange(count + 1) * response
        rollouts = Rollouts(
            np.arange(start, start + count, dtype=np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.uint8),
            Ragged(rng.integers(0, VOCABULARY, count * prompt, dtype=np.int32), np.arange(count + 1) * prompt),
            Ragged(rng.integers(0, VOCABULARY, positions, dtype=np.int32), offsets),
        )
        named = rollouts.trajectories()
        stages(folder)["rollout"].write(shard, rollouts)
        candidates = Candidates(
            named,
            Ragged(ids.astype(np.int32), offsets),
            Ragged(logp[:, :-1], offsets),
            Ragged(logp[:, -1], offsets),
            Ragged(logp[:, 0], offsets),
        )
        stages(folder)["reference"].write(shard, candidates)
        for name in ("post-0", "pre-0", "post-1", "pre-1"):
            moved = logp[:, :-1] + rng.normal(0, 0.5, (positions, CANDIDATES)).astype(np.float32)
            mapped = Ragged(np.ones(moved.shape, np.bool_), offsets)
            scores = Scores(named, Ragged(moved, offsets), mapped, Ragged(np.ones(positions, np.float32), offsets))
            stages(folder)[name].write(shard, scores)
    shards = -(-rows // per_shard)
    for name, stage in stages(folder).items():
        stage.finish({"rollout": Rollouts, "reference": Candidates}.get(name, Scores), shards)


def stages(folder: Path) -> dict[str, Stage]:
    names = ("rollout", "reference", "post-0", "pre-0", "post-1", "pre-1")
    return {name: Stage(folder / name, Step(name, {})) for name in names}


def open_cache(folder: Path) -> Cache:
    found = stages(folder)
    pairs = [Pair(str(k), found[f"post-{k}"], found[f"pre-{k}"], 0.5) for k in range(2)]
    return Cache(found["rollout"], found["reference"], pairs)


def make_student(layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


class PlainLoss(Loss):
    """The same objective as everybody would write it: all logits at once, and autograd."""

    def __call__(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        logp_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1)
        log_pi_NO = with_other(logp_NV.gather(1, batch.candidate_ids_NC))
        loss_N = log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
        return loss_N.sum() / normalizer, log_pi_NO.detach()


def make_fit(cache: Cache, layers: int, way: str) -> Fit:
    trainee = Trainee(make_student(layers), VOCABULARY)
    optimizer = adam(trainee, RATE, (0.9, 0.999), 0.01)
    loss = (Loss if way == "ours" else PlainLoss)("tilted", ALPHA)
    return Fit(trainee, optimizer, cache, loss, 1.0, 1 << 20, 0, ALONE, Path())


# What is measured


def take_turns(
    ways: dict[str, Callable[[], Any]], repeat: int, clock: Clock
) -> tuple[dict[str, float], dict[str, float]]:
    """Run the ways in turn, so that a busy machine is busy for all of them; give medians and bests of seconds.

    Others who use the same caches slow down what lives in them. The bests are nearer to a machine of one's own.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, way in ways.items():
            started = clock()
            way()
            if turn:  # the first is for warming up
                taken[name].append(clock() - started)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return medians, {name: min(times) for name, times in taken.items()}


def random_head(positions: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_ND = torch.randn(positions, width).requires_grad_()
    weight_VD = (0.05 * torch.randn(HEAD_VOCABULARY, width)).requires_grad_()
    ids_NC = torch.randint(0, HEAD_VOCABULARY - CANDIDATES, (positions, 1)) + torch.arange(CANDIDATES)
    log_b_NO, log_q_NO = torch.log_softmax(2 * torch.randn(2, positions, CANDIDATES + 1), dim=-1)
    return hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO


def head_ways(positions: int, width: int) -> dict[str, Callable[[], Any]]:
    """Loss and both gradients of one head: in one pass, through autograd, and the bare products."""
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


def step_ways(cache: Cache, layers: int, rows: list[int], shares: list[float]) -> dict[str, Callable[[], Any]]:
    """One update of the same student on the same rows."""
    fits = {way: make_fit(cache, layers, way) for way in ("ours", "plain")}
    return {
        "ours": lambda: shares.append(fits["ours"].update(1, rows)["loading"]),
        "plain": lambda: fits["plain"].update(1, rows),
    }


class TimedTeacher(nn.Module):
    """A teacher of the student's size that keeps its own time."""

    def __init__(self, model: Any, clock: Clock) -> None:
        super().__init__()
        self.model, self.config, self.clock, self.seconds = model.eval(), model.config, clock, 0.0

    def forward(self, **inputs: Any) -> Any:
        started = self.clock()
        outputs = self.model(**inputs)
        self.seconds += self.clock() - started
        return outputs


def trl_way(cache: Cache, layers: int, rows: list[int], clock: Clock) -> tuple[Callable[[], Any], TimedTeacher] | None:
    """The same update with TRL's GKDTrainer, on the same student and tokens; None where TRL is not installed."""
    warnings.simplefilter("ignore")
    try:
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError:
        return None
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    settings = GKDConfig(
        tempfile.mkdtemp(), lmbda=0.0, beta=1.0, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False
    )
    teacher = TimedTeacher(make_student(layers), clock)
    trainer = GKDTrainer(
        model=make_student(layers),
        teacher_model=teacher,
        args=settings,
        train_dataset=Dataset.from_list([{"unused": 0}]),
        data_collator=lambda batch: batch,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(trainer.model.parameters(), RATE, weight_decay=0.01, fused=True)
    read = [cache.read(number) for number in rows]
    ids = torch.tensor(np.stack([np.concatenate([row.prompt_ids, row.response_ids]) for row in read])).long()
    labels = ids.clone()
    labels[:, : len(read[0].prompt_ids)] = -100

    def step() -> None:
        trainer.training_step(
            trainer.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        )
        clip_gradients(trainer.model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, teacher


# Memory, in a process of its own


def kernel_says(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(entry)).split()[1]) * 1024


def child(*arguments: Any) -> dict[str, float]:
    """Run this script again for one measurement."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(what: str, *arguments: str) -> dict[str, float]:
    torch.set_num_threads(1)
    if what == "cache":
        return measure_cache(Path(arguments[0]))
    if what == "head":
        way = head_ways(int(arguments[1]), NARROW)[arguments[0]]
    else:
        fit = make_fit(open_cache(Path(arguments[1])), int(arguments[2]), arguments[0])
        fit.update(1, [0])  # so that the optimizer's state is there

        def way() -> None:
            fit.update(2, [1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = kernel_says("VmRSS")
    way()
    return {"extra": kernel_says("VmHWM") - before, "peak": kernel_says("VmHWM")}


def measure_cache(folder: Path) -> dict[str, float]:
    """Read and compose a whole cache in updates of 64, and look at what is held at the end and at most."""
    cache = open_cache(folder)
    held = []
    for start in range(0, len(cache), 64):
        rows = [cache.read(number) for number in range(start, min(start + 64, len(cache)))]
        for place in range(0, len(rows), 8):
            compose(rows[place : place + 8], cache.weights, ALPHA)
        held.append(kernel_says("RssAnon"))
    return {"rows": len(cache), "held": held[-1], "most": max(held)}


# The tables


def show_head(options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    print(f"\nLoss and gradients of a head, V = {HEAD_VOCABULARY:,}, width {HEAD_WIDTH}, median of {options.repeat}")
    print(f"{'positions':>9} {'ours':>9} {'plain':>9} {'limit':>9}  x limit  x plain  of the bests  (goals: 1.10, 1)")
    rows = []
    for positions in (options.positions, 8 * options.positions):
        seconds, best = take_turns(head_ways(positions, HEAD_WIDTH), options.repeat, clock)
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
        extra = {way: child("head", way, positions)["extra"] / 1e6 for way in ("ours", "plain")}
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
    ways = step_ways(cache, options.layers, rows, shares)
    trl = trl_way(cache, options.layers, rows, clock)
    if trl is not None:
        ways["TRL"] = trl[0]
    seconds, _ = take_turns(ways, options.repeat, clock)
    loading = statistics.median(shares[1:])
    if trl is not None:
        teacher = trl[1].seconds / (options.repeat + 1)
        seconds["TRL's teacher"] = teacher
        seconds["TRL"] -= teacher
    for way, taken in seconds.items():
        print(f"{way:14} {taken:7.2f} s   {taken / seconds['ours']:.2f} x ours")
    if trl is None:
        print("TRL is not installed here (scripts/peers-env makes an environment that has it)")
    print(f"loading and composing: {100 * loading:.2f} % of the update (goal: under 3 %)", flush=True)
    return [{"table": "step", "parameters": count, "seconds": seconds, "loading": loading}]


def show_lengths(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    print(f"\nMemory of an update of one row, {options.few_layers} layers, above weights and optimizer state")
    rows = []
    for length in (options.length, 8 * options.length):
        write_cache(folder / f"length-{length}", 2, length)
        found = {
            way: child("step", way, folder / f"length-{length}", options.few_layers)["extra"] / 1e6
            for way in ("ours", "plain")
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
    parser.add_argument("--cached", type=int, default=256, help="rows of the smaller cache")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="for one thread on a machine that others use too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor_time else time.perf_counter
    print(f"{options.threads} threads, {'processor' if options.processor_time else 'wall-clock'} time")
    with tempfile.TemporaryDirectory() as root:
        results = show_head(options, clock) + show_head_memory(options) + show_step(options, Path(root), clock)
        results += show_lengths(options, Path(root)) + show_cache(options, Path(root))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
