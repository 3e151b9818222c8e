"""What a micro-batch's loss is, and the module whose forward computes it.

The loss runs inside the forward of the root module, where a sharded head weight is whole.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_weave.config import is_own_function
from lightning_weave.errors import InputError
from lightning_weave.heads import (
    Head,
    apart_from_sampled,
    check_head,
    describe_head,
    fused_log_residual_loss,
    fused_reverse_kl,
    outcome_logprobs,
)
from lightning_weave.maths import (
    direct_opd_loss,
    forward_kl,
    log_residual_loss,
    reverse_kl,
    total_variation,
    with_other,
)
from lightning_weave.models.packing import pack_rows, packed_states, padded_states
from lightning_weave.own import load_function
from lightning_weave.train.data import Batch

OwnLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # log_pi_NO, log_b_NO, log_q_NO, alpha -> loss_N
DISTANCES = ("reverse_kl", "forward_kl", "total_variation", "covered_mass")


@dataclass(frozen=True)
class Loss:
    """The objective of one composition."""

    objective: str
    alpha: float
    own: OwnLoss | None = None

    @classmethod
    def of(cls, objective: str, alpha: float, trust: bool = False) -> "Loss":
        """Find an objective by its name, or load the user's own where that is trusted."""
        return cls(objective, alpha, load_function(objective, trust) if is_own_function(objective) else None)

    def check(self, candidates: int, vocabulary: int) -> None:
        """Refuse the whole-vocabulary objective where the cache does not hold the whole vocabulary."""
        if self.objective == "reverse-kl-full" and candidates != vocabulary:
            raise InputError(
                f'objective = "reverse-kl-full" needs the whole vocabulary: set reference.candidates = '
                f'{vocabulary} (now {candidates}), or use "reverse-kl"'
            )

    def remark(self, head: Head) -> str | None:
        """Say so where the one-pass loss does not apply."""
        if head.plain or self.objective not in {"tilted", "reverse-kl"}:
            return None
        parts = {
            "a bias": head.bias_V is not None,
            "a scale": head.scale != 1.0,
            "a soft cap": head.softcap is not None,
        }
        named = " and ".join(part for part, there in parts.items() if there)
        return f"the student's head has {named}: the plain loss is used, which is slower than the one-pass loss"

    def __call__(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        """Sum the loss over the kept decisions, over `normalizer`; also give the student's outcomes, detached."""
        match self.objective:
            case "tilted" | "reverse-kl" if head.plain:
                return self._in_one_pass(hidden_ND, head, batch, normalizer)
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
            case "direct-opd":
                log_pi_NO, sampled_logp_N = _with_sampled(hidden_ND, head, batch)
                logp_NC = log_pi_NO[:, :-1]
                log_b_N = batch.sampled_log_b_N
                loss_N = direct_opd_loss(logp_NC, batch.r_NC, sampled_logp_N, log_b_N, self.alpha)
            case _:
                log_pi_NO = outcome_logprobs(hidden_ND, head, batch.candidate_ids_NC)
                loss_N = self._own_loss(log_pi_NO, batch)
        return loss_N.sum() / normalizer, log_pi_NO.detach()

    def _own_loss(self, log_pi_NO: Tensor, batch: Batch) -> Tensor:
        assert self.own is not None
        loss_N = self.own(log_pi_NO, batch.log_b_NO, batch.log_q_NO, self.alpha)
        if not isinstance(loss_N, Tensor) or loss_N.shape != log_pi_NO.shape[:1]:
            shape = tuple(loss_N.shape) if isinstance(loss_N, Tensor) else type(loss_N).__name__
            raise InputError(f"{self.objective} gives {shape} for {len(log_pi_NO)} decisions; give one loss for each")
        return loss_N

    def _in_one_pass(self, hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
        watch_NO = torch.empty_like(batch.log_q_NO)
        inputs = hidden_ND, head.weight_VD, batch.candidate_ids_NC
        if self.objective == "tilted":
            targets = batch.log_b_NO, batch.log_q_NO
            loss = fused_log_residual_loss(
                *inputs, *targets, self.alpha, normalizer, vocabulary=head.vocabulary, watch_NO=watch_NO
            )
        else:
            loss = fused_reverse_kl(
                *inputs, batch.log_q_NO, self.alpha, normalizer, vocabulary=head.vocabulary, watch_NO=watch_NO
            )
        return loss, watch_NO


def _with_sampled(hidden_ND: Tensor, head: Head, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs of the outcomes and of the sampled token, which may or may not be a candidate."""
    asked_NA = torch.cat([batch.candidate_ids_NC, batch.sampled_ids_N[:, None]], dim=1)
    logp_NO = outcome_logprobs(hidden_ND, head, asked_NA)
    logp_NC, other_N, sampled_N = apart_from_sampled(logp_NO[:, :-1], logp_NO[:, -1], asked_NA)
    return torch.cat([logp_NC, other_N[:, None]], dim=1), sampled_N


LossFunction = Callable[[Tensor, Head, Batch, float], tuple[Tensor, Tensor]]


def whole_vocabulary(hidden_ND: Tensor, head: Head, batch: Batch, normalizer: float) -> tuple[Tensor, Tensor]:
    """Stand in for a loss where only the student's log-probs are wanted, of all tokens."""
    logp_NV = torch.log_softmax(head.logits(hidden_ND), dim=-1)
    return logp_NV.new_zeros(()), logp_NV


class Trainee(nn.Module):
    """The student and its loss as one module."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        super().__init__()
        self.model = model
        head = describe_head(model, vocabulary)
        # Without its weight, which would stay whole here after the model is sharded.
        bias_V = None if head.bias_V is None else head.bias_V.detach().to("meta")
        self.head_description = replace(head, weight_VD=head.weight_VD.detach().to("meta"), bias_V=bias_V)
        self.packs = False  # until it is seen that its rows stay apart

    def head(self) -> Head:
        """The head with its weight as it is now: whole, in compute dtype, wherever a sharding module has put it."""
        described = self.head_description
        output = self.model.get_output_embeddings()
        return Head(output.weight, described.vocabulary, output.bias, described.scale, described.softcap)

    def look(self, pack: bool) -> None:
        """Find out by short passes, once the weights are there, if the head is as described and if rows can be packed.

        Of a sharded module it is a forward method of its own: all ranks look together.
        """
        check_head(self.model, self.head())
        self.packs = pack and pack_rows(self.model, self.head_description.vocabulary)

    def kept_states(self, batch: Batch) -> Tensor:
        """Hidden states of the kept decisions only: no other position goes through the head."""
        if self.packs:
            hidden_TD = packed_states(self.model, batch.input_ids_T, batch.positions_T, batch.lengths)
        else:
            hidden_TD = padded_states(self.model, batch.input_ids_T, batch.lengths)
        return hidden_TD[batch.states_N]  # (T, D) -> (N, D)

    def forward(self, batch: Batch, loss: LossFunction, normalizer: float) -> tuple[Tensor, Tensor]:
        """Return the loss and, without gradient, the student's outcomes log_pi_NO."""
        return loss(self.kept_states(batch), self.head(), batch, normalizer)


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
    """Look at the student as it is."""
    was_training = trainee.training
    trainee.eval()
    try:
        yield
    finally:
        trainee.train(was_training)
