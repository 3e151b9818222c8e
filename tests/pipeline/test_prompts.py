"""Prompts of a run: made once, made anew when what they come from changes, or the user's own trajectories."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightning_weave.errors import InputError
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages import prompts, rollout
from lightning_weave.types import FINISH_REASONS, Prompt, Rollouts
from pipeline.small_runs import QUIET, make_recipe, run_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes")


def test_prompts_are_made_once_and_again_when_the_source_changes(recipe: dict[str, Any]) -> None:
    made = make_prompts(run_of(recipe))
    path = Path(recipe["runs"]) / "small" / "prompts" / "prompts.jsonl"
    stamp = path.stat().st_mtime_ns
    assert make_prompts(run_of(recipe)) == made
    assert path.stat().st_mtime_ns == stamp
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    for prompt in made:
        assert prompt.token_ids == tokenizer(prompt.messages[0]["content"])["input_ids"]
    source = Path(recipe["prompts"]["source"])
    source.write_text(source.read_text() + json.dumps({"prompt": "more", "answer": "9", "id": "p9"}) + "\n")
    assert {prompt.id for prompt in make_prompts(run_of(recipe))} == {prompt.id for prompt in made} | {"p9"}


def make_prompts(run: Run) -> list[Prompt]:
    prompts.build_prompts(run, QUIET)
    return read_prompts(run.prompts_file)


def own(recipe: dict[str, Any], tmp_path: Path, *rows: Any, responses: int = 1) -> dict[str, Any]:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "own.jsonl").write_text("".join(line + "\n" for line in lines))
    recipe["rollout"] |= {"from": str(tmp_path / "own.jsonl"), "responses": responses}
    return recipe


def test_own_trajectories_are_taken_as_they_are(recipe: dict[str, Any], tmp_path: Path) -> None:
    end = AutoTokenizer.from_pretrained(recipe["student"]["model"]).eos_token_id
    turns = [{"role": "user", "content": "hello"}]
    rows = [
        {"prompt_ids": [5, 6], "response_ids": [7, end], "id": "x", "messages": turns, "answer": 3},
        {"prompt_ids": [9], "response_ids": [8, 8]},
        {"prompt_ids": [5, 6], "response_ids": [7], "finish": "stop"},
        {"prompt_ids": [9], "response_ids": []},
    ]
    run = run_of(own(recipe, tmp_path, *rows, responses=2))
    rollout.rollout(run, QUIET)
    made = make_prompts(run)
    assert [(prompt.token_ids, prompt.messages, prompt.answer) for prompt in made] == [
        ([5, 6], turns, "3"),
        ([9], [], None),
    ]
    shard = run.stage("rollout").open(Rollouts, 0).read()
    assert [row.tolist() for row in shard.response_ids] == [[7, end], [7], [8, 8], []]
    assert [row.tolist() for row in shard.prompt_ids] == [[5, 6], [5, 6], [9], [9]]
    assert [FINISH_REASONS[finish] for finish in shard.finish_R] == ["stop", "stop", "length", "length"]
    assert shard.prompt_R.tolist() == [0, 0, 1, 1]
    assert shard.response_R.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], r"own\.jsonl:1: not JSON"),
        (["[1]"], r"own\.jsonl:1: not a JSON object but a list"),
        ([{"prompt_ids": [], "response_ids": [1]}], r"own\.jsonl:1: prompt_ids is empty"),
        ([{"prompt_ids": [1]}], r"own\.jsonl:1: response_ids must be a list of token ids"),
        ([{"prompt_ids": [1], "response_ids": [True]}], r"response_ids must be a list of token ids"),
        (
            [{"prompt_ids": [1], "response_ids": [2]}, {"prompt_ids": [1, 269], "response_ids": [2]}],
            r":2: prompt_ids holds 269",
        ),
        (
            [{"prompt_ids": [1], "response_ids": [-1]}],
            r"response_ids holds -1, but the student's tokenizer has the ids 0 to 268",
        ),
        ([{"prompt_ids": [1], "response_ids": [2], "finish": "eos"}], r"finish = 'eos' must be one of stop, length"),
        ([{"prompt_ids": [1], "response_ids": [2], "messages": ["hi"]}], r"messages must be a list of"),
        ([{"prompt_ids": [1], "response_ids": [2]}] * 2, r"has 2 responses, but rollout\.responses = 1"),
        ([], r"own\.jsonl: has no rows"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    recipe: dict[str, Any], tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        rollout.rollout(run_of(own(recipe, tmp_path, *rows)), QUIET)


def test_a_file_that_is_not_there_is_named(recipe: dict[str, Any]) -> None:
    for name, message in (
        ("nothing.jsonl", r"rollout\.from = 'nothing\.jsonl': no such file"),
        ("nothing", "cannot be read"),
    ):
        recipe["rollout"]["from"] = name
        with pytest.raises(InputError, match=message):
            rollout.rollout(run_of(recipe), QUIET)


def test_blank_lines_are_skipped_and_nonsense_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [7]}
    assert len(make_prompts(run_of(own(recipe, tmp_path, "", row, "  ")))) == 1
    for wrong, message in (
        ({**row, "id": ["x"]}, r"own\.jsonl:1: id = \['x'\] must be text or a number"),
        ({**row, "answer": {"a": 1}}, r"own\.jsonl:1: answer = "),
        ({**row, "response_ids": []}, "all responses are empty"),
    ):
        with pytest.raises(InputError, match=message):
            make_prompts(run_of(own(recipe, tmp_path, wrong)))
