"""Open the engine that a recipe names, and check that its log-probabilities are the scorer's."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from lightning_weave.config import Eval, Rollout
from lightning_weave.errors import Mismatch
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hf import HFSampler, Scorer
from lightning_weave.models.protocols import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.types import Request, SamplingSettings

PARITY_ROWS = 4
PARITY_SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=32, seed=0)
log = logging.getLogger(__name__)


def open_sampler(
    steps: Steps, checkpoint: Checkpoint, section: Rollout | Eval, prompts: Sequence[list[int]], max_tokens: int
) -> Sampler:
    """Load a model behind the Sampler protocol, for these prompts and at most so many tokens each."""
    device = set_up(steps.recipe, steps.store)
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        model = checkpoint.load(dtype, device)
        return HFSampler(model, checkpoint.stop_ids, checkpoint.vocabulary, section.batch_size)
    sampler = VLLMSampler.open(
        checkpoint,
        str(dtype).removeprefix("torch."),
        max_length=longest_context(checkpoint, prompts, max_tokens),
        python=section.python,
        options=dict(section.options),
    )
    try:
        check_parity(sampler, checkpoint, prompts, section)
    except BaseException:
        sampler.close()
        raise
    return sampler


def close_sampler(sampler: Sampler | None) -> None:
    """End the engine's process, where it has one."""
    if isinstance(sampler, VLLMSampler):
        sampler.close()


def longest_context(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Say how long a sequence can get: memory is set aside for that, not for all that the model could hold."""
    wanted = max((len(ids) for ids in prompts), default=1) + max_tokens
    limit = checkpoint.context_limit
    return wanted if limit is None else min(wanted, limit)


def check_parity(
    sampler: VLLMSampler, checkpoint: Checkpoint, prompts: Sequence[list[int]], section: Rollout | Eval
) -> float:
    """Compare the engine's own log-probabilities of a few responses with the scorer's; returns nats per token."""
    requests = [Request(ids, number, 0) for number, ids in enumerate(prompts[:PARITY_ROWS])]
    drawn = sampler.sample_with_logprobs(requests, PARITY_SETTINGS)
    # The engine has taken the GPU, and these few tokens are nothing for a CPU.
    loaded = checkpoint.load(torch.float32, torch.device("cpu"))
    # The engine normalises over all rows of the output matrix, those of no token included.
    scorer = Scorer(loaded, loaded.get_output_embeddings().weight.shape[0])
    rows = [(request.prompt_ids, row.response.ids) for request, row in zip(requests, drawn, strict=True)]
    ours_N = np.concatenate([sampled_T for *_, sampled_T in scorer.candidates(rows, 1)])
    theirs_N = np.concatenate([row.logprobs for row in drawn])
    gap = float(np.abs(ours_N - theirs_N).mean())
    key = "rollout" if isinstance(section, Rollout) else "eval"
    if not gap <= section.parity:  # a NaN is no agreement either
        raise Mismatch(
            f"{key}.engine = {section.engine!r} and the scorer disagree by {gap:.4f} nats per token, more than "
            f"{key}.parity = {section.parity:g} ({len(ours_N)} tokens of {checkpoint.path}).\n"
            f'Try {key}.dtype = "float32" or another version of the engine; {key}.engine = "hf" always agrees'
        )
    log.info("%s: vLLM and the scorer agree to %.1e nats per token", key, gap)
    return gap
