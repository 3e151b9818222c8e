"""How far two float32 computations of one number may be apart: from how it is computed, not as one machine shows it.

Kernels, threads and batches add up the same terms in another order, which moves a sum of n terms by at most n units of
their sizes taken together. What these tests are after is larger by far: a wrong token, position, mask or row moves a
log-probability by more than 1e-2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

UNIT = 2.0**-24  # the relative error of one float32 operation

# The log-probabilities of the small models lie between -16 and 0, where an operation errs by up to 16 units. Each is
# the end of a chain of sums of some 32 terms.
LOGPROB = 32 * 16 * UNIT  # 3e-5


def of_logprobs(hidden_ND: Tensor, weight_VD: Tensor, scale: float = 1.0) -> float:
    """Bound the distance of log-probabilities whose logits are products of D terms: twice, as logit and in log Z."""
    terms_NV = scale * hidden_ND.detach().double().abs() @ weight_VD.detach().double().abs().T
    return 2 * hidden_ND.shape[-1] * UNIT * terms_NV.max().item()


def assert_same_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, updates: int, learning_rate: float, apart: float
) -> None:
    """Compare what the same updates with Adam give: nearly all weights to within `apart`.

    Adam divides a gradient by its own size. A weight whose gradient is far above its rounding, by 1e-6 of the largest,
    moves by the same steps. One in a thousand may have a gradient that is nothing else, and step either way.
    """
    assert found.keys() == expected.keys()
    distances = torch.cat([(found[name] - weights).abs().flatten() for name, weights in expected.items()])
    assert distances.max().item() <= 2 * updates * learning_rate
    assert (distances > apart).float().mean().item() <= 1e-3
