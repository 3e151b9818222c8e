"""SIGKILL while an engine samples or scores: nothing is lost, and no response that had finished is sampled again."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Lab, Tally
from forked import Fault, Forked
from lightning_weave.config import load_recipe
from lightning_weave.models.vllm import request_seed
from lightning_weave.run import Run
from lightning_weave.stages.rollout import Journal
from lightning_weave.types import Request, Rollouts
from programs import write_program
from tiny import make_world, save_prompts

VERBS = {"rollout": (), "reference": (), "score": (), "eval": ("--only", "base")}
# Answers each request by its seed alone, in an order of its own, and says beside itself which seeds it answered. Hidden
# states are made of the token and its place. Nothing but Python: it starts at once.
ENGINE = """
import array, json, pathlib, sys
if "--version" in sys.argv:
    print(json.dumps({"version": "0.32.0"}))
    sys.exit()
settings = json.loads(sys.stdin.readline())
width = json.loads((pathlib.Path(settings["model"]) / "config.json").read_text())["hidden_size"]
print(json.dumps({"limit": settings["max_length"]}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "positions" in job:
        states = array.array("f")
        for ids, places in zip(job["rows"], job["positions"]):
            states.extend((ids[place] * 7 + place * 3 + d) % 11 / 11 for place in places for d in range(width))
        with open(job["file"], "wb") as file:
            states.tofile(file)
        print(json.dumps({"count": len(states) // width, "dtype": "float32"}), flush=True)
    elif "rows" in job:
        print(json.dumps({"logprobs": [[0.0] * (len(ids) - 1) for ids in job["rows"]]}), flush=True)
    else:
        for index in sorted(range(len(job["seeds"])), key=lambda index: job["seeds"][index] % 101):
            seed = job["seeds"][index]
            ids = [20 + seed // (place + 1) % 20 for place in range(seed % job["max_tokens"])] + [job["stop"][0]]
            with open(__file__ + ".answered", "a") as answered:
                answered.write(f"{seed}\\n")
            entry = {"index": index, "ids": ids, "finish": "stop", "logprobs": [0.0] * len(ids)}
            print(json.dumps({"question": job["question"], **entry}), flush=True)
        print(json.dumps({"question": job["question"], "end": True}), flush=True)
"""


@pytest.fixture(scope="module")
def engine_lab(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Lab:
    """A run whose samples and scores come from an engine, as it was before and after each verb."""
    root = tmp_path_factory.mktemp("engine-faults")
    script = root / "engine.py"
    script.write_text(ENGINE)
    python = write_program(root / "python", sys.executable, script)
    recipe = make_world(root / "world", prompts=6)
    stages = dict.fromkeys(("rollout", "reference", "score", "eval"), "vllm")
    engine = {**stages, "python": str(python), "parity": 1e9}
    bench = save_prompts(root / "world" / "bench.jsonl", 6, seed=9)
    recipe |= {"runs": "runs", "engine": engine, "compositions": {"both": recipe["compositions"]["both"]}}
    recipe["rollout"] |= {"prompts_per_shard": 2}
    recipe["eval"] = {
        "benchmarks": [f"file:{bench}"],
        "samples": 2,
        "max_tokens": 9,
        "chat": False,
        "block": 4,
    }
    made = Lab(root, recipe, forked)
    (root / "whole").mkdir()
    made.write("whole")
    for verb, more in VERBS.items():
        made.copy(f"before-{verb}", "whole")
        ended = made.lweave("whole", verb, *more, "--trust")
        assert ended.code == 0, ended.said
        made.copy(f"after-{verb}", "whole")
    return made


def finished(lab: Lab, name: str) -> set[int]:
    """The seeds of all rollouts that a run has, in whole shards or in the journal of the others."""
    recipe = load_recipe(lab.root / name / "r.toml").model_copy(update={"runs": str(lab.folder(name).parent)})
    run = Run(recipe)
    stage = run.stage("rollout")
    shards = [stage.open(Rollouts, shard).read() for shard in range(3) if shard not in stage.pending(3)]
    journal = Journal(stage.folder, f"journal-{stage.fingerprint}")
    pairs: list[tuple[int, Any]] = [pair for shard in range(3) for pair in journal.read(shard)]
    for rows in shards:
        pairs += zip(rows.prompt_R.tolist(), rows.response_R.tolist(), strict=True)
    return {request_seed(recipe.rollout.seed, Request([], *pair)) for pair in pairs}


def answered(lab: Lab) -> list[int]:
    return [int(line) for line in Path(f"{lab.root / 'engine.py'}.answered").read_text().split()]


@pytest.mark.parametrize("verb", VERBS)
def test_kills_beside_an_engine_leave_no_trace(engine_lab: Lab, tally: Tally, verb: str) -> None:
    lab, more = engine_lab, VERBS[verb]
    expected = lab.contents(f"after-{verb}")
    events = lab.lweave(lab.copy(f"count-{verb}", f"before-{verb}"), verb, *more, "--trust").events
    plans = [[2, 3, 2], [len(events) // 3, 2, 2], [2 * len(events) // 3, 1], [len(events)]]
    for trial, plan in enumerate(plans):
        name = lab.copy(f"killed-{verb}-{trial}", f"before-{verb}")
        for event in plan:
            known = finished(lab, name) if verb == "rollout" else set()
            before = len(answered(lab))
            ended = lab.lweave(name, verb, *more, "--trust", fault=Fault(event=event))
            assert ended.code == -signal.SIGKILL, ended.said
            assert known.isdisjoint(answered(lab)[before:])
            tally.survived[f"SIGKILL beside an engine during lweave {verb}"] += 1
        known = finished(lab, name) if verb == "rollout" else set()
        before = len(answered(lab))
        ended = lab.lweave(name, verb, *more, "--trust")
        assert ended.code == 0, ended.said
        assert known.isdisjoint(answered(lab)[before:])
        assert lab.lweave(name, "status", "--verify").code == 0
        assert lab.contents(name) == expected
