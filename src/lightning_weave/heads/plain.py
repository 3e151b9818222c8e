"""Log-probabilities of the outcomes with autograd, for any head: slower than the one-pass losses."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_weave.heads.head import Head
from lightning_weave.heads.tiles import checked_ids, rows_within_budget
from lightning_weave.maths import with_other


def outcome_logprobs(hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor, chunk: int | None = None) -> Tensor:
    """Compute log pi of the candidates and of `other`, differentiably; the backward pass recomputes the logits.

    Candidates may repeat, so the sampled token can be appended to them.
    """
    candidate_ids_NC = checked_ids(candidate_ids_NC, head.vocabulary)
    rows = chunk or rows_within_budget(head.vocabulary, hidden_ND.device)
    chunks = zip(hidden_ND.split(rows), candidate_ids_NC.split(rows), strict=True)
    return torch.cat([checkpoint(_outcomes, h_ND, head, ids_NC, use_reentrant=False) for h_ND, ids_NC in chunks])


def _outcomes(hidden_ND: Tensor, head: Head, candidate_ids_NC: Tensor) -> Tensor:
    logits_NV = head.logits(hidden_ND)
    total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    logp_NC = logits_NV.gather(1, candidate_ids_NC) - total_N1
    other_N1 = torch.logsumexp(logits_NV.scatter(1, candidate_ids_NC, -torch.inf), dim=-1, keepdim=True)
    return with_other(logp_NC, (other_N1 - total_N1).squeeze(-1))
