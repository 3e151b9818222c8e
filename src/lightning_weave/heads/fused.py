"""Losses on the finite outcomes with their gradients, in one pass over chunks of positions.

Let g be the gradient with respect to the outcomes' log-probs and pi their probabilities. A candidate's logit then has
the gradient  g_c - pi_c sum(g),  and a token v that is no candidate has  (g_o - pi_o sum(g)) pi_v / pi_o:  the same
expression for the outcome `other`, shared out among its tokens in proportion to the exponentials of their logits. So
the two gradients are two more products with what the first one made, and nothing is computed again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_weave.heads.head import Head
from lightning_weave.heads.tiles import (
    Logits,
    Scan,
    add_product,
    checked_ids,
    maths_dtype,
    normalised,
    product_dtype,
    rows_within_budget,
    rows_within_cache,
    scan,
)
from lightning_weave.maths import LOG_FLOOR, LOG_RESIDUAL_FLOOR, log_residual_loss, reverse_kl, with_other

OutcomeLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""From the log-probs (N, O) of some positions, `other` not yet floored, to their losses (N,) and gradients (N, O)."""


def fused_log_residual_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    candidate_ids_NC: Tensor,
    log_b_NO: Tensor,
    log_q_NO: Tensor,
    alpha: float,
    normalizer: float | Tensor,
    chunk: int | None = None,
    vocabulary: int | None = None,
    watch_NO: Tensor | None = None,
) -> Tensor:
    """Sum the squared log-residuals over all positions, over `normalizer` (finite-candidate-loss).

    The candidates of a position are distinct; matrix rows from `vocabulary` on take no part. Can be differentiated once
    with respect to hidden states and weight. `watch_NO` is filled with the student's log-probs, for whoever looks on.
    """
    dtype = maths_dtype(hidden_ND)
    log_b_NO, log_q_NO = log_b_NO.to(dtype), log_q_NO.to(dtype)

    def objective(log_pi_NO: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_b, log_q = log_b_NO[rows], log_q_NO[rows]
        floored_NO = with_other(log_pi_NO[:, :-1], log_pi_NO[:, -1])
        if watch_NO is not None:
            watch_NO[rows] = floored_NO
        log_mass_N1 = torch.logsumexp(log_b[:, :-1], dim=1, keepdim=True).clamp(min=LOG_FLOOR)
        residual_NO = floored_NO.clamp(min=LOG_FLOOR) - log_q.clamp(min=LOG_FLOOR)
        gradient_NO = alpha * torch.exp(log_b - log_mass_N1) * residual_NO
        gradient_NO[:, :-1].masked_fill_(log_pi_NO[:, :-1] < LOG_FLOOR, 0.0)
        gradient_NO[:, -1].masked_fill_(log_pi_NO[:, -1] < LOG_RESIDUAL_FLOOR, 0.0)
        return log_residual_loss(floored_NO, log_b, log_q, alpha), gradient_NO

    return _fused(hidden_ND, weight_VD, candidate_ids_NC, objective, normalizer, chunk, vocabulary)


def fused_reverse_kl(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    candidate_ids_NC: Tensor,
    log_q_NO: Tensor,
    alpha: float,
    normalizer: float | Tensor,
    chunk: int | None = None,
    vocabulary: int | None = None,
    watch_NO: Tensor | None = None,
) -> Tensor:
    """Sum alpha KL(student || target) on the finite outcomes over all positions, over `normalizer` (maps-loss)."""
    log_q_NO = log_q_NO.to(maths_dtype(hidden_ND))

    def objective(log_pi_NO: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q = log_q_NO[rows]
        floored_NO = with_other(log_pi_NO[:, :-1], log_pi_NO[:, -1])
        if watch_NO is not None:
            watch_NO[rows] = floored_NO
        pi_NO = log_pi_NO.exp()
        # The derivative of pi (log pi - log q) also has a term pi, which over all outcomes adds up to no gradient at
        # all: left out, it cannot drown the rest near the target. Where `other` is floored, only its own is missing.
        gradient_NO = alpha * pi_NO * (floored_NO - log_q).where(pi_NO > 0, 0.0)
        floored_N = log_pi_NO[:, -1] < LOG_RESIDUAL_FLOOR
        gradient_NO[:, -1] = torch.where(floored_N, -alpha * pi_NO[:, -1], gradient_NO[:, -1])
        return reverse_kl(floored_NO, log_q, alpha), gradient_NO

    return _fused(hidden_ND, weight_VD, candidate_ids_NC, objective, normalizer, chunk, vocabulary)


def _fused(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    candidate_ids_NC: Tensor,
    objective: OutcomeLoss,
    normalizer: float | Tensor,
    chunk: int | None,
    vocabulary: int | None,
) -> Tensor:
    head = Head(weight_VD.detach(), weight_VD.shape[0] if vocabulary is None else vocabulary)
    ids_NC = checked_ids(candidate_ids_NC, head.vocabulary)
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(maths_dtype(hidden_ND))
    wanted = (torch.is_grad_enabled() and hidden_ND.requires_grad, torch.is_grad_enabled() and weight_VD.requires_grad)
    rows = chunk or rows_within_cache(head.vocabulary, hidden_ND.device)
    if not chunk and wanted[1]:
        rows = min(rows, rows_within_budget(head.vocabulary, hidden_ND.device))
    return _OnePass.apply(hidden_ND, weight_VD, head, ids_NC, objective, normalizer, rows, wanted)


class _OnePass(torch.autograd.Function):
    """Loss and gradients together in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        head: Head,
        ids_NC: Tensor,
        objective: OutcomeLoss,
        normalizer: float | Tensor,
        rows: int,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        sums = _Gradients.of(hidden_ND, weight_VD, head.vocabulary, wanted)
        loss = hidden_ND.new_zeros((), dtype=maths_dtype(hidden_ND))
        multiply_in = product_dtype(hidden_ND)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            first = Logits.of(hidden_ND[:rows], head, multiply_in)
            room = first.room(keep=sums.need_tiles(first))
            for start in range(0, len(hidden_ND), rows):
                part = slice(start, start + rows)
                logits = Logits.of(hidden_ND[part], head, multiply_in)
                seen = scan(logits, ids_NC[part], room, sums.pull(logits, part))
                log_pi_NO, pi_NO = normalised(torch.cat([seen.candidates_NC, seen.other_N1], dim=1))
                loss_N, gradient_NO = objective(log_pi_NO, part)
                loss += loss_N.sum()
                if any(wanted):
                    sums.add(part, hidden_ND[part].to(multiply_in), seen, _of_logits(gradient_NO / normalizer, pi_NO))
        ctx.save_for_backward(*sums.rounded(hidden_ND.dtype, weight_VD.dtype))
        return loss / normalizer

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        unit = bool(scale == 1)  # almost always; then the gradients are passed on, not copied
        gradients = [grad if grad is None or unit else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = [None if grad is None else _Once.apply(grad, _leaf()) for grad in gradients]
        return (*gradients, *(None,) * 6)


class _Once(torch.autograd.Function):
    """Pass a gradient on and refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "the one-pass loss can be differentiated only once: its gradients are computed in the forward pass. "
            "For second derivatives use maths.log_residual_loss or maths.reverse_kl on heads.outcome_logprobs"
        )


def _leaf() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _of_logits(gradient_NO: Tensor, pi_NO: Tensor) -> Tensor:
    """Turn the gradient of log-probs into that of the outcomes' logits: g_z - pi_z sum(g).

    Written as g_z (1 - pi_z) - pi_z (sum of the other g), with 1 - pi_z as a sum too, so that nothing cancels when one
    outcome has nearly all the mass.
    """
    others_OO = 1 - torch.eye(pi_NO.shape[1], dtype=pi_NO.dtype, device=pi_NO.device)
    return gradient_NO * (pi_NO @ others_OO) - pi_NO * (gradient_NO @ others_OO)


@dataclass(frozen=True)
class _Gradients:
    """Where the gradients of hidden states and weight are put together, each only if it is wanted.

    A vocabulary of one tile: the tile becomes the gradient of its logits, in place, and is multiplied out. Many tiles:
    the exponentials are multiplied as they are, first by the matrix while the scan has it in cache, then, if the weight
    learns, by the hidden states with the factor in these; the candidates, which have no exponential, are added to both.
    """

    hidden_ND: Tensor | None
    weight_VD: Tensor | None

    @classmethod
    def of(cls, hidden_ND: Tensor, weight_VD: Tensor, vocabulary: int, wanted: tuple[bool, bool]) -> "_Gradients":
        dtype = maths_dtype(hidden_ND)
        d_hidden_ND = torch.empty_like(hidden_ND, dtype=dtype) if wanted[0] else None
        d_weight_VD = torch.empty_like(weight_VD, dtype=dtype) if wanted[1] else None
        if d_weight_VD is not None:
            d_weight_VD[vocabulary if len(hidden_ND) else 0 :] = 0.0  # what no chunk will write
        return cls(d_hidden_ND, d_weight_VD)

    def need_tiles(self, logits: Logits) -> bool:
        """Say whether exponentials are needed after the scan."""
        return self.weight_VD is not None or len(logits.starts) == 1

    def pull(self, logits: Logits, part: slice) -> Tensor | None:
        """Give the scan a place for its product with the matrix, if it is to make one."""
        return None if self.hidden_ND is None or len(logits.starts) == 1 else self.hidden_ND[part]

    def add(self, part: slice, hidden_ND: Tensor, seen: Scan, gradient_NO: Tensor) -> None:
        """Add what a chunk gives, from the gradient of its outcomes' logits."""
        of_candidates_NC = gradient_NO[:, :-1]
        share_NT = gradient_NO[:, -1:] * (seen.peak_NT - seen.other_N1).exp2()
        if len(seen.logits.starts) == 1:
            self._add_dense(part, hidden_ND, seen, of_candidates_NC, share_NT)
            return
        ids_NC = seen.ids_NC
        if self.hidden_ND is not None:
            rows_NCD = seen.logits.head.weight_VD[ids_NC].to(hidden_ND.dtype)
            d_hidden_ND = self.hidden_ND[part].mul_(share_NT[:, -1:])
            d_hidden_ND += torch.bmm(of_candidates_NC[:, None], rows_NCD)[:, 0]
        if self.weight_VD is not None:
            for number, start in enumerate(seen.logits.starts):
                tile_NW = seen.tiles[number]
                d_weight_WD = self.weight_VD[start : start + tile_NW.shape[1]]
                add_product(d_weight_WD, tile_NW.t(), hidden_ND * share_NT[:, number, None], fresh=part.start == 0)
            self.weight_VD.index_add_(
                0, ids_NC.flatten(), (of_candidates_NC[..., None] * hidden_ND[:, None]).flatten(0, 1)
            )

    def _add_dense(
        self, part: slice, hidden_ND: Tensor, seen: Scan, of_candidates_NC: Tensor, share_N1: Tensor
    ) -> None:
        tile_NV = seen.tiles[0].mul_(share_N1).scatter_(1, seen.ids_NC, of_candidates_NC).to(hidden_ND.dtype)
        if self.hidden_ND is not None:
            add_product(self.hidden_ND[part], tile_NV, seen.logits.weight(0), fresh=True)
        if self.weight_VD is not None:
            d_weight_VD = self.weight_VD[: seen.logits.head.vocabulary]
            add_product(d_weight_VD, tile_NV.t(), hidden_ND, fresh=part.start == 0)

    def rounded(self, hidden: torch.dtype, weight: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Give both in the precision of what they belong to."""
        return (
            None if self.hidden_ND is None else self.hidden_ND.to(hidden),
            None if self.weight_VD is None else self.weight_VD.to(weight),
        )
