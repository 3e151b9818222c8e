"""`lweave rollout`: sample the student's own trajectories, once (appendix: Behavior trajectories)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_weave.checks.findings import Finding, needs_prompts
from lightning_weave.checks.models import attempt, check_engine, check_room, check_student
from lightning_weave.checks.watch import Watch, check_rollouts, warn
from lightning_weave.errors import InputError
from lightning_weave.models.scorer import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.progress import Progress, show_rows
from lightning_weave.prompts import read_prompts
from lightning_weave.ranks import is_main_process
from lightning_weave.run import Run
from lightning_weave.stages.alignment import pack_rollouts
from lightning_weave.stages.engines import Engines, borrowed, gpus_of, note_engine, shards_at_once
from lightning_weave.stages.prompts import build_prompts, own_trajectories, planned_prompts
from lightning_weave.stages.work import LOCAL, ComputeShards, Executor, Job, ShardStats
from lightning_weave.store import append_line, read_lines
from lightning_weave.types import Prompt, Request, Response, Rollouts, SamplingSettings


def rollout(
    run: Run,
    progress: Progress,
    executor: Executor = LOCAL,
    watch: Watch = warn,
    engines: Engines | None = None,
) -> int:
    """Build the prompts and sample every pending shard; returns the number of all.

    Resumable: a shard is sampled whole, in the same order.
    """
    build_prompts(run, progress)
    section = run.recipe.rollout
    engine = run.recipe.engine_of("rollout")
    stage = run.stage("rollout")
    shards = -(-run.stage("prompts").require()["rows"] // section.prompts_per_shard)
    pending = stage.pending(shards)
    with borrowed(engines) as shared:
        job = Job(
            stage.path,
            pending,
            partial(open_sampler, engines=shared),
            fingerprint=stage.fingerprint,
            devices=gpus_of(engine),
            at_once=shards_at_once(engine, section.prompts_per_shard * section.responses),
            finish=partial(stage.finish, Rollouts, shards),
        )
        executor.run_jobs([job], run, progress)
    if is_main_process():
        Journal(stage.folder, f"journal-{stage.fingerprint}").remove()
    watch(lambda: check_rollouts(run), bool(pending), progress)
    return shards


@contextmanager
def open_sampler(run: Run, engines: Engines) -> Iterator[ComputeShards]:
    """Load what answers the prompts: the student's engine, which stays up for the next job, or a file of responses."""
    section = run.recipe.rollout
    stage = run.stage("rollout")
    prompts = read_prompts(run.prompts_file)
    own = None if section.from_ is None else own_trajectories(run)
    if own is None:
        _check_lengths(run, prompts)
        model = run.sampler or run.student
        engine = run.recipe.engine_of("rollout")
        token_ids = [prompt.token_ids for prompt in prompts]
        sampler = engines.sampler(run, model, engine, token_ids, section.max_tokens)
        note_engine(run, stage, model, engine)
    settings = SamplingSettings(section.temperature, top_p=1.0, max_tokens=section.max_tokens, seed=section.seed)
    journal = Journal(stage.folder, f"journal-{stage.fingerprint}")

    def compute_shards(shards: Sequence[int]) -> Iterator[ShardStats]:
        size = section.prompts_per_shard
        requests = {
            shard: [
                Request(prompts[prompt].token_ids, prompt, response)
                for prompt in range(len(prompts))[shard * size : (shard + 1) * size]
                for response in range(section.responses)
            ]
            for shard in shards
        }
        if own is None:
            sampled = sample_shards(sampler, settings, requests, journal)
        else:
            sampled = (
                (shard, [own[each.prompt].responses[each.response] for each in group])
                for shard, group in requests.items()
            )
        for shard, responses in sampled:
            written = stage.write(shard, pack_rollouts(requests[shard], responses))
            yield ShardStats(sum(len(response.ids) for response in responses), written)

    yield compute_shards


@dataclass(frozen=True)
class Journal:
    """Finished responses of unfinished shards, one file per shard: whoever computes a shard reads no other's."""

    folder: Path
    name: str  # with the fingerprint of the stage

    def read(self, shard: int) -> dict[tuple[int, int], Response]:
        rows = read_lines(self.folder / f"{self.name}-{shard:05d}.jsonl")
        return {(row["prompt"], row["response"]): Response(row["ids"], row["finish"]) for row in rows}

    def add(self, shard: int, request: Request, response: Response) -> None:
        row = {"prompt": request.prompt, "response": request.response, "ids": response.ids, "finish": response.finish}
        append_line(self.folder / f"{self.name}-{shard:05d}.jsonl", row)

    def remove(self) -> None:
        """Remove all files, once every shard is written."""
        for path in self.folder.glob(f"{self.name}-*.jsonl"):
            path.unlink(missing_ok=True)


def sample_shards(
    sampler: Sampler,
    settings: SamplingSettings,
    shards: Mapping[int, list[Request]],
    journal: Journal,
    late: bool = False,
) -> Iterator[tuple[int, list[Response]]]:
    """Yield every shard with its responses as soon as they are all there.

    Our own sampler gets one shard after another, so that what shares a batch does not depend on what is pending. Its
    responses are in the journal only if shards are written `late`, when others are sampled already.
    """
    if not isinstance(sampler, VLLMSampler):
        for shard, requests in shards.items():
            entries = journal.read(shard) if late else {}
            if all(each.key in entries for each in requests):
                yield shard, [entries[each.key] for each in requests]
                continue
            drawn = sampler.sample(requests, settings)
            for request, response in zip(requests, drawn, strict=True):
                if late:
                    journal.add(shard, request, response)
            yield shard, drawn
        return
    responses: dict[int, dict[int, Response]] = {}
    waiting = []
    for shard, requests in shards.items():
        entries = journal.read(shard)
        responses[shard] = {place: entries[each.key] for place, each in enumerate(requests) if each.key in entries}
        waiting += [(shard, place) for place in range(len(requests)) if place not in responses[shard]]
    for shard, requests in shards.items():
        if len(responses[shard]) == len(requests):
            yield shard, [response for _, response in sorted(responses.pop(shard).items())]
    for index, response in sampler.stream([shards[shard][place] for shard, place in waiting], settings):
        shard, place = waiting[index]
        journal.add(shard, shards[shard][place], response)
        responses[shard][place] = response
        show_rows(len(responses[shard]), len(shards[shard]))
        if len(responses[shard]) == len(shards[shard]):
            yield shard, [response for _, response in sorted(responses.pop(shard).items())]


def _check_lengths(run: Run, prompts: Sequence[Prompt]) -> None:
    """Refuse a prompt that leaves no room for a response before anything is sampled, not hours later."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    most = (run.student.context_limit or 0) - 1
    remedy = f"Set prompts.max_tokens to {most} at most; it is {run.recipe.prompts.max_tokens}"
    check_room(run.student, f"prompt {longest.id!r}", len(longest.token_ids), remedy)


def validate(run: Run) -> Iterator[Finding]:
    """Check the student, its engine, and that its context has room for prompts and responses."""
    section = run.recipe.rollout
    if not needs_prompts(run):
        return
    if section.from_ is not None:
        yield from check_student(run, "rollout")
        return
    faults = check_student(run, "rollout", run.recipe.engine.rollout)
    yield from faults
    yield from check_engine(run, "rollout")
    if faults:
        return
    try:
        prompts = planned_prompts(run)[0]
    except InputError:  # reported with the prompts
        return
    too_long = list(attempt("prompts", "context", _check_lengths, run, prompts))
    yield from too_long
    if too_long:
        return
    limit = run.student.context_limit
    if limit is not None and section.max_tokens >= limit:
        text = f"rollout.max_tokens is {section.max_tokens:,}, but the context of {run.student.name} has {limit:,} "
        text += "tokens: responses are cut off where prompt and response fill it"
        yield Finding("rollout", "context", "warning", text, {"context": limit})
