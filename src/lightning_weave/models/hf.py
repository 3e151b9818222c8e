"""The Hugging Face engine: a sampler and a scorer on plain transformers models."""

from lightning_weave.models.hf_refill import RefillingSampler
from lightning_weave.models.hf_sampler import HFSampler
from lightning_weave.models.hf_scorer import RowCandidates, Scorer, ScoreRow, hf_scorer

__all__ = ["HFSampler", "RefillingSampler", "RowCandidates", "ScoreRow", "Scorer", "hf_scorer"]
