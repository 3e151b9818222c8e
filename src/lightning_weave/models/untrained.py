"""Find output rows that training never touched."""

from collections.abc import Sequence

from torch import Tensor

SAME_DIRECTION = 1 - 1e-4  # rows that only weight decay moved stay this parallel; exact equality misses them
NEAR_ZERO = 1e-3  # of the median row's norm


def untrained_rows(weight_VD: Tensor, special: Sequence[int]) -> set[int]:
    """List the special tokens whose row is parallel to another special row, or almost zero.

    Base checkpoints leave chat, tool and think tokens as they were initialised, often all alike.
    """
    ids = [id for id in special if id < len(weight_VD)]
    if not ids:
        return set()
    rows_SD = weight_VD[ids].float()
    norms_S = rows_SD.norm(dim=-1)
    sample = weight_VD[:: max(1, len(weight_VD) // 4096)].float().norm(dim=-1)
    near_zero_S = norms_S < NEAR_ZERO * sample.median()
    unit_SD = rows_SD / norms_S.clamp(min=1e-12)[:, None]
    cosine_SS = (unit_SD @ unit_SD.T).fill_diagonal_(-1.0)
    alike_S = (cosine_SS >= SAME_DIRECTION).any(dim=-1)
    return {id for id, found in zip(ids, (near_zero_S | alike_S).tolist(), strict=True) if found}
