"""Every equation of the paper has one home here: pure functions, one per equation.

Torch is imported when a function that needs it is first asked for, so that `maths.metrics` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_weave.maths.metrics import aes, aes_of_means, mean_aes, pareto_front

if TYPE_CHECKING:
    from lightning_weave.maths.budget import expected_kl, shift_covariance, solve_alpha_for_kl
    from lightning_weave.maths.losses import (
        LOG_FLOOR,
        direct_opd_loss,
        forward_kl,
        log_residual_loss,
        reverse_kl,
        sampled_kl,
        total_variation,
    )
    from lightning_weave.maths.shifts import (
        LOG_RESIDUAL_FLOOR,
        RESIDUAL_FLOOR,
        compose_shifts,
        policy_shift,
        tilted_target,
        with_other,
    )

__all__ = [
    "LOG_FLOOR",
    "LOG_RESIDUAL_FLOOR",
    "RESIDUAL_FLOOR",
    "aes",
    "aes_of_means",
    "compose_shifts",
    "direct_opd_loss",
    "expected_kl",
    "forward_kl",
    "log_residual_loss",
    "mean_aes",
    "pareto_front",
    "policy_shift",
    "reverse_kl",
    "sampled_kl",
    "shift_covariance",
    "solve_alpha_for_kl",
    "tilted_target",
    "total_variation",
    "with_other",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in ("shifts", "losses", "budget"):
            module = import_module(f"{__name__}.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
