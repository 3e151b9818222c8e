"""From hidden states to a few log-probabilities per position, without a (positions x V) tensor.

`head.py` describes how a model computes its logits, `tiles.py` computes them in cache-sized tiles, `scoring.py` returns
log-probabilities, also differentiable ones for any head, `fused.py` has one-pass training losses.
"""

from lightning_weave.heads.fused import fused_log_residual_loss, fused_reverse_kl
from lightning_weave.heads.head import Head, check_head, describe_head, find_head, hidden_states
from lightning_weave.heads.scoring import candidate_logprobs, outcome_logprobs, separate_sampled, top_candidates
