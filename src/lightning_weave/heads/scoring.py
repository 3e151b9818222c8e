"""Log-probabilities of a few tokens per position, normalised over the whole vocabulary."""

from math import ceil

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_weave.heads.head import Head
from lightning_weave.heads.tiles import (
    LN2,
    Logits,
    cast_once,
    check_ids,
    normalize_scores,
    product_dtype,
    rows_within_budget,
    rows_within_cache,
    scan,
)
from lightning_weave.maths import LOG_FLOOR, with_other

GROUP = 64
"""Neighbouring tokens that are searched by their maximum."""


@torch.no_grad()
def candidate_logprobs(
    hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the candidates' log-probs (N, C) and the log-mass of everything else (N,), at least log 1e-30.

    Candidates may repeat; each is counted once.
    """
    candidate_ids_NC = check_ids(candidate_ids_NC, head.vocabulary)
    rows = chunk or rows_within_cache(head.vocabulary, hidden_ND.device)
    dtype = product_dtype(hidden_ND)
    head = cast_once(head, dtype)
    buffers = Logits.from_hidden(hidden_ND[:rows], head, dtype).allocate(keep=False)
    parts = []
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for h_ND, ids_NC in zip(hidden_ND.split(rows), candidate_ids_NC.split(rows), strict=True):
            scanned = scan(Logits.from_hidden(h_ND, head, dtype), ids_NC, buffers)
            first_NC = (ids_NC[:, :, None] == ids_NC[:, None, :]).int().argmax(dim=2)  # column with the same id
            repeated_NC = first_NC != torch.arange(ids_NC.shape[1], device=ids_NC.device)
            distinct_NC = scanned.candidates_NC.masked_fill(repeated_NC, -torch.inf)
            logp_NC, other_N = _logprobs(distinct_NC, scanned.other_N1)
            parts.append((logp_NC.gather(1, first_NC), other_N))
    logp_NC, other_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return logp_NC, other_N.clamp(min=LOG_FLOOR)


def separate_sampled(logp_NA: Tensor, rest_N: Tensor, ids_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Separate the sampled token (the last column) from the candidates: logp_NC, other_N, sampled_logp_N.

    Unless it is also a candidate, its mass belongs to `other`.
    """
    logp_NC = logp_NA[:, :-1]
    sampled_N = logp_NA[:, -1]
    is_candidate_N = (ids_NA[:, :-1] == ids_NA[:, -1:]).any(dim=1)
    return logp_NC, torch.where(is_candidate_N, rest_N, torch.logaddexp(rest_N, sampled_N)), sampled_N


@torch.no_grad()
def top_candidates(
    hidden_ND: Tensor, head: Head, sampled_ids_N: Tensor, count: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the `count` most likely tokens of each position, in descending order, ties by id.

    Returns their ids and log-probs (N, C), the log-mass of all others (N,), at least log 1e-30, and the log-prob of the
    sampled token (N,).
    """
    sampled_ids_N = check_ids(sampled_ids_N, head.vocabulary)
    if not 0 < count <= head.vocabulary:
        raise ValueError(f"{count} candidates requested from a vocabulary of {head.vocabulary}")
    device = hidden_ND.device
    rows = chunk or min(rows_within_cache(head.vocabulary, device), rows_within_budget(head.vocabulary, device))
    dtype = product_dtype(hidden_ND)
    head = cast_once(head, dtype)
    first = Logits.from_hidden(hidden_ND[:rows], head, dtype)
    # The logits of a chunk and, in the last row, the exponentials of a tile.
    shape = (len(first.starts) + 1, len(first.hidden_ND) * ceil(first.width / GROUP) * GROUP)
    memory = torch.empty(shape, dtype=first.dtype, device=device)
    with torch.autocast(device.type, enabled=False):
        chunks = zip(hidden_ND.split(rows), sampled_ids_N.split(rows), strict=True)
        parts = [_top_of_chunk(Logits.from_hidden(h_ND, head, dtype), ids_N, count, memory) for h_ND, ids_N in chunks]
    ids_NC, logp_NC, other_N, sampled_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids_NC, logp_NC, other_N.clamp(min=LOG_FLOOR), sampled_N


def _top_of_chunk(
    logits: Logits, sampled_N: Tensor, count: int, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = len(sampled_N)
    groups = ceil(logits.width / GROUP)
    memory_TNGg = memory[:, : rows * groups * GROUP].view(len(memory), rows, groups, GROUP)
    logits_TNGg, exponentials_NGg = memory_TNGg[:-1], memory_TNGg[-1]
    best_NM, mass_NM, top_N1 = _scan_groups(logits, logits_TNGg, exponentials_NGg)

    # The best `count` tokens are in the best `count` groups, in the same order: by value, then by id.
    if best_NM.shape[1] > count:
        chosen_NK = _largest(best_NM, count).sort(dim=1).values
    else:
        chosen_NK = torch.arange(best_NM.shape[1], device=best_NM.device).expand(best_NM.shape)
    row_N1 = torch.arange(rows, device=sampled_N.device)[:, None]
    inside_Ng = logits_TNGg[chosen_NK // groups, row_N1, chosen_NK % groups].flatten(1)
    place_NC = _largest(inside_Ng, count)
    scores_NC = inside_Ng.gather(1, place_NC)
    ids_NC = chosen_NK.gather(1, place_NC // GROUP) * GROUP + place_NC % GROUP

    # All others: the other groups, and the rest of these. Nothing is subtracted.
    left_N1 = (inside_Ng - top_N1).exp2().scatter(1, place_NC, 0.0).sum(dim=1, keepdim=True)
    left_N1 += mass_NM.scatter(1, chosen_NK, 0.0).sum(dim=1, keepdim=True)
    logp_NC, other_N = _logprobs(scores_NC, left_N1.log2() + top_N1)

    logits_NV = logits_TNGg.permute(1, 0, 2, 3)
    width = groups * GROUP
    sampled_score_N = logits_NV[row_N1[:, 0], sampled_N // width, sampled_N % width // GROUP, sampled_N % GROUP]
    return ids_NC, logp_NC, other_N, logp_NC[:, 0] + (sampled_score_N - scores_NC[:, 0]) * LN2


def _scan_groups(logits: Logits, logits_TNGg: Tensor, exponentials_NGg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a chunk's logits; return each group's maximum and mass, and the logit that masses are relative to."""
    best: list[Tensor] = []
    mass: list[Tensor] = []
    peaks: list[Tensor] = []
    for start, tile_NGg in zip(logits.starts, logits_TNGg, strict=True):
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
    """Find the indices of the largest values, in descending order, ties by index (which `topk` does not promise)."""
    top = values_NM.topk(count, dim=1)
    tied = (top.values[:, 1:] == top.values[:, :-1]).any()
    tied |= (values_NM >= top.values[:, -1:]).sum() > top.values.numel()
    if bool(tied):
        return values_NM.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return top.indices


def _logprobs(scores_NC: Tensor, other_N1: Tensor) -> tuple[Tensor, Tensor]:
    logp_NO, _ = normalize_scores(torch.cat([scores_NC, other_N1], dim=1))
    return logp_NO[:, :-1], logp_NO[:, -1]


def outcome_logprobs(hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor, chunk: int | None = None) -> Tensor:
    """Compute log pi of the candidates and of `other`, differentiably; the backward pass recomputes the logits.

    Candidates may repeat, so the sampled token can be appended to them.
    """
    candidate_ids_NC = check_ids(candidate_ids_NC, head.vocabulary)
    rows = chunk or rows_within_budget(head.vocabulary, hidden_ND.device)
    chunks = zip(hidden_ND.split(rows), candidate_ids_NC.split(rows), strict=True)
    return torch.cat([checkpoint(_outcomes, h_ND, head, ids_NC, use_reentrant=False) for h_ND, ids_NC in chunks])


def _outcomes(hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor) -> Tensor:
    logits_NV = head.logits(hidden_ND)
    total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    logp_NC = logits_NV.gather(1, candidate_ids_NC) - total_N1
    other_N1 = torch.logsumexp(logits_NV.scatter(1, candidate_ids_NC, -torch.inf), dim=-1, keepdim=True)
    return with_other(logp_NC, (other_N1 - total_N1).squeeze(-1))
