"""Open the engine that a recipe names."""

from pathlib import Path

from lightning_weave.config import Dtype, Engine
from lightning_weave.models.hf import HFSampler
from lightning_weave.models.load import load_model, load_tokenizer, stop_ids, vocabulary_size
from lightning_weave.models.protocols import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.stages.machine import compute_dtype, set_up
from lightning_weave.stages.steps import Steps


def open_sampler(
    steps: Steps,
    model: Path,
    *,
    engine: Engine,
    python: str | None,
    dtype: Dtype,
    batch_size: int,
    trust_remote_code: bool = False,
) -> Sampler:
    """Load a model behind the Sampler protocol."""
    device = set_up(steps.recipe, steps.store)
    resolved = compute_dtype(dtype, model, device)
    tokenizer = load_tokenizer(model, trust_remote_code)
    stop, vocabulary = stop_ids(model, tokenizer), vocabulary_size(tokenizer)
    if engine == "vllm":
        name = str(resolved).removeprefix("torch.")
        return VLLMSampler(model, stop, vocabulary, name, python=python, trust_remote_code=trust_remote_code)
    loaded = load_model(model, dtype=resolved, device=device, trust_remote_code=trust_remote_code)
    return HFSampler(loaded, stop, vocabulary, batch_size)
