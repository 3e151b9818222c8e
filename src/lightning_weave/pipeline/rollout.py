"""`lweave rollout`: sample the student's own trajectories, once (appendix: Behavior trajectories)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_weave.errors import InputError
from lightning_weave.models.load import load_tokenizer, saved_context_limit
from lightning_weave.models.protocols import Sampler
from lightning_weave.pipeline import prompts as prompts_stage
from lightning_weave.progress import Progress
from lightning_weave.runs.engines import close_sampler, open_sampler
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, Job, Made, do_here
from lightning_weave.types import FINISH_REASONS, Prompt, Ragged, Request, Response, Rollouts, SamplingSettings


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Sample every pending shard. Resumable: a shard is always sampled whole, in the same order."""
    prompts = prompts_stage.make(steps, progress)
    stage = steps.store.stage(steps.rollout)
    shards = -(-len(prompts) // steps.recipe.rollout.prompts_per_shard)
    do(Job("rollout", "", "shard", stage.pending(shards), open_student), steps, progress)
    stage.finish(Rollouts, shards)


@dataclass(frozen=True)
class Student:
    """The student answering prompts, or the user's own trajectories in its place."""

    steps: Steps
    prompts: Sequence[Prompt]
    respond: Callable[[list[Request]], list[Response]]
    sampler: Sampler | None = None

    def make(self, shard: int) -> Made:
        """Sample one shard."""
        section = self.steps.recipe.rollout
        wanted = range(len(self.prompts))[shard * section.prompts_per_shard : (shard + 1) * section.prompts_per_shard]
        requests = [
            Request(self.prompts[prompt].token_ids, prompt, response)
            for prompt in wanted
            for response in range(section.responses)
        ]
        responses = self.respond(requests)
        stage = self.steps.store.stage(self.steps.rollout)
        written = stage.write(shard, pack_rollouts(requests, responses))
        return Made(sum(len(response.ids) for response in responses), written)

    def close(self) -> None:
        close_sampler(self.sampler)


def open_student(steps: Steps) -> Student:
    """Load what answers the prompts, which are there already."""
    section, student = steps.recipe.rollout, steps.recipe.student
    prompts = prompts_stage.make(steps, Progress(quiet=True))
    if section.from_ is not None:
        groups = prompts_stage.own_trajectories(steps, load_tokenizer(steps.student_path, student.trust_remote_code))
        assert len(groups) == len(prompts), "prompts/ was made from the same file"
        return Student(
            steps, prompts, lambda requests: [groups[each.prompt].responses[each.response] for each in requests]
        )
    _check_lengths(steps, prompts)
    texts = [prompt.token_ids for prompt in prompts]
    sampler = open_sampler(steps, steps.student_path, section, texts, section.max_tokens, student.trust_remote_code)
    settings = SamplingSettings(section.temperature, section.top_p, section.max_tokens, section.seed)
    return Student(steps, prompts, lambda requests: sampler.sample(requests, settings), sampler)


def _check_lengths(steps: Steps, prompts: Sequence[Prompt]) -> None:
    """Refuse a prompt that leaves no room for a response before anything is sampled, not hours later."""
    limit = saved_context_limit(steps.student_path)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if limit is not None and len(longest.token_ids) >= limit:
        raise InputError(
            f"prompt {longest.id!r} has {len(longest.token_ids)} tokens, which leaves no room in the {limit} of "
            f"{steps.student_path}. Set prompts.max_tokens to {limit - 1} at most; it is "
            f"{steps.recipe.prompts.max_tokens}"
        )


def pack_rollouts(requests: Sequence[Request], responses: Sequence[Response]) -> Rollouts:
    """Put sampled responses into the arrays of a shard."""
    return Rollouts(
        prompt_R=np.array([request.prompt for request in requests], dtype=np.int32),
        response_R=np.array([request.response for request in requests], dtype=np.int32),
        finish_R=np.array([FINISH_REASONS.index(response.finish) for response in responses], dtype=np.uint8),
        prompt_ids=Ragged.of([np.array(request.prompt_ids, dtype=np.int32) for request in requests]),
        response_ids=Ragged.of([np.array(response.ids, dtype=np.int32) for response in responses]),
    )
