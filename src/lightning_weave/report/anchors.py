"""What a run's cache shows: the loom, the tokens that its anchors push, and where they disagree."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.errors import InputError
from lightning_weave.models.hf import ScoreRow, hf_scorer
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.report.colours import Hues, part_hues
from lightning_weave.report.kinds import KINDS, TokenKind, Vocabulary
from lightning_weave.report.loom import Setting, Thread, bytes_per_decision, draw_rows, longest_that_fits, pack
from lightning_weave.report.page import AnchorPushes, PairView, Push
from lightning_weave.report.plots import grouped, stacked
from lightning_weave.report.reading import Reading
from lightning_weave.report.survey import REASONS, Survey
from lightning_weave.runs.hygiene import rule_effects, touched
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.types import FINISH_REASONS, Rollouts

RULE_ROWS = 256  # on which the effect of a rule is measured
SMALLEST_PUSH = 0.05  # tokens per 1,000 decisions
SHARED = "masked by one of its anchors"


def student_vocabulary(steps: Steps) -> Vocabulary:
    """The student's tokens as text."""
    return Vocabulary.of(steps.student.tokenizer, steps.student.stop_ids)


def survey_cache(steps: Steps, cache: Cache, vocabulary: Vocabulary, progress: Progress) -> Survey:
    """Read the whole cache once, a shard at a time."""
    readings = {anchor: Reading.of(steps, anchor) for anchor in cache.names}
    survey = Survey(cache.names, _joint_weights(steps, cache), vocabulary, readings)
    with progress.bar("report: anchors", cache.rows.shards, "shard") as bar:
        for shard in range(cache.rows.shards):
            survey.add(cache.block(cache.shard_rows(shard)))
            bar.advance()
    return survey


def rule_notes(steps: Steps, cache: Cache | None) -> list[str]:
    """Say what the rules of the anchors' shifts change, on some rows of the cache."""
    if cache is None:
        return []
    rows = range(0, len(cache), max(1, len(cache) // RULE_ROWS))
    return [f"anchors.{name}: {effect}" for name in cache.names for effect in rule_effects(steps, name, rows)]


def pair_views(survey: Survey) -> list[PairView]:
    """Measure the agreement of every two anchors."""
    return [
        PairView(
            *names,
            decisions=sums.decisions,
            sampled=sums.agreement("sampled"),
            top=sums.agreement("top"),
            correlation=sums.correlation,
        )
        for names, sums in survey.pairs.items()
        if sums.decisions
    ]


def anchor_pushes(survey: Survey) -> list[AnchorPushes]:
    """List the tokens that every anchor pushes up and down most."""
    return [
        AnchorPushes(anchor, *(_pushes(survey, anchor, tokens) for tokens in survey.largest_pushes(anchor)))
        for anchor in survey.anchors
    ]


def _pushes(survey: Survey, anchor: str, tokens: Sequence[tuple[int, float]]) -> list[Push]:
    """Scale to 1,000 decisions that the anchor can score, and leave out what would print as 0.0."""
    scored = int(survey.count_KJ[survey.anchors.index(anchor)].sum())
    most = max((abs(amount) for _, amount in tokens), default=1.0)
    pushes = [Push(survey.vocabulary.text(id), 1000 * amount / scored, abs(amount) / most) for id, amount in tokens]
    return [push for push in pushes if abs(push.amount) >= SMALLEST_PUSH]


def positions_figure(survey: Survey) -> Any:
    """Draw the decisions kept and masked: by anchor and reason, and by the anchors of each composition."""
    rows: dict[str, dict[str, float]] = {}
    for anchor, counts in zip(survey.anchors, survey.reasons_KR, strict=True):
        rows[anchor] = dict(zip(REASONS, counts.tolist(), strict=True))
    for name, kept in survey.kept.items():  # compositions of the same anchors have the same mask
        used = [anchor for anchor, weight in zip(survey.anchors, survey.compositions[name], strict=True) if weight]
        if len(used) > 1:
            rows[" + ".join(used)] = {"kept": kept, SHARED: survey.decisions - kept}
    categories = [part for part in (*REASONS, SHARED) if any(parts.get(part) for parts in rows.values())]
    hues = part_hues(categories)
    seen = {name: {part: count for part, count in parts.items() if count} for name, parts in rows.items()}
    return stacked(seen, hues, "share of all decisions, %", shares=True)


def kinds_figure(survey: Survey, hues: Hues) -> Any:
    """Draw the mean size of each anchor's pull by kind of token."""
    sizes = {anchor: survey.size_by_kind(anchor) for anchor in survey.anchors}
    rows: dict[str, dict[str, float]] = {
        _with_agreement(survey, kind): {anchor: by_kind.get(kind, 0.0) for anchor, by_kind in sizes.items()}
        for kind in KINDS
        if any(kind in by_kind for by_kind in sizes.values())
    }
    return grouped(rows, _anchor_hues(survey, hues), "mean size of the pull, nats")


def _anchor_hues(survey: Survey, hues: Hues) -> Hues:
    """An anchor has the colour of the policy that it alone makes, if there is one."""
    parts = part_hues(survey.anchors)
    return {anchor: hues.get(_alone(survey, anchor), parts[anchor]) for anchor in survey.anchors}


def _alone(survey: Survey, anchor: str) -> str:
    place = survey.anchors.index(anchor)
    alone = (
        name for name, weights in survey.compositions.items() if [k for k, w in enumerate(weights) if w] == [place]
    )
    return next(alone, "")


def _with_agreement(survey: Survey, kind: TokenKind) -> str:
    """Name a kind of token and, if there are two anchors, how often they agree on it."""
    if len(survey.pairs) != 1:
        return kind
    share = next(iter(survey.pairs.values())).agreement_on(kind)
    return kind if math.isnan(share) else f"{kind}\nagree {100 * share:.0f} %"


def loom_data(
    steps: Steps, cache: Cache, vocabulary: Vocabulary, start: str | None, progress: Progress
) -> dict[str, Any] | None:
    """Pack the trajectories that the seed chooses, with as many decisions of each as fit."""
    section = steps.recipe.report
    settings = _settings(steps, cache)
    numbers = draw_rows(len(cache), section.trajectories, section.seed)
    if not numbers or not settings or not cache.sources:
        return None
    students = _shown_students(steps)
    whole = [block for block in map(cache.block, ([number] for number in numbers)) if len(block.sampled_P)]
    if not whole:
        return None
    blocks = _cut(steps, whole, len(cache.sources), len(students))
    scores = {name: _score_student(steps, name, blocks, progress) for name in students}
    prompts = [prompt.id for prompt in read_prompts(steps.prompts_file)] if steps.prompts_file.exists() else []
    threads = [
        Thread(
            name=_row_name(full.rollouts, prompts),
            prompt=str(steps.student.tokenizer.decode(full.rollouts.prompt_ids[0])),
            tokens=len(full.sampled_P),
            finish=FINISH_REASONS[int(full.rollouts.finish_R[0])],
            block=block,
            students={name: scores[name][place] for name in students},
            ruled={name: _ruled(steps, name, block) for name in cache.names},
        )
        for place, (full, block) in enumerate(zip(whole, blocks, strict=True))
    ]
    first = next((setting for setting in settings if setting.policy == start), settings[-1])
    return {**pack(threads, cache.names, settings, vocabulary), "start": first.name}


def _ruled(steps: Steps, anchor: str, block: Block) -> dict[str, NDArray[np.bool_]]:
    """Which of the first decisions of a row the rules of an anchor change."""
    changed = touched(steps, anchor, block.number_R.tolist())
    return {rule: changed_P[: len(block.sampled_P)] for rule, changed_P in changed.items()}


def _row_name(rollouts: Rollouts, prompts: Sequence[str]) -> str:
    prompt = int(rollouts.prompt_R[0])
    name = prompts[prompt] if prompt < len(prompts) else f"prompt {prompt}"
    return f"{name}, response {int(rollouts.response_R[0]) + 1}"


def _cut(steps: Steps, blocks: Sequence[Block], anchors: int, students: int) -> list[Block]:
    """Truncate rows so that they fit into report.megabytes."""
    size = bytes_per_decision(steps.recipe.reference.candidates, anchors, students)
    decisions = int(steps.recipe.report.megabytes * 1e6 / size)
    longest = longest_that_fits([len(block.sampled_P) for block in blocks], decisions)
    return [block.first(longest) for block in blocks]


def _joint_weights(steps: Steps, cache: Cache) -> dict[str, dict[str, float]]:
    """The weights of the joint compositions whose anchors are all in the cache, those by tag each for itself."""
    return {
        f"{name} ({tag})" if tag else name: weights
        for name, composition in steps.recipe.compositions.items()
        if composition.method == "joint" and composition.used.keys() <= set(cache.names)
        for tag, weights in (composition.by_tag or {"": composition.weights}).items()
    }


def _settings(steps: Steps, cache: Cache) -> list[Setting]:
    """The joint compositions whose alpha is known: for a KL budget, training has to solve it first."""
    return [
        Setting(name, weights, alpha, policy)
        for name, weights in _joint_weights(steps, cache).items()
        if (alpha := steps.alpha(policy := name.partition(" (")[0])) is not None
    ]


def check_students(steps: Steps) -> None:
    """Refuse students that the recipe does not have."""
    names = list(steps.recipe.compositions)
    if unknown := sorted(set(steps.recipe.report.students or ()) - set(names)):
        raise InputError(f"report.students names {unknown[0]!r}; this recipe has {', '.join(names) or 'none'}")


def _shown_students(steps: Steps) -> list[str]:
    students = steps.recipe.report.students
    return [
        name
        for name, composition in steps.recipe.compositions.items()
        if composition.method == "joint" and (students is None or name in students)
        if steps.store.stage(steps.train(name)).state() == "done"
    ]


def _score_student(
    steps: Steps, name: str, blocks: Sequence[Block], progress: Progress
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Score the candidates of the loom under one trained student."""
    progress.say(f"report: scoring {len(blocks)} trajectories under {name}")
    student = steps.policy(name)
    device = set_up(steps.recipe, steps.store)
    model = student.load(student.compute_dtype(steps.recipe.reference.dtype, device), device)
    scorer = hf_scorer(model, student.vocabulary, steps.recipe.reference.token_budget)
    return scorer.score([_as_score_row(block) for block in blocks])


def _as_score_row(block: Block) -> ScoreRow:
    prompt_ids = block.rollouts.prompt_ids[0]
    ids_PC = block.candidates.ids.flat
    ids = np.concatenate([prompt_ids, block.sampled_P])
    positions_T = np.arange(len(prompt_ids) - 1, len(ids) - 1)
    return ScoreRow(ids, positions_T, ids_PC, np.ones(ids_PC.shape, np.bool_))
