"""`lweave rollout`: sample the student's own trajectories, once (appendix: Behavior trajectories)."""

from collections.abc import Callable, Sequence

import numpy as np

from lightning_weave.models.load import load_tokenizer
from lightning_weave.progress import Progress
from lightning_weave.stages import prompts as prompts_stage
from lightning_weave.stages.engines import open_sampler
from lightning_weave.stages.machine import my_share
from lightning_weave.stages.steps import Steps
from lightning_weave.store.ledger import measure
from lightning_weave.types import FINISH_REASONS, Prompt, Ragged, Request, Response, Rollouts, SamplingSettings

Respond = Callable[[list[Request]], list[Response]]


def run(steps: Steps, progress: Progress) -> None:
    """Sample every pending shard. Resumable: a shard is always sampled whole, in the same order."""
    prompts = prompts_stage.make(steps, progress)
    stage = steps.store.stage(steps.rollout)
    per_shard = steps.recipe.rollout.prompts_per_shard
    shards = -(-len(prompts) // per_shard)
    pending = my_share(stage.pending(shards))
    if pending:
        with (
            measure(steps.store.run_dir, "rollout") as meter,
            progress.bar("rollout", len(pending), "shard") as bar,
        ):
            respond = _own_responses(steps, prompts) if steps.recipe.rollout.from_ else _sampled_responses(steps)
            for shard in pending:
                wanted = range(len(prompts))[shard * per_shard : (shard + 1) * per_shard]
                requests = [
                    Request(prompts[prompt].token_ids, prompt, response)
                    for prompt in wanted
                    for response in range(steps.recipe.rollout.responses)
                ]
                responses = respond(requests)
                written = stage.write(shard, pack_rollouts(requests, responses))
                meter.add(tokens=sum(len(response.ids) for response in responses), written=written)
                bar.advance()
    stage.finish(Rollouts, shards)


def _sampled_responses(steps: Steps) -> Respond:
    section = steps.recipe.rollout
    sampler = open_sampler(
        steps,
        steps.student_path,
        engine=section.engine,
        python=section.python,
        dtype=section.dtype,
        batch_size=section.batch_size,
        trust_remote_code=steps.recipe.student.trust_remote_code,
    )
    settings = SamplingSettings(section.temperature, section.top_p, section.max_tokens, section.seed)
    return lambda requests: sampler.sample(requests, settings)


def _own_responses(steps: Steps, prompts: Sequence[Prompt]) -> Respond:
    tokenizer = load_tokenizer(steps.student_path, steps.recipe.student.trust_remote_code)
    groups = prompts_stage.own_trajectories(steps, tokenizer)
    assert len(groups) == len(prompts), "prompts/ was made from the same file"
    return lambda requests: [groups[request.prompt].responses[request.response] for request in requests]


def pack_rollouts(requests: Sequence[Request], responses: Sequence[Response]) -> Rollouts:
    """Put sampled responses into the arrays of a shard."""
    return Rollouts(
        prompt_R=np.array([request.prompt for request in requests], dtype=np.int32),
        response_R=np.array([request.response for request in requests], dtype=np.int32),
        finish_R=np.array([FINISH_REASONS.index(response.finish) for response in responses], dtype=np.uint8),
        prompt_ids=Ragged.of([np.array(request.prompt_ids, dtype=np.int32) for request in requests]),
        response_ids=Ragged.of([np.array(response.ids, dtype=np.int32) for response in responses]),
    )
