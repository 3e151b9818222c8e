"""Open the engine that a recipe names, on GPUs of its own, once it is known to agree with the scorer."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from lightning_weave.config import Eval, Rollout
from lightning_weave.devices import own_gpus
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hf import HFSampler
from lightning_weave.models.memory import free_memory
from lightning_weave.models.protocols import Sampler
from lightning_weave.models.vllm import VLLMSampler, engine_version
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.parity import FILE, Agreement, Parity, ScoredRow, compare, judge, score_a_few
from lightning_weave.runs.steps import Steps

log = logging.getLogger(__name__)


def open_sampler(
    steps: Steps, checkpoint: Checkpoint, section: Rollout | Eval, prompts: Sequence[list[int]], max_tokens: int
) -> Sampler:
    """Load a model behind the Sampler protocol, for these prompts and at most so many tokens each."""
    device = set_up(steps.recipe, steps.store)
    free_memory()  # of models that nobody uses any more: an engine wants nearly all of a GPU
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        model = checkpoint.load(dtype, device)
        return HFSampler(model, checkpoint.stop_ids, checkpoint.vocabulary, section.batch_size)
    length = longest_context(checkpoint, prompts, max_tokens + 1)  # an engine scores no row that fills it
    start = partial(
        VLLMSampler.open,
        checkpoint,
        str(dtype).removeprefix("torch."),
        max_length=length,
        python=section.python,
        options=dict(section.options),
        environment=own_gpus(device, gpus_of(section)),
    )
    key = {
        "model": steps.identity_of(checkpoint),
        "engine": f"vllm {engine_version(section.python)}",
        "dtype": str(dtype),
        "options": dict(section.options),  # quantization and the like change what an engine computes
    }
    parity = Parity(steps.store.run_dir / FILE, key)
    if (known := parity.remembered()) is None:
        with parity.alone():
            if (known := parity.remembered()) is None:
                few = partial(score_a_few, checkpoint, prompts, length, dtype=dtype, device=device)
                may_skip = gpus_of(section) > 1  # the scorer has one
                return _start_checked(start, few, partial(parity.accept, section, checkpoint), may_skip)
    judge(known, section, checkpoint)
    return start()


def _start_checked(
    start: Callable[[], VLLMSampler],
    few: Callable[[], list[ScoredRow]],
    accept: Callable[[Agreement], None],
    may_skip: bool,
) -> VLLMSampler:
    """Score a few rows while the device is free, then start the engine and compare."""
    try:
        expected = few()
    except WeaveError as error:
        if isinstance(error, InputError) or not may_skip:
            raise
        log.warning("warning: vLLM is not compared with the scorer, which has one GPU only: %s", error)
        return start()
    free_memory()
    sampler = start()
    try:
        accept(compare(sampler, expected))
    except BaseException:
        sampler.close()
        raise
    return sampler


def gpus_of(section: Rollout | Eval) -> int:
    """Count the GPUs that one engine takes."""
    return int(section.options.get("tensor_parallel_size", 1)) * int(section.options.get("pipeline_parallel_size", 1))


def longest_context(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Say how long a sequence can get: memory is set aside for that, not for all that the model could hold."""
    wanted = max((len(ids) for ids in prompts), default=1) + max_tokens
    limit = checkpoint.context_limit
    return wanted if limit is None else min(wanted, limit)
