"""Log-probabilities of a few tokens per position, normalised over the whole vocabulary."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lightning_weave.heads.head import Head
from lightning_weave.heads.tiles import (
    LN2,
    Logits,
    checked_ids,
    normalised,
    product_dtype,
    rows_within_budget,
    rows_within_cache,
    scan,
)
from lightning_weave.maths import LOG_FLOOR

GROUP = 64
"""Neighbouring tokens that are searched through their maximum."""


@torch.no_grad()
def candidate_logprobs(
    hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the candidates' log-probs (N, C) and the log-mass of everything else (N,), at least log 1e-30.

    Candidates may repeat: each counts once.
    """
    candidate_ids_NC = checked_ids(candidate_ids_NC, head.vocabulary)
    rows = chunk or rows_within_cache(head.vocabulary, hidden_ND.device)
    dtype = product_dtype(hidden_ND)
    room = Logits.of(hidden_ND[:rows], head, dtype).room(keep=False)
    parts = []
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for h_ND, ids_NC in zip(hidden_ND.split(rows), candidate_ids_NC.split(rows), strict=True):
            seen = scan(Logits.of(h_ND, head, dtype), ids_NC, room)
            first_NC = _first_places(ids_NC)
            repeated_NC = first_NC != torch.arange(ids_NC.shape[1], device=ids_NC.device)
            logp_NC, other_N = _logprobs(seen.candidates_NC.masked_fill(repeated_NC, -torch.inf), seen.other_N1)
            parts.append((logp_NC.gather(1, first_NC), other_N))
    logp_NC, other_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return logp_NC, other_N.clamp(min=LOG_FLOOR)


def apart_from_sampled(logp_NA: Tensor, rest_N: Tensor, asked_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Part the sampled token, asked about last, from the candidates before it: logp_NC, other_N, sampled_logp_N.

    Unless it is one of the candidates too, its mass belongs to `other`.
    """
    logp_NC, sampled_N = logp_NA[:, :-1], logp_NA[:, -1]
    is_candidate_N = (asked_NA[:, :-1] == asked_NA[:, -1:]).any(dim=1)
    return logp_NC, torch.where(is_candidate_N, rest_N, torch.logaddexp(rest_N, sampled_N)), sampled_N


@torch.no_grad()
def top_candidates(
    hidden_ND: Tensor, head: Head, sampled_ids_N: Tensor, count: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the `count` likeliest tokens of each position, likeliest first, equal ones by id.

    Returns their ids and log-probs (N, C), the log-mass of everything else (N,), at least log 1e-30, and the log-prob
    of the sampled token (N,).
    """
    sampled_ids_N = checked_ids(sampled_ids_N, head.vocabulary)
    if not 0 < count <= head.vocabulary:
        raise ValueError(f"{count} candidates asked for in a vocabulary of {head.vocabulary}")
    device = hidden_ND.device
    rows = chunk or min(rows_within_cache(head.vocabulary, device), rows_within_budget(head.vocabulary, device))
    dtype = product_dtype(hidden_ND)
    room = _Room.of(Logits.of(hidden_ND[:rows], head, dtype))
    with torch.autocast(device.type, enabled=False):
        chunks = zip(hidden_ND.split(rows), sampled_ids_N.split(rows), strict=True)
        parts = [_top_of_chunk(Logits.of(h_ND, head, dtype), ids_N, count, room) for h_ND, ids_N in chunks]
    ids_NC, logp_NC, other_N, sampled_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids_NC, logp_NC, other_N.clamp(min=LOG_FLOOR), sampled_N


@dataclass(frozen=True)
class _Room:
    """Memory for the logits of a chunk and for the exponentials of a tile, used again and again."""

    logits: Tensor  # (T, N * W)
    exponentials: Tensor  # (N * W)

    @classmethod
    def of(cls, logits: Logits) -> "_Room":
        width = ceil(logits.width / GROUP) * GROUP
        all_of_it = torch.empty(
            len(logits.starts) + 1, len(logits.hidden_ND) * width, dtype=logits.dtype, device=logits.hidden_ND.device
        )
        return cls(all_of_it[:-1], all_of_it[-1])

    def shaped(self, rows: int, groups: int) -> tuple[Tensor, Tensor]:
        """Take what so many positions need, in groups: (T, N, G, GROUP) and (N, G, GROUP)."""
        size = rows * groups * GROUP
        return (
            self.logits[:, :size].view(len(self.logits), rows, groups, GROUP),
            self.exponentials[:size].view(rows, groups, GROUP),
        )


def _top_of_chunk(logits: Logits, sampled_N: Tensor, count: int, room: _Room) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, groups = len(sampled_N), ceil(logits.width / GROUP)
    held_TNGg, exponentials_NGg = room.shaped(rows, groups)
    best_NM, mass_NM, top_N1 = _scan_groups(logits, held_TNGg, exponentials_NGg)

    # The best `count` tokens are in the best `count` groups, in the same order of preference: by value, then by id.
    if best_NM.shape[1] > count:
        chosen_NK = _largest(best_NM, count).sort(dim=1).values
    else:
        chosen_NK = torch.arange(best_NM.shape[1], device=best_NM.device).expand(best_NM.shape)
    row_N1 = torch.arange(rows, device=sampled_N.device)[:, None]
    inside_Ng = held_TNGg[chosen_NK // groups, row_N1, chosen_NK % groups].flatten(1)
    place_NC = _largest(inside_Ng, count)
    scores_NC = inside_Ng.gather(1, place_NC)
    ids_NC = chosen_NK.gather(1, place_NC // GROUP) * GROUP + place_NC % GROUP

    # Everything else: the other groups, and what was not chosen of these. Nothing is subtracted.
    left_N1 = (inside_Ng - top_N1).exp2().scatter(1, place_NC, 0.0).sum(dim=1, keepdim=True)
    left_N1 += mass_NM.scatter(1, chosen_NK, 0.0).sum(dim=1, keepdim=True)
    logp_NC, other_N = _logprobs(scores_NC, left_N1.log2() + top_N1)

    held_NV = held_TNGg.permute(1, 0, 2, 3)
    width = groups * GROUP
    sampled_score_N = held_NV[row_N1[:, 0], sampled_N // width, sampled_N % width // GROUP, sampled_N % GROUP]
    return ids_NC, logp_NC, other_N, logp_NC[:, 0] + (sampled_score_N - scores_NC[:, 0]) * LN2


def _scan_groups(logits: Logits, held_TNGg: Tensor, exponentials_NGg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make a chunk's logits; return the maximum and the mass of each group, and what the masses are relative to."""
    best, mass, peaks = [], [], []
    for start, tile_NGg in zip(logits.starts, held_TNGg, strict=True):
        tile_NW = tile_NGg.flatten(1)
        used = min(logits.width, logits.head.vocabulary - start)
        logits.make(start, tile_NW[:, :used])
        tile_NW[:, used:] = -torch.inf
        best.append(tile_NGg.amax(dim=2))
        peaks.append(best[-1].amax(dim=1, keepdim=True))
        torch.sub(tile_NGg, peaks[-1][..., None], out=exponentials_NGg).exp2_()
        mass.append(exponentials_NGg.sum(dim=2))
    top_N1 = torch.cat(peaks, dim=1).amax(dim=1, keepdim=True)
    mass = [mass_NG.mul_((peak_N1 - top_N1).exp2_()) for mass_NG, peak_N1 in zip(mass, peaks, strict=True)]
    return torch.cat(best, dim=1), torch.cat(mass, dim=1), top_N1


def _largest(values_NM: Tensor, count: int) -> Tensor:
    """Find the places of the largest values, largest first, equal ones in their order (`topk` promises none)."""
    top = values_NM.topk(count, dim=1)
    tied = (top.values[:, 1:] == top.values[:, :-1]).any()
    tied |= (values_NM >= top.values[:, -1:]).sum() > top.values.numel()
    if bool(tied):
        return values_NM.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return top.indices


def _logprobs(scores_NC: Tensor, other_N1: Tensor) -> tuple[Tensor, Tensor]:
    logp_NO, _ = normalised(torch.cat([scores_NC, other_N1], dim=1))
    return logp_NO[:, :-1], logp_NO[:, -1]


def _first_places(ids_NC: Tensor) -> Tensor:
    """Find where each candidate's id first occurs in its row."""
    return (ids_NC[:, :, None] == ids_NC[:, None, :]).int().argmax(dim=2)
