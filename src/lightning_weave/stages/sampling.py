"""What rollouts, evaluations, previews and training's probes share: rendered problems, and samples shard by shard."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark
from lightning_weave.config import Eval
from lightning_weave.errors import InputError
from lightning_weave.models.scorer import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.progress import show_rows
from lightning_weave.prompts import encode, form_of, format_messages, livecodebench, render, unmark
from lightning_weave.store import append_line, read_lines
from lightning_weave.types import Prompt, Request, Response, SamplingSettings


def sampling_settings(section: Eval, benchmark: Benchmark) -> SamplingSettings:
    """How a benchmark is sampled: as the recipe says, else as the benchmark does."""
    longest = section.max_tokens or benchmark.max_tokens
    return SamplingSettings(section.temperature, section.top_p, longest, section.seed)


def render_problems(benchmark: Benchmark, tokenizer: Any, section: Eval, day: str | None) -> list[Prompt]:
    """Render every problem as the paper does: code in LiveCodeBench's form, others in the section's."""
    form = form_of(section, benchmark.kind == "code")
    questions = []
    for problem in benchmark.problems:
        if problem.row is not None:
            messages = livecodebench(problem.question, str(problem.row.get("starter_code") or ""))
            columns = problem.row
        else:
            try:
                messages = format_messages(section, [{"role": "user", "content": problem.question}], problem.columns)
            except InputError as error:
                raise InputError(f"eval.format: problem {problem.id}: {error}") from error
            columns = {**problem.columns, "answer": problem.answer}
        known = {name: value for name, value in columns.items() if value is not None}
        text = render(messages, tokenizer, form, day)
        questions.append(Prompt(problem.id, messages, text, [], form=form, columns=known))
    ids = encode([one.text for one in questions], tokenizer, form.style == "chat")
    return [
        replace(one, text=unmark(one.text, tokenizer), token_ids=own) for one, own in zip(questions, ids, strict=True)
    ]


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
