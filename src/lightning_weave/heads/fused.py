"""Losses on the finite outcomes with their gradients, in one pass over chunks of positions.

Let g be the gradient with respect to the outcomes' log-probs and pi their probabilities. Then a candidate's logit has
the gradient  g_c - pi_c sum(g),  and a non-candidate v has  (g_o - pi_o sum(g)) pi_v / pi_o:  the same expression for
the outcome `other`, divided among its tokens in proportion to the exponentials of their logits. So both gradients are
products with the results of the first product, and nothing is recomputed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_weave.heads.head import Head
from lightning_weave.heads.tiles import (
    Logits,
    Scan,
    add_product,
    cast_once,
    check_ids,
    maths_dtype,
    normalize_scores,
    product_dtype,
    rows_within_budget,
    rows_within_cache,
    scan,
)
from lightning_weave.maths import LOG_FLOOR, LOG_RESIDUAL_FLOOR, log_residual_loss, reverse_kl, with_other

OutcomeLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""From log-probs (N, O) of some positions, exact and with `other` floored, to losses (N,) and gradients (N, O)."""


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
    weight_N: Tensor | None = None,
) -> Tensor:
    """Sum the squared log-residuals over all positions, divided by `normalizer` (finite-candidate-loss).

    A position's candidates must be distinct; matrix rows from `vocabulary` on are ignored. Differentiable once with
    respect to hidden states and weight. `watch_NO`, if given, is filled with the student's log-probs; `weight_N`
    multiplies the loss of each position.
    """
    dtype = maths_dtype(hidden_ND)
    log_b_NO = log_b_NO.to(dtype)
    log_q_NO = log_q_NO.to(dtype)

    def loss(log_pi_NO: Tensor, floored_NO: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_b = log_b_NO[rows]
        log_q = log_q_NO[rows]
        log_mass_N1 = torch.logsumexp(log_b[:, :-1], dim=1, keepdim=True).clamp(min=LOG_FLOOR)
        residual_NO = floored_NO.clamp(min=LOG_FLOOR) - log_q.clamp(min=LOG_FLOOR)
        gradient_NO = alpha * torch.exp(log_b - log_mass_N1) * residual_NO
        gradient_NO[:, :-1].masked_fill_(log_pi_NO[:, :-1] < LOG_FLOOR, 0.0)
        gradient_NO[:, -1].masked_fill_(log_pi_NO[:, -1] < LOG_RESIDUAL_FLOOR, 0.0)
        return log_residual_loss(floored_NO, log_b, log_q, alpha), gradient_NO

    return _fused(hidden_ND, weight_VD, candidate_ids_NC, loss, normalizer, chunk, vocabulary, watch_NO, weight_N)


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
    weight_N: Tensor | None = None,
) -> Tensor:
    """Sum alpha KL(student || target) on the finite outcomes of all positions, over `normalizer` (maps-loss)."""
    log_q_NO = log_q_NO.to(maths_dtype(hidden_ND))

    def loss(log_pi_NO: Tensor, floored_NO: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q = log_q_NO[rows]
        pi_NO = log_pi_NO.exp()
        # The derivative of pi (log pi - log q) also has a term pi, whose gradients over all outcomes add up to zero.
        # Without it, rounding cannot swamp the rest near the target. Where `other` is floored, only its own is missing.
        gradient_NO = alpha * pi_NO * (floored_NO - log_q).where(pi_NO > 0, 0.0)
        floored_N = log_pi_NO[:, -1] < LOG_RESIDUAL_FLOOR
        gradient_NO[:, -1] = torch.where(floored_N, -alpha * pi_NO[:, -1], gradient_NO[:, -1])
        return reverse_kl(floored_NO, log_q, alpha), gradient_NO

    return _fused(hidden_ND, weight_VD, candidate_ids_NC, loss, normalizer, chunk, vocabulary, watch_NO, weight_N)


def _fused(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    candidate_ids_NC: Tensor,
    loss: OutcomeLoss,
    normalizer: float | Tensor,
    chunk: int | None,
    vocabulary: int | None,
    watch_NO: Tensor | None,
    weight_N: Tensor | None,
) -> Tensor:
    def weighted(log_pi_NO: Tensor, floored_NO: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        loss_N, gradient_NO = loss(log_pi_NO, floored_NO, rows)
        if weight_N is None:
            return loss_N, gradient_NO
        weight = weight_N[rows].to(loss_N.dtype)
        return weight * loss_N, weight[:, None] * gradient_NO

    head = Head(weight_VD.detach(), weight_VD.shape[0] if vocabulary is None else vocabulary)
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(maths_dtype(hidden_ND))
    wanted = (torch.is_grad_enabled() and hidden_ND.requires_grad, torch.is_grad_enabled() and weight_VD.requires_grad)
    rows = chunk or rows_within_cache(head.vocabulary, hidden_ND.device)
    if not chunk and wanted[1]:
        rows = min(rows, rows_within_budget(head.vocabulary, hidden_ND.device))
    ids_NC = check_ids(candidate_ids_NC, head.vocabulary)
    return _OnePass.apply(hidden_ND, weight_VD, head, ids_NC, weighted, normalizer, rows, wanted, watch_NO)


class _OnePass(torch.autograd.Function):
    """Compute loss and gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        head: Head,
        ids_NC: Tensor,
        outcome_loss: OutcomeLoss,
        normalizer: float | Tensor,
        rows: int,  # positions per chunk
        wanted: tuple[bool, bool],  # gradients of hidden states and weight
        watch_NO: Tensor | None,
    ) -> Tensor:
        dtype, multiply_in = maths_dtype(hidden_ND), product_dtype(hidden_ND)
        d_hidden_ND = torch.empty_like(hidden_ND, dtype=dtype) if wanted[0] else None
        d_weight_VD = torch.empty_like(weight_VD, dtype=dtype) if wanted[1] else None
        if d_weight_VD is not None:
            d_weight_VD[head.vocabulary if len(hidden_ND) else 0 :] = 0.0  # rows that no chunk writes
        loss = hidden_ND.new_zeros((), dtype=dtype)
        head = cast_once(head, multiply_in)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            first = Logits.from_hidden(hidden_ND[:rows], head, multiply_in)
            one_tile = len(first.starts) == 1
            memory = first.allocate(keep=one_tile or d_weight_VD is not None)
            for start in range(0, len(hidden_ND), rows):
                part = slice(start, start + rows)
                logits = Logits.from_hidden(hidden_ND[part], head, multiply_in)
                d_part_ND = None if d_hidden_ND is None else d_hidden_ND[part]
                scanned = scan(logits, ids_NC[part], memory, pull_ND=None if one_tile else d_part_ND)
                log_pi_NO, pi_NO = normalize_scores(torch.cat([scanned.candidates_NC, scanned.other_N1], dim=1))
                floored_NO = with_other(log_pi_NO[:, :-1], log_pi_NO[:, -1])
                if watch_NO is not None:
                    watch_NO[part] = floored_NO
                loss_N, gradient_NO = outcome_loss(log_pi_NO, floored_NO, part)
                loss += loss_N.sum()
                if any(wanted):
                    d_logits_NO = _of_logits(gradient_NO / normalizer, pi_NO)
                    _add_gradients(
                        scanned, hidden_ND[part].to(multiply_in), d_logits_NO, d_part_ND, d_weight_VD, fresh=start == 0
                    )
        gradients = ((d_hidden_ND, hidden_ND.dtype), (d_weight_VD, weight_VD.dtype))
        ctx.save_for_backward(*(None if gradient is None else gradient.to(kind) for gradient, kind in gradients))
        return loss / normalizer

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # The scale is nearly always 1: the gradients are then passed on without a copy. Asking a device for it would
        # wait: there they are scaled in place, and autograd refuses a second backward pass.
        unit = scale.device.type == "cpu" and bool(scale.detach().numpy() == 1)
        in_place = scale.device.type != "cpu" and not torch.is_grad_enabled()
        scaled = torch.Tensor.mul_ if in_place else torch.mul
        gradients = [grad if grad is None or unit else scaled(grad, scale.to(grad.dtype)) for grad in ctx.saved_tensors]
        if torch.is_grad_enabled():  # create_graph=True
            leaf = torch.zeros((), requires_grad=True)  # so that autograd calls _Once.backward
            gradients = [None if grad is None else _Once.apply(grad, leaf) for grad in gradients]
        return (*gradients, *[None] * 7)


class _Once(torch.autograd.Function):
    """Pass a gradient through and refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "the one-pass loss can be differentiated only once: its gradients are computed in the forward pass. "
            "For second derivatives use maths.log_residual_loss or maths.reverse_kl on heads.outcome_logprobs"
        )


def _of_logits(gradient_NO: Tensor, pi_NO: Tensor) -> Tensor:
    """Convert the gradient of log-probs to that of the outcomes' logits: g_z - pi_z sum(g).

    Written as g_z (1 - pi_z) - pi_z (sum of the other g), with 1 - pi_z also as a sum, so that nothing cancels when one
    outcome has nearly all the mass.
    """
    others_OO = 1 - torch.eye(pi_NO.shape[1], dtype=pi_NO.dtype, device=pi_NO.device)
    return gradient_NO * (pi_NO @ others_OO) - pi_NO * (gradient_NO @ others_OO)


def _add_gradients(
    scanned: Scan,
    hidden_ND: Tensor,
    gradient_NO: Tensor,
    d_hidden_ND: Tensor | None,
    d_weight_VD: Tensor | None,
    *,
    fresh: bool,
) -> None:
    """Add the gradients of a chunk, each only if needed, given that of its outcomes' logits.

    With one tile, the tile becomes the gradient of its logits in place and is multiplied with matrix and hidden states.
    With many, the exponentials themselves are multiplied: with the matrix while the scan has it in cache, and, if the
    weight is trained, with the scaled hidden states. The candidates, which have no exponential, are added to both.
    """
    logits, ids_NC, dtype = scanned.logits, scanned.ids_NC, hidden_ND.dtype
    of_candidates_NC = gradient_NO[:, :-1]
    share_NT = gradient_NO[:, -1:] * (scanned.peak_NT - scanned.other_N1).exp2()
    if len(logits.starts) == 1:
        scores_NV = scanned.tiles[0]
        into = scores_NV if scores_NV.dtype == dtype else torch.empty_like(scores_NV, dtype=dtype)
        tile_NV = torch.mul(scores_NV, share_NT, out=into)  # rounded as it is written
        tile_NV.scatter_(1, ids_NC, of_candidates_NC.to(dtype))
        if d_hidden_ND is not None:
            add_product(d_hidden_ND, tile_NV, logits.weight(0), fresh=True)
        if d_weight_VD is not None:
            add_product(d_weight_VD[: logits.head.vocabulary], tile_NV.t(), hidden_ND, fresh=fresh)
        return
    if d_hidden_ND is not None:
        rows_NCD = logits.head.weight_VD[ids_NC].to(dtype)
        d_hidden_ND.mul_(share_NT[:, -1:]).add_(torch.bmm(of_candidates_NC[:, None], rows_NCD)[:, 0])
    if d_weight_VD is not None:
        for number, (start, tile_NW) in enumerate(zip(logits.starts, scanned.tiles, strict=True)):
            d_weight_WD = d_weight_VD[start : start + tile_NW.shape[1]]
            add_product(d_weight_WD, tile_NW.t(), hidden_ND * share_NT[:, number, None], fresh=fresh)
        of_rows = (of_candidates_NC[..., None] * hidden_ND[:, None]).flatten(0, 1)
        d_weight_VD.index_add_(0, ids_NC.flatten(), of_rows)
