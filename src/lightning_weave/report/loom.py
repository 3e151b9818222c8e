"""The trajectories of the loom, packed so that the page can recompute targets with other weights."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.maths import RESIDUAL_FLOOR
from lightning_weave.report.kinds import Vocabulary
from lightning_weave.types import FinishReason


@dataclass(frozen=True)
class Thread:
    """One trajectory of the cache, possibly truncated, with the log-probabilities of trained students."""

    name: str
    prompt: str
    tokens: int  # of the whole response
    finish: FinishReason
    block: Block  # of this row alone
    students: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]  # logp_PC, mass_P on the candidates
    ruled: Mapping[str, Mapping[str, NDArray[np.bool_]]] = field(default_factory=dict)  # by anchor and rule: changed_P


@dataclass(frozen=True)
class Setting:
    """A composition that the reader can select; one with weights by tag is a setting for each."""

    name: str
    weights: Mapping[str, float]
    alpha: float
    policy: str = ""  # that is trained on it, if it has another name


def draw_rows(rows: int, count: int, seed: int) -> list[int]:
    """Choose trajectories by seed alone.

    >>> draw_rows(5, 9, seed=1)
    [0, 1, 2, 3, 4]
    """
    return sorted(np.random.default_rng(seed).permutation(rows)[:count].tolist())


def bytes_per_decision(candidates: int, anchors: int, students: int) -> int:
    """Count the bytes of one decision in the page: candidates and scores, as base64."""
    numbers = candidates * (2 + anchors + students) + 2 + students  # ids, behaviour, shifts, students; other, sampled
    return (4 * numbers + anchors * (candidates + 1)) * 4 // 3  # and a byte each for what is mapped and valid


def longest_that_fits(lengths: Sequence[int], decisions: int) -> int:
    """Find the length to truncate rows to, so that they hold at most `decisions` together.

    >>> longest_that_fits([3, 10, 10], 15)
    6
    """
    rest = decisions
    for index, length in enumerate(sorted(lengths)):
        longest = rest // (len(lengths) - index)
        if length > longest:
            return max(longest, 1)
        rest -= length
    return max(lengths, default=0)


def pack(
    threads: Sequence[Thread], anchors: Sequence[str], settings: Sequence[Setting], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Lay the trajectories out as flat arrays in base64; tokens are indices into one list of texts."""
    block = Block.joined([thread.block for thread in threads])
    ids_PC = block.candidates.ids.flat
    sampled_P = block.sampled_P
    ids, places = np.unique(np.concatenate([ids_PC.reshape(-1), sampled_P]), return_inverse=True)
    students = list(threads[0].students)
    return {
        "anchors": list(anchors),
        "settings": [
            {"name": setting.name, "policy": setting.policy or setting.name, "alpha": setting.alpha,
             "weights": [setting.weights.get(anchor, 0.0) for anchor in anchors]}
            for setting in settings
        ],
        "floor": RESIDUAL_FLOOR,
        "candidates": ids_PC.shape[1],
        "texts": [vocabulary.text(int(id)) for id in ids],
        "threads": [
            {"name": thread.name, "prompt": thread.prompt, "tokens": thread.tokens, "finish": thread.finish,
             "shown": len(thread.block.sampled_P)}
            for thread in threads
        ],
        "ids": _base64(places[: ids_PC.size], "<u4"),
        "sampled": _base64(places[ids_PC.size :], "<u4"),
        "logp": _base64(block.candidates.logp.flat, "<f4"),
        "other": _base64(block.candidates.other_logp.flat, "<f4"),
        "shifts": [_base64(r_PC, "<f4") for r_PC in block.r_KPC],
        "mapped": [_base64(mapped_PC, "u1") for mapped_PC in block.mapped_KPC],
        "valid": [_base64(valid_P, "u1") for valid_P in block.valid_KP],
        "rules": [_rules(threads, anchor) for anchor in anchors],
        "students": {name: _student(threads, name) for name in students},
    }  # fmt: skip


def _rules(threads: Sequence[Thread], anchor: str) -> list[dict[str, str]]:
    """The rules of an anchor, each with the decisions that it changes."""
    rules = threads[0].ruled.get(anchor, {})
    return [
        {"rule": rule, "changed": _base64(np.concatenate([thread.ruled[anchor][rule] for thread in threads]), "u1")}
        for rule in rules
    ]


def _student(threads: Sequence[Thread], name: str) -> dict[str, str]:
    logp_PC, mass_P = (np.concatenate([thread.students[name][part] for thread in threads]) for part in (0, 1))
    return {"logp": _base64(logp_PC, "<f4"), "mass": _base64(mass_P, "<f4")}


def _base64(values: NDArray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
