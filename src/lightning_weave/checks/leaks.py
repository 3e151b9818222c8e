"""What a context gives away: does one side of an anchor only copy what stands in its prompt?"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.reader import Cache
from lightning_weave.checks.findings import Finding, listed, percent, visible
from lightning_weave.checks.sample import ROWS, spread
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.types import Scores

CERTAIN = 0.99  # probability of the likeliest candidate at a decision that is made already
COPIED = 0.9  # share of certain decisions above which a response is copied
ADDED = 0.1  # that the context must have added to the other side's share
FEW = 0.01  # the share of decisions whose part of the shift is said


@dataclass(frozen=True)
class Leak:
    """How certain both sides are, and where the shift of the sampled tokens lies."""

    certain: tuple[float, float]  # post, pre: share of decisions
    nats: float  # summed size of the shift of the sampled tokens
    few: float  # part of it at the FEW decisions where it is largest
    tokens: list[tuple[str, float]]  # the tokens with the largest parts of it

    @property
    def is_copied(self) -> bool:
        return max(self.certain) >= COPIED and abs(self.certain[0] - self.certain[1]) >= ADDED


def judge_leak(steps: Steps, anchor: str) -> Finding | None:
    """Judge a scored anchor whose sides read different contexts; None for others."""
    post, pre = steps.scores_of(anchor)
    contexts = [steps.side(anchor, "post").context, steps.side(anchor, "pre").context]
    if contexts[0] == contexts[1] or any(steps.store.stage(step).state() != "done" for step in (post, pre)):
        return None
    leak = find_leak(steps, anchor)
    words = [f"'{visible(text)}' {percent(share)}" for text, share in leak.tokens]
    text = (
        f"post is certain (99 %) at {percent(leak.certain[0])} of decisions, pre at {percent(leak.certain[1])}; of "
        f"{leak.nats:,.1f} nats of shift on sampled tokens {percent(leak.few)} are at one decision in a hundred, by "
        f"token: {listed(words, most=4)}"
    )
    figures = {"post": leak.certain[0], "pre": leak.certain[1], "nats": leak.nats, "few": leak.few}
    if leak.is_copied:
        text += ". One side nearly copies its context, so its shift teaches that text: say less in it"
    return Finding(f"anchors.{anchor}", "leak", "warning" if leak.is_copied else "note", text, figures)


def find_leak(steps: Steps, anchor: str) -> Leak:
    """Measure an anchor on up to 256 cached trajectories."""
    pair = anchor_pair(steps, anchor)
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair])
    rows = spread(len(cache), ROWS)
    block = cache.block(rows)
    sampled_PC = (block.candidates.ids.flat == block.sampled_P[:, None]) & block.valid_KP[0][:, None]
    size_P = np.abs(np.where(sampled_PC, block.r_KPC[0], 0)).sum(axis=1)
    nats = float(size_P.sum())
    largest = np.sort(size_P)[::-1][: max(1, round(FEW * len(size_P)))]
    by_token: Counter[int] = Counter()
    for token, size in zip(block.sampled_P.tolist(), size_P.tolist(), strict=True):
        by_token[token] += size
    scale = nats or 1.0
    tokenizer = steps.student.tokenizer
    tokens = [(tokenizer.decode([token]), size / scale) for token, size in by_token.most_common(4)]
    post, pre = (_certain(cache, stage, rows) for stage in pair.stages)
    return Leak((post, pre), nats, float(largest.sum()) / scale, tokens)


def _certain(cache: Cache, stage: Stage, rows: list[int]) -> float:
    """The share of decisions at which a side gives one candidate nearly everything."""
    best: list[NDArray[np.float32]] = []
    for shard, place in map(cache.rows.find, rows):
        scores = stage.open(Scores, shard).read(place, place + 1)
        best.append(np.where(scores.mapped.flat, scores.logp.flat, -np.inf).max(axis=1))
    return float((np.concatenate(best) >= np.log(CERTAIN)).mean()) if best else 0.0
