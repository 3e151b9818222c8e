"""What a run's cache shows: the loom, and what its anchors want and disagree on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.shifts import CachedShifts
from lightning_weave.errors import InputError
from lightning_weave.models.hf import Scorer, ScoreRow
from lightning_weave.models.load import load_model, load_tokenizer, stop_ids, vocabulary_size
from lightning_weave.progress import Progress
from lightning_weave.report.figures import BLUE, GREEN, GREY, ORANGE, PALETTE, VERMILION
from lightning_weave.report.kinds import KINDS, TokenKind, Vocabulary
from lightning_weave.report.loom import Setting, Thread, bytes_per_decision, draw_rows, longest_that_fits, pack
from lightning_weave.report.page import PairView, Push, Wishes
from lightning_weave.report.plots import grouped, stacked
from lightning_weave.report.survey import REASONS, ShardView, Survey
from lightning_weave.runs.machine import compute_dtype, set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines
from lightning_weave.types import FINISH_REASONS

REASON_WORDS = (
    "kept",
    "kept, some candidates without a shift",
    "masked: end of turn has no counterpart",
    "masked: a candidate is no single token",
    "masked: context beyond the anchor",
)
SMALLEST_PUSH = 0.05  # tokens per 1,000 decisions
REASON_COLOURS = dict(zip(REASON_WORDS, (BLUE, GREEN, VERMILION, ORANGE, GREY), strict=True))


@dataclass(frozen=True)
class _Row:
    """One trajectory that the loom will show."""

    name: str
    prompt_ids: NDArray[np.int32]
    tokens: int
    finish: int
    view: ShardView


def student_vocabulary(steps: Steps) -> Vocabulary:
    """The student's tokens as text."""
    tokenizer = load_tokenizer(steps.student_path, steps.recipe.student.trust_remote_code)
    return Vocabulary.of(tokenizer, stop_ids(steps.student_path, tokenizer))


def survey_cache(steps: Steps, cache: CachedShifts, vocabulary: Vocabulary, progress: Progress) -> Survey:
    """Read the whole cache once, a shard at a time."""
    survey = Survey(cache.names, _woven(steps, cache), vocabulary)
    with progress.bar("report: anchors", cache.rows.shards, "shard") as bar:
        for shard in range(cache.rows.shards):
            survey.add(cache.read(shard)[1])
            bar.advance()
    return survey


def pair_views(survey: Survey) -> list[PairView]:
    """How every two anchors get on."""
    return [
        PairView(one, two, sums.decisions, sums.agreement("sampled"), sums.agreement("top"), sums.correlation)
        for (one, two), sums in survey.pairs.items()
        if sums.decisions
    ]


def wishes(survey: Survey) -> list[Wishes]:
    """What every anchor wants more and less of."""
    views = []
    for anchor in survey.anchors:
        up, down = (_pushes(survey, anchor, found) for found in survey.wishes(anchor))
        views.append(Wishes(anchor, up, down))
    return views


def _pushes(survey: Survey, anchor: str, found: Sequence[tuple[int, float]]) -> list[Push]:
    """Per 1,000 decisions that the anchor can score; what would print as nothing is left out."""
    scored = int(survey.count_KJ[survey.anchors.index(anchor)].sum())
    most = max((abs(amount) for _, amount in found), default=1.0)
    pushes = [Push(survey.vocabulary.text(id), 1000 * amount / scored, abs(amount) / most) for id, amount in found]
    return [push for push in pushes if abs(push.amount) >= SMALLEST_PUSH]


def positions_figure(survey: Survey) -> Any:
    """Where the decisions went: kept or masked for each anchor by reason, and what each composition keeps."""
    rows: dict[str, dict[str, float]] = {}
    for anchor, counts in zip(survey.anchors, survey.reasons_KR, strict=True):
        rows[anchor] = dict(zip(REASON_WORDS, counts.tolist(), strict=True))
    colours = {**REASON_COLOURS, "masked by one of its anchors": "#9aa0a6"}
    for name, kept in survey.kept.items():  # compositions of the same anchors keep the same
        used = [anchor for anchor, weight in zip(survey.anchors, survey.compositions[name], strict=True) if weight]
        if len(used) > 1:
            rows[" + ".join(used)] = {"kept": kept, "masked by one of its anchors": survey.decisions - kept}
    assert len(REASON_WORDS) == len(REASONS)
    return stacked(rows, colours, "share of all decisions, %", shares=True)


def kinds_figure(survey: Survey) -> Any:
    """How hard each anchor pulls at each kind of token."""
    sizes = {anchor: survey.size_by_kind(anchor) for anchor in survey.anchors}
    kinds = [kind for kind in KINDS if any(kind in found for found in sizes.values())]
    rows: dict[str, dict[str, float]] = {
        _with_agreement(survey, kind): {anchor: found.get(kind, 0.0) for anchor, found in sizes.items()}
        for kind in kinds
    }
    colours = dict(zip(survey.anchors, (PALETTE * len(survey.anchors))[: len(survey.anchors)], strict=True))
    return grouped(rows, colours, "mean size of the pull on the sampled token, nats")


def _with_agreement(survey: Survey, kind: TokenKind) -> str:
    """Say beside a kind how often two anchors agree on it."""
    if len(survey.pairs) != 1:
        return kind
    share = next(iter(survey.pairs.values())).agreement_on(kind)
    return kind if math.isnan(share) else f"{kind}\nagree {100 * share:.0f} %"


def loom_data(
    steps: Steps, cache: CachedShifts, vocabulary: Vocabulary, start: str | None, progress: Progress
) -> dict[str, Any] | None:
    """Embed trajectories that the seed chose, as many decisions of each as there is room for."""
    section, settings = steps.recipe.report, _settings(steps, cache)
    numbers = draw_rows(len(cache.rows), section.trajectories, section.seed)
    if not numbers or not settings or not cache.anchors:
        return None
    students = _shown_students(steps)
    rows = [row for row in _read_rows(steps, cache, numbers, len(students)) if len(row.view.sampled_P)]
    if not rows:
        return None
    scores = {name: _score_student(steps, name, rows, progress) for name in students}
    tokenizer = load_tokenizer(steps.student_path, steps.recipe.student.trust_remote_code)
    threads = [
        Thread(
            name=row.name,
            prompt=str(tokenizer.decode(row.prompt_ids)),
            tokens=row.tokens,
            finish=FINISH_REASONS[row.finish],
            view=row.view,
            students={name: scores[name][place] for name in students},
        )
        for place, row in enumerate(rows)
    ]
    names = [setting.name for setting in settings]
    return {**pack(threads, cache.names, settings, vocabulary), "start": start if start in names else names[-1]}


def _woven(steps: Steps, cache: CachedShifts) -> dict[str, dict[str, float]]:
    """The weights of the compositions that weave cached shifts, where all their anchors are there."""
    return {
        name: composition.weights
        for name, composition in steps.recipe.compositions.items()
        if composition.method == "joint" and composition.used.keys() <= set(cache.names)
    }


def _settings(steps: Steps, cache: CachedShifts) -> list[Setting]:
    """Those of them whose alpha is known: training solves it where the recipe gives a KL budget."""
    return [
        Setting(name, weights, alpha)
        for name, weights in _woven(steps, cache).items()
        if (alpha := steps.alpha(name)) is not None
    ]


def check_students(steps: Steps) -> None:
    """Refuse a student that the recipe does not have."""
    known = list(steps.recipe.compositions)
    if unknown := sorted(set(steps.recipe.report.students or ()) - set(known)):
        raise InputError(f"report.students names {unknown[0]!r}; this recipe has {', '.join(known) or 'none'}")


def _shown_students(steps: Steps) -> list[str]:
    wanted = steps.recipe.report.students
    woven = [name for name, composition in steps.recipe.compositions.items() if composition.method == "joint"]
    names = woven if wanted is None else [name for name in woven if name in wanted]
    return [name for name in names if steps.store.stage(steps.train(name)).state() == "done"]


def _read_rows(steps: Steps, cache: CachedShifts, numbers: Sequence[int], students: int) -> list[_Row]:
    """Read the chosen rows and cut them to what the page has room for."""
    found = [cache.rows.find(number) for number in numbers]
    lengths = [len(cache.read(shard, place, place + 1)[1].sampled_P) for shard, place in found]
    candidates = steps.recipe.reference.candidates
    room = int(steps.recipe.report.megabytes * 1e6 / bytes_per_decision(candidates, len(cache.anchors), students))
    longest = longest_that_fits(lengths, room)
    names = _prompt_names(steps)
    rows = []
    for shard, place in found:
        rollouts, view = cache.read(shard, place, place + 1)
        prompt, response = int(rollouts.prompt_R[0]), int(rollouts.response_R[0])
        name = f"{names.get(prompt, f'prompt {prompt}')}, response {response + 1}"
        cut = next(iter(view.chunks(longest)), view)
        rows.append(_Row(name, rollouts.prompt_ids[0], len(view.sampled_P), int(rollouts.finish_R[0]), cut))
    return rows


def _prompt_names(steps: Steps) -> dict[int, str]:
    path = steps.store.run_dir / "prompts" / "prompts.jsonl"
    return {number: str(line.get("id", number)) for number, line in enumerate(read_lines(path))}


def _score_student(
    steps: Steps, name: str, rows: Sequence[_Row], progress: Progress
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Ask one trained student for its log-probs of the candidates that the loom shows."""
    progress.say(f"report: {name} reads {len(rows)} trajectories")
    path = steps.store.stage(steps.train(name)).folder / "final"
    device = set_up(steps.recipe, steps.store)
    trust = steps.recipe.student.trust_remote_code
    dtype = compute_dtype(steps.recipe.reference.dtype, path, device)
    model = load_model(path, dtype=dtype, device=device, trust_remote_code=trust)
    scorer = Scorer(model, vocabulary_size(load_tokenizer(path, trust)), steps.recipe.reference.token_budget)
    return scorer.score([_as_score_row(row) for row in rows])


def _as_score_row(row: _Row) -> ScoreRow:
    ids = np.concatenate([row.prompt_ids, row.view.sampled_P])
    positions_T = np.arange(len(row.prompt_ids) - 1, len(ids) - 1)
    return ScoreRow(ids, positions_T, row.view.ids_PC, np.ones(row.view.ids_PC.shape, np.bool_))
