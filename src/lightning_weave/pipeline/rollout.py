"""`lweave rollout`: sample the student's own trajectories, once (appendix: Behavior trajectories)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_weave.checks.watch import Watch, check_rollouts, warn
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.ranks import is_first
from lightning_weave.runs.engines import Engines, borrowed, gpus_of, note_engine, shards_at_once
from lightning_weave.runs.prompts import own_trajectories
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.stream import Journal, sample_shards
from lightning_weave.runs.trajectories import pack_rollouts
from lightning_weave.runs.work import Do, Job, Made, do_here, make_room
from lightning_weave.store import Stage
from lightning_weave.types import Prompt, Request, Response, Rollouts, SamplingSettings


def run(steps: Steps, progress: Progress, do: Do = do_here, watch: Watch = warn, engines: Engines | None = None) -> int:
    """Sample every pending shard; returns the number of all. Resumable: a shard is sampled whole, in the same order."""
    prompts = steps.store.stage(steps.prompts).require()["rows"]
    stage = steps.store.stage(steps.rollout)
    shards = -(-prompts // steps.recipe.rollout.prompts_per_shard)
    make_room(stage)
    pending = stage.pending(shards)
    section = steps.recipe.rollout
    with borrowed(engines) as engines:
        job = Job(
            "rollout",
            "",
            "shard",
            pending,
            partial(open_worker, engines=engines),
            fingerprint=stage.step.fingerprint,
            devices=gpus_of(section),
            at_once=shards_at_once(section),
        )
        do([job], steps, progress)
    stage.finish(Rollouts, shards)
    if is_first():
        _journal(stage).remove()
    watch(lambda: check_rollouts(steps), bool(pending), progress)
    return shards


@dataclass(frozen=True)
class RolloutWorker:
    """The student answering prompts, or the user's own trajectories in its place."""

    steps: Steps
    prompts: Sequence[Prompt]
    respond: Callable[[dict[int, list[Request]]], Iterable[tuple[int, list[Response]]]]

    def make(self, shards: Sequence[int]) -> Iterator[Made]:
        """Sample these shards."""
        stage = self.steps.store.stage(self.steps.rollout)
        requests = {shard: self._requests(shard) for shard in shards}
        for shard, responses in self.respond(requests):
            size = stage.write(shard, pack_rollouts(requests[shard], responses))
            yield Made(sum(len(response.ids) for response in responses), size)

    def _requests(self, shard: int) -> list[Request]:
        section = self.steps.recipe.rollout
        indices = range(len(self.prompts))[shard * section.prompts_per_shard : (shard + 1) * section.prompts_per_shard]
        return [
            Request(self.prompts[prompt].token_ids, prompt, response)
            for prompt in indices
            for response in range(section.responses)
        ]

    def close(self) -> None:
        """The engine stays up for the next job."""


def open_worker(steps: Steps, engines: Engines) -> RolloutWorker:
    """Load what answers the prompts."""
    section = steps.recipe.rollout
    prompts = read_prompts(steps.prompts_file)
    if section.from_ is not None:
        groups = own_trajectories(steps)
        assert len(groups) == len(prompts), "prompts/ was made from the same file"

        def look_up(shards: dict[int, list[Request]]) -> Iterator[tuple[int, list[Response]]]:
            for shard, requests in shards.items():
                yield shard, [groups[each.prompt].responses[each.response] for each in requests]

        return RolloutWorker(steps, prompts, look_up)
    _check_lengths(steps, prompts)
    texts = [prompt.token_ids for prompt in prompts]
    model = steps.sampler or steps.student
    sampler = engines.sampler(steps, model, section, texts, section.max_tokens)
    stage = steps.store.stage(steps.rollout)
    note_engine(steps, stage, model, section)
    settings = SamplingSettings(section.temperature, section.top_p, section.max_tokens, section.seed)
    journal = _journal(stage)
    return RolloutWorker(steps, prompts, lambda shards: sample_shards(sampler, settings, shards, journal))


def _journal(stage: Stage) -> Journal:
    return Journal(stage.folder, f"journal-{stage.step.fingerprint}")


def _check_lengths(steps: Steps, prompts: Sequence[Prompt]) -> None:
    """Refuse a prompt that leaves no room for a response before anything is sampled, not hours later."""
    limit = steps.student.context_limit
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if limit is not None and len(longest.token_ids) >= limit:
        raise InputError(
            f"prompt {longest.id!r} has {len(longest.token_ids)} tokens, which leaves no room in the {limit} of "
            f"{steps.student.path}. Set prompts.max_tokens to {limit - 1} at most; it is "
            f"{steps.recipe.prompts.max_tokens}"
        )
