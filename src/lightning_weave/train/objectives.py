"""The loss of a micro-batch, and the module whose forward computes it.

The loss runs inside the forward of the root module, where a sharded head weight is unsharded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_weave.errors import InputError
from lightning_weave.heads import (
    Head,
    check_head,
    describe_head,
    fused_log_residual_loss,
    fused_reverse_kl,
    outcome_logprobs,
    separate_sampled,
)
from lightning_weave.maths import (
    direct_opd_loss,
    forward_kl,
    log_residual_loss,
    reverse_kl,
    total_variation,
    with_other,
)
from lightning_weave.models.packing import enable_packing, packed_states, padded_states
from lightning_weave.train.data import Batch

OwnLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # log_pi_NO, log_b_NO, log_q_NO, alpha -> loss_N
DISTANCES = ("reverse_kl", "forward_kl", "total_variation", "covered_mass")


@dataclass(frozen=True)
class Loss:
    """The objective of one composition."""

    objective: str
    alpha: float
    function: OwnLoss | None = None  # of an objective that the user wrote

    def __call__(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        """Sum the loss over the kept decisions, over `normalizer`; also give the student's outcomes, detached."""
        match self.objective:
            case "tilted" | "reverse-kl" as objective if head.plain:
                log_pi_NO = torch.empty_like(batch.log_q_NO)
                inputs = hidden_ND, head.weight_VD, batch.candidate_ids_NC
                options: dict[str, Any] = {"vocabulary": head.vocabulary, "watch_NO": log_pi_NO}
                if objective == "tilted":
                    targets = batch.log_b_NO, batch.log_q_NO
                    loss = fused_log_residual_loss(*inputs, *targets, self.alpha, normalizer, **options)
                else:
                    loss = fused_reverse_kl(*inputs, batch.log_q_NO, self.alpha, normalizer, **options)
                return loss, log_pi_NO
            case "tilted":
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = log_residual_loss(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
            case "reverse-kl":
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = reverse_kl(log_pi_NO, batch.log_q_NO, self.alpha)
            case "reverse-kl-full":
                log_q_NV = torch.log_softmax(batch.log_q_NO[:, :-1], dim=-1)
                log_pi_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1).gather(1, batch.candidate_ids_NC)
                log_pi_NO = with_other(log_pi_NV)
                loss_N = reverse_kl(log_pi_NV, log_q_NV, self.alpha)
            case "direct-opd":  # the sampled token may or may not be a candidate
                asked_NA = torch.cat([batch.candidate_ids_NC, batch.sampled_ids_N[:, None]], dim=1)
                logp_NO = outcome_logprobs(hidden_ND, head, asked_NA)
                logp_NC, other_N, sampled_N = separate_sampled(logp_NO[:, :-1], logp_NO[:, -1], asked_NA)
                log_pi_NO = torch.cat([logp_NC, other_N[:, None]], dim=1)
                loss_N = direct_opd_loss(log_pi_NO[:, :-1], batch.r_NC, sampled_N, batch.sampled_log_b_N, self.alpha)
            case name:
                assert self.function is not None
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = self.function(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
                if not isinstance(loss_N, Tensor) or loss_N.shape != log_pi_NO.shape[:1]:
                    shape = tuple(loss_N.shape) if isinstance(loss_N, Tensor) else type(loss_N).__name__
                    raise InputError(f"{name} gives {shape} for {len(log_pi_NO)} decisions; give one loss for each")
        return loss_N.sum() / normalizer, log_pi_NO.detach()


LossFunction = Callable[[Tensor, Head, Batch, float], tuple[Tensor, Tensor]]


def full_vocabulary(hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
    """Stand in for a loss where only the student's log-probs of all tokens are wanted."""
    logp_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1)
    return logp_NV.new_zeros(()), logp_NV


class Trainee(nn.Module):
    """The student and its loss as one module."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        super().__init__()
        self.model = model
        head = describe_head(model, vocabulary)
        # On meta: here the weight would stay unsharded after the model is sharded.
        bias_V = None if head.bias_V is None else head.bias_V.detach().to("meta")
        self.head_description = replace(head, weight_VD=head.weight_VD.detach().to("meta"), bias_V=bias_V)
        self.packs = False  # until `look` has seen that packed rows stay apart

    def head(self) -> Head:
        """Give the head with its present weight: in a forward it is unsharded and in compute dtype."""
        described = self.head_description
        output = self.model.get_output_embeddings()
        return Head(output.weight, described.vocabulary, output.bias, described.scale, described.softcap)

    def look(self) -> None:
        """Find out by short passes if the head is as described and if rows can be packed; all ranks together."""
        check_head(self.model, self.head())
        self.packs = enable_packing(self.model, self.head_description.vocabulary)

    def forward(self, batch: Batch, loss: LossFunction, normalizer: float) -> tuple[Tensor, Tensor]:
        """Return the loss and, without gradient, the student's outcomes log_pi_NO."""
        if self.packs:
            hidden_TD = packed_states(self.model, batch.input_ids_T, batch.positions_T, batch.lengths, batch.whole)
        else:
            hidden_TD = padded_states(self.model, batch.input_ids_T, batch.lengths, batch.whole)
        hidden_ND = hidden_TD[batch.states_N]  # (T, D) -> (N, D): only kept decisions go through the head
        return loss(hidden_ND, self.head(), batch, normalizer)


def distances(log_pi_NO: Tensor, batch: Batch) -> Tensor:
    """Sum over the batch how far the student is from its target, and how much of the behaviour is covered."""
    summed = (
        reverse_kl(log_pi_NO, batch.log_q_NO, 1.0).sum(),
        forward_kl(batch.log_q_NO, log_pi_NO).sum(),
        total_variation(batch.log_q_NO, log_pi_NO).sum(),
        batch.log_b_NO[:, :-1].exp().sum(),
    )
    return torch.stack(summed)


@contextmanager
def without_dropout(trainee: Trainee) -> Iterator[None]:
    """Run the student in eval mode."""
    was_training = trainee.training
    trainee.eval()
    try:
        yield
    finally:
        trainee.train(was_training)
