"""How a model computes logits from hidden states, and how to do so without its own forward pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_weave.errors import InputError, Mismatch, logits_not_finite

PROBE_TOKENS = 8
"""Length of the sequence on which a head is compared with its model."""


@dataclass(frozen=True)
class Head:
    """Logits are `scale * h W^T + bias`, then `softcap * tanh(logits / softcap)`.

    Rows of the matrix from `vocabulary` on belong to no token and are ignored everywhere.
    """

    weight_VD: Tensor
    vocabulary: int
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are only a matrix product."""
        return self.bias_V is None and self.scale == 1.0 and self.softcap is None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Compute all logits at once, differentiably, in float32 (float64 for float64). For a few positions only."""
        weight_VD = self.weight_VD[: self.vocabulary]
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            logits_NV = linear(hidden_ND.to(dtype), weight_VD.to(dtype))
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.bias_V is not None:
            logits_NV = logits_NV + self.bias_V[: self.vocabulary]
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


def hidden_states(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """Run a transformers causal LM up to its final norm, without its logits.

    Keywords go to the base model (attention_mask, position_ids, ...). A peft wrapper is unwrapped; its adapters are
    inside the wrapped model.
    """
    model = _unwrapped(model)
    body = model.base_model
    if body is model:
        raise InputError(f"{type(model).__name__} has no base model below its head. Use a transformers causal LM")
    return body(input_ids=input_ids, **{"use_cache": False, **kwargs}).last_hidden_state


def find_head(model: Any, vocabulary: int) -> Head:
    """Describe the head of a transformers causal LM, and check it against the model's own logits."""
    head = describe_head(model, vocabulary)
    check_head(model, head)
    return head


@torch.no_grad()
def check_head(model: Any, head: Head) -> None:
    """Refuse a model whose own logits are not what its head is described to compute."""
    model = _unwrapped(model)
    was_training = model.training
    model.eval()
    try:
        ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % head.vocabulary
        expected_NV = model(input_ids=ids, use_cache=False).logits[0, :, : head.vocabulary].float()
        actual_NV = head.logits(hidden_states(model, ids)[0]).float()
    finally:
        model.train(was_training)
    if not bool(expected_NV.isfinite().all()):
        raise logits_not_finite("", model.name_or_path or type(model).__name__)
    # A low-precision model rounds its logits; these are not rounded.
    tolerance = max(1e-4, 2 * torch.finfo(head.weight_VD.dtype).eps) * max(1.0, expected_NV.abs().max().item())
    worst = (actual_NV - expected_NV).abs().max().item()
    if not worst <= tolerance:
        raise Mismatch(
            f"the logits of {type(model).__name__} are not scale * h W^T + bias with an optional soft cap: "
            f"they differ by {worst:.3g} at scale {head.scale:g}, bias {head.bias_V is not None}, cap {head.softcap}. "
            f"This architecture cannot be scored or trained. Use another checkpoint."
        )


def describe_head(model: Any, vocabulary: int) -> Head:
    """Describe the head of a transformers causal LM from its modules and configuration; its weights may be absent."""
    model = _unwrapped(model)
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        raise InputError(
            f"the output layer of {type(model).__name__} is {type(module).__name__}, not a linear layer of floats. "
            f"Load the model unquantised and without adapters on its head"
        )
    rows = module.weight.shape[0]
    if not 0 < vocabulary <= rows:
        raise InputError(
            f"the tokenizer has {vocabulary} tokens but the head of {type(model).__name__} has {rows} rows. "
            f"Use the tokenizer it was trained with, or add rows: model.resize_token_embeddings({vocabulary})"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0  # Cohere, Falcon
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite divides
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return Head(module.weight, vocabulary, module.bias, float(scale), None if softcap is None else float(softcap))


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
