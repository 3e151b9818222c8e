"""The cache on the page: masked positions, agreement, the tokens that each anchor pushes; trajectories of the loom.

Statistics are sums over shards, so memory does not grow with the cache. The loom has the trajectories that a seed
chooses, packed so that the page can recompute targets with other weights.

A *pull* is a shift minus its mean under the behaviour policy, r(a) - E_b[r]: its sign says whether the target raises or
lowers the token's probability to first order, whatever constant the shift includes (corollary permutation-scale).
"""

import base64
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pandas import DataFrame
from torch.nn.functional import pad

from lightning_weave.cache.block import Block, Cache
from lightning_weave.checks.pairs import open_alignment
from lightning_weave.checks.shifts import rule_effects
from lightning_weave.errors import InputError
from lightning_weave.maths import RESIDUAL_FLOOR, shift_covariance, with_other
from lightning_weave.models.scorer import Scorer, ScoreRow
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.report.cases import SEED
from lightning_weave.run import ROLES, Run
from lightning_weave.stages.alignment import Alignment, Unread
from lightning_weave.stages.forecast import ForecastPoint
from lightning_weave.stages.work import set_up
from lightning_weave.tokens.spelling import Origin, Spelling
from lightning_weave.types import FINISH_REASONS

TokenKind = Literal["digits", "words", "punctuation", "whitespace", "end of thinking", "end of sequence", "special"]
KINDS: tuple[TokenKind, ...] = get_args(TokenKind)


@dataclass(frozen=True)
class Vocabulary:
    """The student's tokens as text."""

    spelling: Spelling
    stop_ids: frozenset[int]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, stop_ids: Iterable[int]) -> "Vocabulary":
        return cls(Spelling.from_tokenizer(tokenizer), frozenset(stop_ids))

    def kind(self, id: int) -> TokenKind:
        """Classify a token."""
        if id in self.stop_ids:
            return "end of sequence"
        bare = self.spelling.text(id).strip()
        if bare == "</think>":
            return "end of thinking"
        if self.spelling.origins.get(id) == Origin.CONTROL:
            return "special"
        if not bare:
            return "whitespace"
        if any(char.isalpha() for char in bare):
            return "words"
        return "digits" if any(char.isdigit() for char in bare) else "punctuation"


TOKENS = ("sampled", "top")  # on which two anchors are compared
CHUNK = 16_384  # decisions held as tensors at once
SMALLEST_PUSH = 0.05  # tokens per 1,000 decisions
TRAJECTORIES = 40  # of the loom
TITLE = 60  # characters of a question in its menu
MEGABYTES = 2.0  # of cached scores that the page embeds
KEPT = "kept"
PARTLY_KEPT = "kept, some candidates without a shift"
NO_END_OF_TURN = "masked: no matching end of turn"
NOT_ONE_TOKEN = "masked: a candidate is not a single token"
SILENT = "silent: outside of the anchor's where"
BY_RULE = "masked: by a rule of the anchor"
UNTRAINED = "masked: untrained in the pre-anchor"
NOT_WRITTEN = "masked: not written by the student"
UNREAD = {  # where no candidate is mapped: because it is not read there, or else for its candidates
    Unread.TOO_LONG: "masked: beyond the anchor's context",
    Unread.NOT_SPELT: "masked: after a token that the anchor cannot spell",
    Unread.NO_COLUMN: "masked: a column of the context is missing",
    Unread.UNKNOWN: "masked: no candidate is a token, or not readable",
}
TOO_LONG, *OTHERS = UNREAD.values()
REASONS = (KEPT, PARTLY_KEPT, SILENT, NO_END_OF_TURN, NOT_ONE_TOKEN, TOO_LONG, BY_RULE, UNTRAINED, *OTHERS, NOT_WRITTEN)


@dataclass(frozen=True)
class Reading:
    """How both sides of one anchor read the trajectories of a run; empty if their tokenizers are not available."""

    sides: tuple[Alignment, ...] = ()  # none: its models are gone
    untrained: Sequence[int] = ()  # tokens of the student that stand for an untrained one of pre

    @classmethod
    def from_run(cls, run: Run, anchor: str) -> "Reading":
        """Open the tokenizers of an anchor, if they are still there."""
        try:
            sides = tuple(open_alignment(run, anchor, role, cached=True) for role in ROLES)
        except InputError:
            return cls()
        untrained: list[int] = []
        ids_V = torch.arange(run.student.vocabulary)
        for side in sides:
            anchor_ids, mapped_V = side.tokens.candidate_map(ids_V)
            untrained += ids_V[mapped_V & torch.isin(anchor_ids, torch.tensor([*side.masked_ids]))].tolist()
        return cls(sides, untrained)

    def why_masked(self, block: Block, anchor: int, stops: Collection[int]) -> NDArray[np.str_]:
        """Give each position of a block one of REASONS, for the anchor of this number in the block."""
        ids_PC = block.candidates.ids.flat
        mapped_PC, valid_P = block.mapped_KPC[anchor], block.valid_KP[anchor]
        whole_P, none_P = mapped_PC.all(axis=1), ~mapped_PC.any(axis=1)
        # Why neither side, or only one, can read that far: asked of rows with a position that has no candidate.
        unread_P = np.full(len(none_P), Unread.READ if self.sides else Unread.UNKNOWN, np.int64)
        rollouts = block.rollouts
        for row, places in enumerate(map(slice, rollouts.response_ids.offsets, rollouts.response_ids.offsets[1:])):
            if self.sides and none_P[places].any():
                trajectory = (int(rollouts.prompt_R[row]), rollouts.prompt_ids[row], rollouts.response_ids[row])
                unread_P[places] = np.max([side.unread(*trajectory) for side in self.sides], axis=0)
        reasons = {
            KEPT: valid_P & whole_P,
            SILENT: valid_P & none_P,
            PARTLY_KEPT: valid_P,
            NOT_WRITTEN: ~block.decided_P,
            BY_RULE: whole_P,
            **{reason: none_P & (unread_P == unread) for unread, reason in UNREAD.items()},
            UNTRAINED: (mapped_PC | np.isin(ids_PC, list(self.untrained))).all(axis=1),
            NO_END_OF_TURN: (mapped_PC | np.isin(ids_PC, list(stops))).all(axis=1),
        }
        return np.select(list(reasons.values()), list(reasons), NOT_ONE_TOKEN)  # the first that is true


@dataclass
class PairSums:
    """Sums over the decisions that two anchors can both score; of the sampled and the most likely token, by kind."""

    decisions: int = 0
    covariance: float = 0.0
    variances: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    agreed: NDArray[np.int64] = field(default_factory=lambda: np.zeros((len(TOKENS), len(KINDS)), np.int64))
    compared: NDArray[np.int64] = field(default_factory=lambda: np.zeros((len(TOKENS), len(KINDS)), np.int64))

    @property
    def correlation(self) -> float:
        """Pool Cov_b over decisions: 1 = same direction, 0 = unrelated, -1 = opposite."""
        scale = float(self.variances.prod()) ** 0.5
        return self.covariance / scale if scale > 0 else float("nan")

    def agreement(self, token: str, kind: TokenKind | None = None) -> float:
        """The share of sampled or top tokens, of this kind or all, that both pull in the same direction."""
        where = TOKENS.index(token), slice(None) if kind is None else KINDS.index(kind)
        compared = self.compared[where].sum()
        return float(self.agreed[where].sum() / compared) if compared else float("nan")


class Survey:
    """Sums over the cache, shard by shard."""

    def __init__(
        self,
        anchors: Sequence[str],
        compositions: Mapping[str, Mapping[str, float]],
        vocabulary: Vocabulary,
        readings: Mapping[str, Reading] | None = None,
    ) -> None:
        self.anchors = tuple(anchors)
        self.readings = readings or {}
        self.compositions = {name: [weights.get(a, 0.0) for a in anchors] for name, weights in compositions.items()}
        self.vocabulary = vocabulary
        size = max(vocabulary.spelling.strings, default=-1) + 1
        self._kind_V = np.array([KINDS.index(vocabulary.kind(id)) for id in range(size)], dtype=np.int64)
        self._stops = np.array(sorted(vocabulary.stop_ids), dtype=np.int64)
        self.decisions = 0
        self.reasons: list[Counter[str]] = [Counter() for _ in self.anchors]
        self.kept = dict.fromkeys(self.compositions, 0)
        self.push_KV = np.zeros((len(self.anchors), size))
        self.size_KJ = np.zeros((len(self.anchors), len(KINDS)))  # summed |pull| on the sampled token, by kind
        self.count_KJ = np.zeros((len(self.anchors), len(KINDS)), np.int64)
        self.pairs = {(one, two): PairSums() for n, one in enumerate(self.anchors) for two in self.anchors[n + 1 :]}

    def add(self, block: Block) -> None:
        """Add some rows."""
        for chunk in block.chunks(CHUNK):
            if len(chunk.sampled_P):
                self._add_chunk(chunk)

    def _add_chunk(self, chunk: Block) -> None:
        self.decisions += int(chunk.decided_P.sum())
        ids_PC, kind_P = chunk.candidates.ids.flat, self._kind_V[chunk.sampled_P]
        speaks_KP = chunk.valid_KP & chunk.mapped_KPC.any(axis=2)
        valid_KP = torch.from_numpy(speaks_KP)
        for name, weights in self.compositions.items():
            self.kept[name] += int(chunk.kept(weights).sum())
        log_b_PO = with_other(
            torch.tensor(chunk.candidates.logp.flat), torch.tensor(chunk.candidates.other_logp.flat)
        ).double()
        b_PO = torch.softmax(log_b_PO, dim=-1)
        r_KPC = torch.tensor(np.where(chunk.valid_KP[..., None], chunk.r_KPC, 0.0)).double()
        r_KPO = pad(r_KPC, (0, 1))  # `other` has shift 0
        pull_KPO = r_KPO - (b_PO * r_KPO).sum(dim=-1, keepdim=True)
        # The pull on the sampled token, or on `other` if it is not a candidate, and on the most likely candidate.
        is_sampled_PC = torch.from_numpy(ids_PC == chunk.sampled_P[:, None])
        sampled_P = torch.where(is_sampled_PC.any(dim=1), is_sampled_PC.int().argmax(dim=1), ids_PC.shape[1])
        places_2P = torch.stack([sampled_P, log_b_PO[:, :-1].argmax(dim=-1)])
        pull_2KP = pull_KPO[:, torch.arange(len(kind_P)), places_2P].transpose(0, 1)

        for k, (anchor, valid_P) in enumerate(zip(self.anchors, speaks_KP, strict=True)):
            reasons_P = self.readings.get(anchor, Reading()).why_masked(chunk, k, self._stops)
            self.reasons[k].update(reasons_P[chunk.decided_P].tolist())
            # b(a) (r(a) - E_b[r]): the change in the expected count of each token, per unit of weight / alpha.
            moved_PC = (b_PO * pull_KPO[k])[:, :-1].numpy()
            np.add.at(self.push_KV[k], ids_PC[valid_P].reshape(-1), moved_PC[valid_P].reshape(-1))
            np.add.at(self.size_KJ[k], kind_P[valid_P], pull_2KP[0, k].abs().numpy()[valid_P])
            np.add.at(self.count_KJ[k], kind_P[valid_P], 1)

        for names, sums in self.pairs.items():
            pair = [self.anchors.index(name) for name in names]
            both_P = valid_KP[pair].all(dim=0)
            log_b_NO, (u_NC, v_NC) = log_b_PO[both_P], r_KPC[pair][:, both_P]
            sums.decisions += int(both_P.sum())
            sums.covariance += shift_covariance(log_b_NO, u_NC, v_NC).sum().item()
            sums.variances += [shift_covariance(log_b_NO, r_NC, r_NC).sum().item() for r_NC in (u_NC, v_NC)]
            for place, (one_P, two_P) in enumerate(pull_2KP[:, pair]):
                decided_P = both_P & (one_P != 0) & (two_P != 0)
                same_P = decided_P & ((one_P > 0) == (two_P > 0))
                sums.compared[place] += np.bincount(kind_P[decided_P.numpy()], minlength=len(KINDS))
                sums.agreed[place] += np.bincount(kind_P[same_P.numpy()], minlength=len(KINDS))

    def size_by_kind(self, anchor: str) -> dict[TokenKind, float]:
        """Mean size of an anchor's pull on the sampled token, in nats, for the kinds that occur."""
        k = self.anchors.index(anchor)
        counts = self.count_KJ[k]
        return {kind: float(self.size_KJ[k, j] / counts[j]) for j, kind in enumerate(KINDS) if counts[j]}

    def pushes(self, most: int = 10) -> DataFrame:
        """The tokens that every anchor pushes up and down most.

        `amount` is the change in the expected count per 1,000 decisions that the anchor can score and per unit of
        weight / alpha, `share` is relative to the largest of its list. What would print as 0.0 is left out.
        """
        rows = []
        for anchor, push_V, count_J in zip(self.anchors, self.push_KV, self.count_KJ, strict=True):
            order = np.argsort(push_V, kind="stable")
            for side, ids, sign in (("up", order[::-1][:most], 1), ("down", order[:most], -1)):
                largest = abs(push_V[ids[0]])
                for id in ids[sign * push_V[ids] > 0].tolist():
                    amount = 1000 * push_V[id] / count_J.sum()
                    if abs(amount) >= SMALLEST_PUSH:
                        rows.append(
                            (anchor, side, self.vocabulary.spelling.text(id), amount, abs(push_V[id]) / largest)
                        )
        return DataFrame(rows, columns=["anchor", "side", "text", "amount", "share"])

    def agreement(self) -> DataFrame:
        """How far every two anchors agree: on the sampled and the most likely token, and their correlation."""
        rows = [
            (*names, sums.agreement("sampled"), sums.agreement("top"), sums.correlation, sums.decisions)
            for names, sums in self.pairs.items()
            if sums.decisions
        ]
        return DataFrame(rows, columns=["one", "two", "sampled", "top", "correlation", "decisions"])


def survey_cache(run: Run, cache: Cache, vocabulary: Vocabulary, progress: Progress) -> Survey:
    """Read the whole cache once, a shard at a time."""
    readings = {anchor: Reading.from_run(run, anchor) for anchor in cache.names}
    survey = Survey(cache.names, joint_weights(run, cache), vocabulary, readings)
    with progress.bar("report: anchors", cache.rows.shards, "shard") as bar:
        for shard in range(cache.rows.shards):
            survey.add(cache.block(cache.shard_rows(shard)))
            bar.advance()
    return survey


def joint_weights(run: Run, cache: Cache) -> dict[str, dict[str, float]]:
    """The weights of the joint compositions whose anchors are all in the cache, those by tag separately."""
    return {
        f"{name} ({tag})" if tag else name: weights
        for name, composition in run.recipe.written.items()
        if composition.method == "joint" and not composition.is_placebo and not run.recipe.budgets(name)
        if composition.used.keys() <= set(cache.names)
        for tag, weights in (composition.by_tag or {"": composition.weights}).items()
    }


def loom_data(
    run: Run, cache: Cache, vocabulary: Vocabulary, start: str | None, progress: Progress
) -> dict[str, Any] | None:
    """Pack the trajectories that the seed chooses, with as many decisions of each as fit into MEGABYTES.

    Compositions whose alpha is not known are left out: for a KL budget, training has to solve it first. So are those
    whose anchors have budgets: their weights differ by tag, which a slider cannot show.
    """
    recipe = run.recipe
    settings: list[dict[str, Any]] = []
    for name, weights in joint_weights(run, cache).items():
        policy = name.partition(" (")[0]
        slots = recipe.compositions[policy].slots  # the first is the plain prompt
        if (alpha := slots[0].alpha if slots else run.alpha(policy)) is not None:
            of_anchor = [weights.get(anchor, 0.0) for anchor in cache.names]
            settings.append({"name": name, "policy": policy, "alpha": alpha, "weights": of_anchor})
    rows = draw_rows(len(cache), TRAJECTORIES, SEED)
    whole = [block for block in map(cache.block, ([row] for row in rows)) if len(block.sampled_P)]
    if not whole or not settings or not cache.sources:
        return None
    students = [
        name
        for name, composition in recipe.written.items()
        if composition.method == "joint" and not composition.is_placebo
        if (recipe.report.students is None or name in recipe.report.students)
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
    rules: dict[str, dict[str, list[NDArray[np.bool_]]]] = {anchor: {} for anchor in cache.names}
    for full, block in zip(whole, blocks, strict=True):
        rollouts, shown = full.rollouts, len(block.sampled_P)
        prompt = int(rollouts.prompt_R[0])
        name = " ".join(texts[prompt].split()) if prompt < len(texts) else f"prompt {prompt}"
        name = f"{name[:TITLE].rstrip()}…" if len(name) > TITLE else name
        thread: dict[str, Any] = {"name": f"{name} · response {int(rollouts.response_R[0]) + 1}"}
        thread["prompt"] = str(run.student.tokenizer.decode(rollouts.prompt_ids[0]))
        finish = FINISH_REASONS[int(rollouts.finish_R[0])]
        threads.append({**thread, "tokens": len(full.sampled_P), "finish": finish, "shown": shown})
        for anchor, changed in rules.items():
            for one in rule_effects(run, anchor, block.number_R.tolist()):
                changed.setdefault(one.name, []).append(one.changed_P[:shown])
    first = next((setting for setting in settings if setting["policy"] == start), settings[-1])
    packed = pack(threads, blocks, vocabulary, scores, rules)
    return {**packed, "settings": settings, "start": first["name"]}


def pack_forecasts(
    points: Sequence[ForecastPoint], anchors: Sequence[str], solved: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Pack the forecasts that sliders can reach: with an accuracy, and with one set of weights of these anchors.

    The dose of `solved` anchors does not depend on their weight.
    """
    packed = []
    for point in points:
        is_plain = point.weights and all(isinstance(weight, float | int) for weight in point.weights.values())
        is_plain = is_plain and point.method == "joint" and not any(point.weights.get(anchor) for anchor in solved)
        if point.accuracy is not None and point.alpha is not None and is_plain and set(point.weights) <= set(anchors):
            weights = [float(point.weights.get(anchor, 0.0)) for anchor in anchors]
            packed.append({**point.to_dict(), "weights": weights})
    return packed


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


def pack(
    threads: Sequence[Mapping[str, Any]],
    blocks: Sequence[Block],
    vocabulary: Vocabulary,
    students: Mapping[str, Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]],
    rules: Mapping[str, Mapping[str, Sequence[NDArray[np.bool_]]]],
) -> dict[str, Any]:
    """Lay the trajectories out as flat arrays in base64; tokens are indices into one list of texts.

    A thread is what the page says of a block. By block, `students` are logp_PC and mass_P on the candidates, and
    `rules` by anchor and rule changed_P.
    """
    block = Block.concatenate(blocks)
    ids_PC = block.candidates.ids.flat
    ids, places = np.unique(np.concatenate([ids_PC.reshape(-1), block.sampled_P]), return_inverse=True)
    return {
        "anchors": list(rules),
        "floor": RESIDUAL_FLOOR,
        "candidates": ids_PC.shape[1],
        "texts": [vocabulary.spelling.text(int(id)) for id in ids],
        "threads": threads,
        "ids": _base64(places[: ids_PC.size], "<u4"),
        "sampled": _base64(places[ids_PC.size :], "<u4"),
        "logp": _base64(block.candidates.logp.flat, "<f4"),
        "other": _base64(block.candidates.other_logp.flat, "<f4"),
        "shifts": [_base64(r_PC, "<f4") for r_PC in block.r_KPC],
        "mapped": [_base64(mapped_PC, "u1") for mapped_PC in block.mapped_KPC],
        "valid": [_base64(valid_P, "u1") for valid_P in block.valid_KP],
        "rules": [
            [{"rule": rule, "changed": _base64(np.concatenate(parts), "u1")} for rule, parts in changed.items()]
            for changed in rules.values()
        ],
        "students": {
            name: {"logp": _base64(np.concatenate(logp), "<f4"), "mass": _base64(np.concatenate(mass), "<f4")}
            for name, (logp, mass) in ((name, zip(*scores, strict=True)) for name, scores in students.items())
        },
    }


def _base64(values: NDArray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
