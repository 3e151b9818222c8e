"""The trajectories of the loom, packed so that the page can recompute targets with other weights."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.checks.shifts import rule_effects
from lightning_weave.maths import RESIDUAL_FLOOR
from lightning_weave.models.scorer import Scorer, ScoreRow
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.report.cases import SEED
from lightning_weave.report.survey import Vocabulary, joint_weights
from lightning_weave.run import Run
from lightning_weave.stages.work import set_up
from lightning_weave.types import FINISH_REASONS, FinishReason

TRAJECTORIES = 40
TITLE = 60  # characters of a question in the menu
MEGABYTES = 2.0  # of cached scores that the page embeds


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


def loom_data(
    run: Run, cache: Cache, vocabulary: Vocabulary, start: str | None, progress: Progress
) -> dict[str, Any] | None:
    """Pack the trajectories that the seed chooses, with as many decisions of each as fit into MEGABYTES.

    Compositions whose alpha is not known are left out: for a KL budget, training has to solve it first.
    """
    recipe = run.recipe
    settings = [
        {
            "name": name,
            "policy": policy,
            "alpha": alpha,
            "weights": [weights.get(anchor, 0.0) for anchor in cache.names],
        }
        for name, weights in joint_weights(run, cache).items()
        if (alpha := run.alpha(policy := name.partition(" (")[0])) is not None
    ]
    rows = draw_rows(len(cache), TRAJECTORIES, SEED)
    whole = [block for block in map(cache.block, ([row] for row in rows)) if len(block.sampled_P)]
    if not whole or not settings or not cache.sources:
        return None
    students = [
        name
        for name, composition in recipe.compositions.items()
        if composition.method == "joint" and (recipe.report.students is None or name in recipe.report.students)
        if run.stage("train", name).complete
    ]
    # Per decision: ids, behaviour, shifts and students; other and sampled; a byte each for what is mapped and valid.
    candidates, anchors = recipe.reference.candidates, len(cache.sources)
    numbers = candidates * (2 + anchors + len(students)) + 2 + len(students)
    size = (4 * numbers + anchors * (candidates + 1)) * 4 // 3  # as base64
    longest = longest_that_fits([len(block.sampled_P) for block in whole], int(MEGABYTES * 1e6 / size))
    blocks = [block.first(longest) for block in whole]
    scores = {name: score_student(run, name, blocks, progress) for name in students}
    prompts = read_prompts(run.prompts_file) if run.prompts_file.exists() else []
    texts = [prompt.messages[-1]["content"] if prompt.messages else prompt.text for prompt in prompts]
    ends = zip(min(texts, default=""), max(texts, default=""), strict=False)
    shared = next((at for at, (one, two) in enumerate(ends) if one != two), 0)  # such as a format's instruction
    texts = [text[shared:] for text in texts] if shared > TITLE else texts
    threads = []
    for place, (full, block) in enumerate(zip(whole, blocks, strict=True)):
        rollouts = full.rollouts
        prompt = int(rollouts.prompt_R[0])
        name = " ".join(texts[prompt].split()) if prompt < len(texts) else f"prompt {prompt}"
        name = f"{name[:TITLE].rstrip()}…" if len(name) > TITLE else name
        ruled = {
            anchor: {
                f"{one.rule} = {one.value:g}": one.changed_P[: len(block.sampled_P)]
                for one in rule_effects(run, anchor, block.number_R.tolist())
            }
            for anchor in cache.names
        }
        threads.append(
            Thread(
                name=f"{name} · response {int(rollouts.response_R[0]) + 1}",
                prompt=str(run.student.tokenizer.decode(rollouts.prompt_ids[0])),
                tokens=len(full.sampled_P),
                finish=FINISH_REASONS[int(rollouts.finish_R[0])],
                block=block,
                students={name: scores[name][place] for name in students},
                ruled=ruled,
            )
        )
    first = next((setting for setting in settings if setting["policy"] == start), settings[-1])
    return {**pack(threads, cache.names, vocabulary), "settings": settings, "start": first["name"]}


def score_student(
    run: Run, name: str, blocks: Sequence[Block], progress: Progress
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Score the candidates of the loom under one trained student."""
    progress.say(f"report: scoring {len(blocks)} trajectories under {name}")
    student = run.policy(name)
    device = set_up(run)
    model = student.load(student.compute_dtype(run.recipe.engine_of("reference").dtype, device), device)
    rows = []
    for block in blocks:
        prompt_ids, ids_PC = block.rollouts.prompt_ids[0], block.candidates.ids.flat
        ids = np.concatenate([prompt_ids, block.sampled_P])
        positions_T = np.arange(len(prompt_ids) - 1, len(ids) - 1)
        rows.append(ScoreRow(ids, positions_T, ids_PC, np.ones(ids_PC.shape, np.bool_)))
    return Scorer.from_model(model, student.vocabulary, run.recipe.score.token_budget).score(rows)


def draw_rows(rows: int, count: int, seed: int) -> list[int]:
    """Choose trajectories by seed alone.

    >>> draw_rows(5, 9, seed=1)
    [0, 1, 2, 3, 4]
    """
    return sorted(np.random.default_rng(seed).permutation(rows)[:count].tolist())


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


def pack(threads: Sequence[Thread], anchors: Sequence[str], vocabulary: Vocabulary) -> dict[str, Any]:
    """Lay the trajectories out as flat arrays in base64; tokens are indices into one list of texts."""
    block = Block.concatenate([thread.block for thread in threads])
    ids_PC = block.candidates.ids.flat
    sampled_P = block.sampled_P
    ids, places = np.unique(np.concatenate([ids_PC.reshape(-1), sampled_P]), return_inverse=True)
    students = {
        name: {
            key: _base64(np.concatenate([thread.students[name][part] for thread in threads]), "<f4")
            for part, key in enumerate(("logp", "mass"))
        }
        for name in threads[0].students
    }
    rules = [
        [
            {"rule": rule, "changed": _base64(np.concatenate([one.ruled[anchor][rule] for one in threads]), "u1")}
            for rule in threads[0].ruled.get(anchor, {})
        ]
        for anchor in anchors
    ]
    return {
        "anchors": list(anchors),
        "floor": RESIDUAL_FLOOR,
        "candidates": ids_PC.shape[1],
        "texts": [vocabulary.spelling.text(int(id)) for id in ids],
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
        "rules": rules,
        "students": students,
    }  # fmt: skip


def _base64(values: NDArray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
