"""Sample shards without gaps: an engine that refills its batch gets the requests of all shards at once.

A shard is whole when its last response is there. Responses of shards that are not yet whole are kept in a journal, so a
kill loses none that has finished.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_weave.models.protocols import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.store import append_line, read_lines
from lightning_weave.types import Request, Response, SamplingSettings


@dataclass(frozen=True)
class Journal:
    """Finished responses of unfinished shards, one file per shard: whoever makes a shard reads no other's."""

    folder: Path
    name: str  # with the fingerprint of the step

    def read(self, shard: int) -> dict[tuple[int, int], Response]:
        rows = read_lines(self._path(shard))
        return {(row["prompt"], row["response"]): Response(row["ids"], row["finish"]) for row in rows}

    def add(self, shard: int, request: Request, response: Response) -> None:
        row = {"prompt": request.prompt, "response": request.response, "ids": response.ids, "finish": response.finish}
        append_line(self._path(shard), row)

    def _path(self, shard: int) -> Path:
        return self.folder / f"{self.name}-{shard:05d}.jsonl"

    def remove(self) -> None:
        """Remove them all, once every shard is whole."""
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
        yield from _one_after_another(sampler, settings, shards, journal if late else None)
        return
    responses: dict[int, dict[int, Response]] = {}
    for shard, requests in shards.items():
        entries = journal.read(shard)
        responses[shard] = {place: entries[each.key] for place, each in enumerate(requests) if each.key in entries}
    waiting = [
        (shard, place)
        for shard, requests in shards.items()
        for place in range(len(requests))
        if place not in responses[shard]
    ]
    for shard, requests in shards.items():
        if len(responses[shard]) == len(requests):
            yield shard, _in_order(responses.pop(shard))
    for index, response in sampler.stream([shards[shard][place] for shard, place in waiting], settings):
        shard, place = waiting[index]
        journal.add(shard, shards[shard][place], response)
        responses[shard][place] = response
        if len(responses[shard]) == len(shards[shard]):
            yield shard, _in_order(responses.pop(shard))


def _one_after_another(
    sampler: Sampler, settings: SamplingSettings, shards: Mapping[int, list[Request]], journal: Journal | None
) -> Iterator[tuple[int, list[Response]]]:
    for shard, requests in shards.items():
        entries = journal.read(shard) if journal else {}
        if all(each.key in entries for each in requests):
            yield shard, [entries[each.key] for each in requests]
            continue
        responses = sampler.sample(requests, settings)
        for request, response in zip(requests, responses, strict=True):
            if journal:
                journal.add(shard, request, response)
        yield shard, responses


def _in_order(responses: dict[int, Response]) -> list[Response]:
    return [responses[place] for place in sorted(responses)]
