"""How evenly an update's rows are dealt to ranks: simulated, from lengths alone.

    python benchmarks/balance.py [--updates 50] [--width 2560]

Ranks run their micro-batches side by side, and at each of them all wait for the slowest. "lost" is the share of all
ranks' time spent on padding and waiting; "slowest" is the cost of the slowest rank over the mean, "at best" its lower
bound: one row is never shared by two ranks. The paper says only where its responses are cut off; the
distributions below are ours.
"""

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_weave.train.schedule import deal_rows, row_cost

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


def short(rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Log-normal responses with median 900 and sigma 0.7, cut off at 2,048; prompts of 60 to 300 tokens."""
    return np.minimum(rng.lognormal(np.log(900), 0.7, rows), 2048).astype(int) + rng.integers(60, 300, rows)


def long(rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Evenly from 8,192 to 32,768 tokens on a logarithmic scale."""
    return np.exp(rng.uniform(np.log(8192), np.log(32768), rows)).astype(int)


def simulate(lengths: list[int], world: int, budget: int, width: int, packed: bool) -> tuple[float, float]:
    """Return the share of time that is lost, and the cost of the slowest rank over the mean."""
    ranks = deal_rows(lengths, world, budget, width=width, packed=packed)

    def cost(batch: list[int]) -> float:
        rows = [lengths[index] for index in batch]
        run = rows if packed else [max(rows, default=0)] * len(rows)
        return sum(row_cost(length, width) for length in run)

    costs = np.array([[cost(batch) for batch in share] for share in ranks])
    useful = sum(row_cost(length, width) for length in lengths)
    taken = costs.max(axis=0).sum() * world
    return 1 - useful / taken, costs.sum(axis=1).max() / costs.sum() * world


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--width", type=int, default=2560, help="of the student's layers (default: Qwen3-4B)")
    options = parser.parse_args()
    print(f"{options.updates} updates, width {options.width}; padded: dealt back and forth by length")
    print(f"{'lengths':>12} {'ranks':>5} {'rows':>5} | padded: lost | packed: lost  slowest  at best")
    distributions: list[tuple[str, Lengths, int]] = [("to 2k", short, 16384), ("8k to 32k", long, 32768)]
    for name, draw, budget in distributions:
        for world, rows in ((8, 64), (64, 64), (64, 256), (64, 1024)):
            rng = np.random.default_rng(0)
            drawn = [draw(rng, rows).tolist() for _ in range(options.updates)]
            padded = np.mean([simulate(each, world, budget, options.width, False)[0] for each in drawn])
            lost, slowest = np.mean([simulate(each, world, budget, options.width, True) for each in drawn], axis=0)
            costs = [[row_cost(length, options.width) for length in each] for each in drawn]
            best = np.mean([max(1.0, max(each) * world / sum(each)) for each in costs])
            print(f"{name:>12} {world:5} {rows:5} | {padded:12.1%} | {lost:12.1%} {slowest:8.3f} {best:8.3f}")


if __name__ == "__main__":
    main()
