"""The paper's equations as pure functions, one function per equation."""

from lightning_weave.maths.losses import (
    LOG_FLOOR,
    direct_opd_loss,
    forward_kl,
    log_residual_loss,
    reverse_kl,
    sampled_kl,
    total_variation,
)
from lightning_weave.maths.metrics import aes, aes_of_means, mean_aes, pareto_front
from lightning_weave.maths.shifts import (
    LOG_RESIDUAL_FLOOR,
    RESIDUAL_FLOOR,
    compose_shifts,
    expected_kl,
    policy_shift,
    shift_covariance,
    solve_alpha_for_kl,
    tilted_target,
    with_other,
)
