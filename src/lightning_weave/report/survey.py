"""Statistics of the anchors over a whole cache: masked positions, agreement, and the tokens that each pushes.

Everything is a sum over shards, so memory does not grow with the cache.

A *pull* is a shift minus its mean under the behaviour policy, r(a) - E_b[r]: its sign says whether the target raises or
lowers the token's probability to first order, whatever constant the shift includes (corollary permutation-scale).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from lightning_weave.cache.block import Block
from lightning_weave.maths import compose_shifts, shift_covariance, with_other
from lightning_weave.report.kinds import KINDS, TokenKind, Vocabulary
from lightning_weave.report.reading import Reading
from lightning_weave.runs.alignment import Unread

CHUNK = 16_384  # decisions held as tensors at once
REASONS = (
    "kept",
    "kept, some candidates without a shift",
    "masked: no matching end of turn",
    "masked: a candidate is not a single token",
    "masked: beyond the anchor's context",
    "masked: by a rule of the anchor",
    "masked: untrained in the pre-anchor",
    "masked: after a token that the anchor cannot spell",
    "masked: a column of the context is missing",
    "masked: no candidate is a token, or not readable",
)
KEPT, PARTLY_KEPT, NO_END_OF_TURN, NOT_ONE_TOKEN, OUT_OF_CONTEXT, BY_RULE, UNTRAINED, NOT_SPELT, NO_COLUMN, UNKNOWN = (
    range(len(REASONS))
)
UNREAD = {  # where no candidate is mapped: because it is not read there, or else for its candidates
    Unread.TOO_LONG: OUT_OF_CONTEXT,
    Unread.NOT_SPELT: NOT_SPELT,
    Unread.NO_COLUMN: NO_COLUMN,
    Unread.UNKNOWN: UNKNOWN,
}


@dataclass
class PairSums:
    """Sums over the decisions that two anchors can both score."""

    decisions: int = 0
    covariance: float = 0.0
    variance_one: float = 0.0
    variance_two: float = 0.0
    agreed: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "top": 0})
    compared: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "top": 0})
    agreed_by_kind: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(KINDS), np.int64))
    compared_by_kind: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(KINDS), np.int64))

    @property
    def correlation(self) -> float:
        """Pool Cov_b over decisions: 1 = same direction, 0 = unrelated, -1 = opposite."""
        scale = (self.variance_one * self.variance_two) ** 0.5
        return self.covariance / scale if scale > 0 else float("nan")

    def agreement(self, where: str) -> float:
        """The share of sampled or top tokens that both pull in the same direction."""
        return self.agreed[where] / self.compared[where] if self.compared[where] else float("nan")

    def agreement_on(self, kind: TokenKind) -> float:
        """The share of sampled tokens of this kind that both pull in the same direction."""
        compared = self.compared_by_kind[KINDS.index(kind)]
        return float(self.agreed_by_kind[KINDS.index(kind)] / compared) if compared else float("nan")


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
        kinds = [KINDS.index(vocabulary.kind(id)) for id in range(vocabulary.size)]
        self._kind_V = np.array(kinds, dtype=np.int64)
        self._stops = np.array(sorted(vocabulary.stop_ids), dtype=np.int64)
        self.decisions = 0
        self.reasons_KR = np.zeros((len(self.anchors), len(REASONS)), np.int64)
        self.kept = dict.fromkeys(self.compositions, 0)
        self.push_KV = np.zeros((len(self.anchors), vocabulary.size))
        self.seen_V = np.zeros(vocabulary.size)
        self.size_KJ = np.zeros((len(self.anchors), len(KINDS)))  # summed |pull| on the sampled token, by kind
        self.count_KJ = np.zeros((len(self.anchors), len(KINDS)), np.int64)
        self.pairs = {(one, two): PairSums() for n, one in enumerate(self.anchors) for two in self.anchors[n + 1 :]}

    def add(self, block: Block) -> None:
        """Add some rows."""
        for chunk in block.chunks(CHUNK):
            if len(chunk.sampled_P):
                self._add_chunk(chunk)

    def _add_chunk(self, chunk: Block) -> None:
        ids_PC = chunk.candidates.ids.flat
        self.decisions += int(chunk.decided_P.sum())
        valid_KP = torch.from_numpy(chunk.valid_KP)
        for name, weights in self.compositions.items():
            _, kept_P = compose_shifts(torch.zeros(*valid_KP.shape, 1), valid_KP, weights)
            self.kept[name] += int(kept_P.sum())
        log_b_PO = with_other(
            torch.tensor(chunk.candidates.logp.flat), torch.tensor(chunk.candidates.other_logp.flat)
        ).double()
        b_PO = torch.softmax(log_b_PO, dim=-1)
        np.add.at(self.seen_V, ids_PC.reshape(-1), b_PO[:, :-1].numpy().reshape(-1))
        r_KPC = torch.tensor(np.where(chunk.valid_KP[..., None], chunk.r_KPC, 0.0)).double()
        pull_KPO = pull(b_PO, r_KPC)
        for anchor in range(len(self.anchors)):
            self._add_reasons(anchor, chunk)
            self._add_pushes(anchor, chunk, b_PO, pull_KPO[anchor])
        for names, sums in self.pairs.items():
            pair = [self.anchors.index(name) for name in names]
            both_P = valid_KP[pair].all(dim=0)
            self._add_pair(sums, chunk, log_b_PO, r_2PC=r_KPC[pair], pull_2PO=pull_KPO[pair], both_P=both_P)

    def _add_reasons(self, anchor: int, chunk: Block) -> None:
        mapped_PC = chunk.mapped_KPC[anchor]
        reading = self.readings.get(self.anchors[anchor], Reading())
        unread_P = reading.unread(chunk, ~mapped_PC.any(axis=1))
        ids_PC = chunk.candidates.ids.flat
        untrained_PC = np.isin(ids_PC, [] if reading.untrained is None else reading.untrained)
        stops_PC = np.isin(ids_PC, self._stops)
        reasons_P = why_masked(mapped_PC, chunk.valid_KP[anchor], stops_PC, untrained_PC, unread_P)
        self.reasons_KR[anchor] += np.bincount(reasons_P[chunk.decided_P], minlength=len(REASONS))

    def _add_pushes(self, anchor: int, chunk: Block, b_PO: Tensor, pull_PO: Tensor) -> None:
        """Add up b(a) (r(a) - E_b[r]): the change in the expected count of each token, per unit of weight / alpha."""
        valid_P = chunk.valid_KP[anchor]
        moved_PC = (b_PO * pull_PO)[:, :-1].numpy()
        np.add.at(self.push_KV[anchor], chunk.candidates.ids.flat[valid_P].reshape(-1), moved_PC[valid_P].reshape(-1))
        size_P = _at_sampled(chunk, pull_PO).abs().numpy()
        kind_P = self._kind_V[chunk.sampled_P]
        np.add.at(self.size_KJ[anchor], kind_P[valid_P], size_P[valid_P])
        np.add.at(self.count_KJ[anchor], kind_P[valid_P], 1)

    def _add_pair(
        self, sums: PairSums, chunk: Block, log_b_PO: Tensor, *, r_2PC: Tensor, pull_2PO: Tensor, both_P: Tensor
    ) -> None:
        log_b_NO = log_b_PO[both_P]
        u_NC, v_NC = (r_PC[both_P] for r_PC in r_2PC)
        sums.decisions += int(both_P.sum())
        sums.covariance += shift_covariance(log_b_NO, u_NC, v_NC).sum().item()
        sums.variance_one += shift_covariance(log_b_NO, u_NC, u_NC).sum().item()
        sums.variance_two += shift_covariance(log_b_NO, v_NC, v_NC).sum().item()
        top_P = log_b_PO[:, :-1].argmax(dim=-1, keepdim=True)
        pulls = {
            "sampled": [_at_sampled(chunk, pull_PO) for pull_PO in pull_2PO],
            "top": [pull_PO.gather(1, top_P)[:, 0] for pull_PO in pull_2PO],
        }
        for where, (one_P, two_P) in pulls.items():
            decided_P = both_P & (one_P != 0) & (two_P != 0)
            same_P = decided_P & ((one_P > 0) == (two_P > 0))
            sums.compared[where] += int(decided_P.sum())
            sums.agreed[where] += int(same_P.sum())
            if where == "sampled":
                kind_P = self._kind_V[chunk.sampled_P]
                sums.compared_by_kind += np.bincount(kind_P[decided_P.numpy()], minlength=len(KINDS))
                sums.agreed_by_kind += np.bincount(kind_P[same_P.numpy()], minlength=len(KINDS))

    def size_by_kind(self, anchor: str) -> dict[TokenKind, float]:
        """Mean size of an anchor's pull on the sampled token, in nats, for the kinds that occur."""
        k = self.anchors.index(anchor)
        counts = self.count_KJ[k]
        return {kind: float(self.size_KJ[k, j] / counts[j]) for j, kind in enumerate(KINDS) if counts[j]}

    def largest_pushes(self, anchor: str, most: int = 10) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """The tokens that an anchor pushes up and down most: (id, change in expected count per unit dose)."""
        push_V = self.push_KV[self.anchors.index(anchor)]
        order = np.argsort(push_V, kind="stable")
        up = [(int(id), float(push_V[id])) for id in order[::-1][:most] if push_V[id] > 0]
        down = [(int(id), float(push_V[id])) for id in order[:most] if push_V[id] < 0]
        return up, down


def pull(b_PO: Tensor, r_KPC: Tensor) -> Tensor:
    """Subtract from each shift its mean under the behaviour policy; `other` has shift 0."""
    r_KPO = pad(r_KPC, (0, 1))
    return r_KPO - (b_PO * r_KPO).sum(dim=-1, keepdim=True)


def why_masked(
    mapped_PC: NDArray[np.bool_],
    valid_P: NDArray[np.bool_],
    stops_PC: NDArray[np.bool_],
    untrained_PC: NDArray[np.bool_],
    unread_P: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Give each position an index into REASONS; `unread_P` counts only where no candidate is mapped."""
    unmapped_PC = ~mapped_PC
    masked_P = np.where((mapped_PC | stops_PC).all(axis=1), NO_END_OF_TURN, NOT_ONE_TOKEN)
    masked_P = np.where((mapped_PC | untrained_PC).all(axis=1), UNTRAINED, masked_P)
    for unread, reason in UNREAD.items():
        masked_P = np.where(~mapped_PC.any(axis=1) & (unread_P == unread), reason, masked_P)
    masked_P = np.where(mapped_PC.all(axis=1), BY_RULE, masked_P)
    return np.where(valid_P, np.where(unmapped_PC.any(axis=1), PARTLY_KEPT, KEPT), masked_P)


def _at_sampled(chunk: Block, value_PO: Tensor) -> Tensor:
    """Take the value of the sampled token, or of `other` if it is not a candidate."""
    is_sampled_PC = torch.from_numpy(chunk.candidates.ids.flat == chunk.sampled_P[:, None])
    place_P = torch.where(is_sampled_PC.any(dim=1), is_sampled_PC.int().argmax(dim=1), value_PO.shape[1] - 1)
    return value_PO.gather(1, place_P[:, None])[:, 0]
