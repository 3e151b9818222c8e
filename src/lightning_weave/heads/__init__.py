"""From hidden states to the few log-probabilities that are wanted of each position, never holding (positions x V).

`head.py` describes how a model makes its logits, `tiles.py` makes them in pieces that stay in cache, `scoring.py` reads
log-probabilities off them, `fused.py` trains on them in one pass, `plain.py` is the same through autograd for any head.
"""

from lightning_weave.heads.fused import fused_log_residual_loss, fused_reverse_kl
from lightning_weave.heads.head import Head, find_head, hidden_states
from lightning_weave.heads.plain import outcome_logprobs
from lightning_weave.heads.scoring import apart_from_sampled, candidate_logprobs, top_candidates
