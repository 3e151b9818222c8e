"""The Hugging Face engine: a sampler and a scorer on plain transformers models."""

from lightning_weave.models.hf_sampler import HFSampler

__all__ = ["HFSampler"]
