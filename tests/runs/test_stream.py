"""Sampling without gaps: an engine gets the requests of all shards at once, and nothing that has finished is lost."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_weave.errors import WeaveError
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.stages.rollout import Journal, sample_shards
from lightning_weave.types import Request, Response, SamplingSettings
from programs import write_program

SETTINGS = SamplingSettings(1.0, 1.0, 4, 0)
# Finishes requests in an order of its own: every third first. Dies after as many as the file beside it says.
ENGINE = """
import json, pathlib, sys
asked, most = (pathlib.Path(path) for path in sys.argv[1:3])
json.loads(sys.stdin.readline())
print(json.dumps({"limit": 100}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    prompts = job["prompts"]
    with open(asked, "a") as file:
        file.write(json.dumps(prompts) + "\\n")
    order = sorted(range(len(prompts)), key=lambda index: (-(index % 3), index))
    for index in order[: int(most.read_text())]:
        entry = {"ids": [*prompts[index], 1], "finish": "stop", "logprobs": [0.0] * 2}
        print(json.dumps({"question": job["question"], "index": index, **entry}))
    if int(most.read_text()) < len(prompts):
        sys.exit(7)
    print(json.dumps({"question": job["question"], "end": True}), flush=True)
"""


def shards(numbers: range) -> dict[int, list[Request]]:
    return {n: [Request([10 + 4 * n + m], 4 * n + m, 0) for m in range(4)] for n in numbers}


def expected(requests: list[Request]) -> list[Response]:
    return [Response([*request.prompt_ids, 1], "stop") for request in requests]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VLLMSampler]:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "most").write_text("1000")
    files = (tmp_path / name for name in ("engine.py", "asked", "most"))
    python = write_program(tmp_path / "python", sys.executable, *files)
    with VLLMSampler(Path("student"), frozenset({1}), 50, python=str(python)) as sampler:
        yield sampler


def asked(tmp_path: Path) -> list[list[list[int]]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_all_shards_are_in_flight_at_once_and_come_whole(engine: VLLMSampler, tmp_path: Path) -> None:
    wanted = shards(range(5))
    made = dict(sample_shards(engine, SETTINGS, wanted, Journal(tmp_path / "stage", "journal-a")))
    assert made == {shard: expected(requests) for shard, requests in wanted.items()}
    assert asked(tmp_path) == [[request.prompt_ids for requests in wanted.values() for request in requests]]


@pytest.mark.parametrize("died_after", [0, 1, 7, 13, 19])
def test_what_has_finished_is_never_sampled_again(died_after: int, tmp_path: Path, engine: VLLMSampler) -> None:
    wanted = shards(range(5))
    journal = Journal(tmp_path / "stage", "journal-a")
    (tmp_path / "most").write_text(str(died_after))
    whole: dict[int, list[Response]] = {}
    with pytest.raises(WeaveError, match="the vLLM process failed"):
        whole.update(sample_shards(engine, SETTINGS, wanted, journal))
    (tmp_path / "stage").mkdir(exist_ok=True)
    with open(tmp_path / "stage" / "journal-a-00000.jsonl", "a") as torn:
        torn.write('{"prompt": 3, "resp')
    assert sum(len(journal.read(shard)) for shard in wanted) == died_after
    (tmp_path / "most").write_text("1000")
    python = engine._engine.python
    pending = {shard: requests for shard, requests in wanted.items() if shard not in whole}
    with VLLMSampler(Path("student"), frozenset({1}), 50, python=python) as again:
        whole |= dict(sample_shards(again, SETTINGS, pending, journal))
    assert whole == {shard: expected(requests) for shard, requests in wanted.items()}
    assert len(asked(tmp_path)[1]) == 20 - died_after
    journal.remove()
    assert [journal.read(shard) for shard in wanted] == [{}] * 5


def test_a_journal_of_another_recipe_or_shard_is_not_read(tmp_path: Path) -> None:
    Journal(tmp_path, "journal-a").add(3, Request([1], 0, 0), Response([2], "stop"))
    assert Journal(tmp_path, "journal-b").read(3) == {}
    assert Journal(tmp_path, "journal-a").read(2) == {}
    assert Journal(tmp_path, "journal-a").read(3) == {(0, 0): Response([2], "stop")}
