"""Logged runs of several turns: what the student wrote is learned from, everything else is context."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lightning_weave.checks import shifts
from lightning_weave.checks.findings import Finding
from lightning_weave.errors import InputError
from lightning_weave.maths import log_residual_loss
from lightning_weave.run import Run
from lightning_weave.stages import train as train_stage
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import own_trajectories, read_log
from lightning_weave.store.tables import Row
from lightning_weave.train.data import Batch, compose
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of
from rounding import LOGPROB

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.at }}>{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "hat"}'}}
RUNS = [
    {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "the"},
            {"role": "user", "content": "hat ab"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "an ab abc", "tool_call_id": "1"},
            {"role": "assistant", "content": "the hat"},
        ],
    },
    {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "hat"}]},
]
TURNS = [  # of each run: what stands before the student's turn, and the turn
    [
        ("look\ns:the\nu:hat ab\na:", "<look hat><|end|>"),
        ("look\ns:the\nu:hat ab\na:<look hat><|end|>\nt:an ab abc\na:", "the hat<|end|>"),
    ],
    [("u:ab\na:", "hat<|end|>")],
]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe whose student renders tools, tool calls and tool results."""
    recipe = make_recipe(tmp_path_factory.mktemp("logged"), "qwen3", "llama", "bytes", stops=1)
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(recipe["student"]["model"])
    return recipe


def _from(recipe: dict[str, Any], path: Path, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**recipe, "name": name, "rollout": {"from": str(path), "responses": 1, "prompts_per_shard": 1}}


def _ids(recipe: dict[str, Any], text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(recipe["student"]["model"])(text, add_special_tokens=False)["input_ids"]


def _whole(recipe: dict[str, Any]) -> tuple[Batch, Any]:
    cache = open_cache(make_cache(recipe), "only")
    block = cache.block(range(len(cache)))
    return compose(block, cache.weights, 2.0), block


PLACES = [{"at": "hat"}, {"in": "ab"}]  # one table's rows have all keys of all of them


@pytest.mark.parametrize("kind", ["directory", "splits", "parquet"])
def test_tables_of_other_tools_are_read_as_their_rows(student: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """A dataset that `datasets` saves: messages with and without tools, a completion, and what is null in each."""
    rows = []
    for place in PLACES:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": place}}
        turns = [*RUNS[0]["messages"][:2], {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"id": f"r{len(rows)}", "tools": json.dumps(TOOLS), "messages": turns, "answer": None})
    rows.append({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "hat", "weight": 1}]})
    earlier = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "an"}]
    pair = {
        "prompt": [*earlier, {"role": "user", "content": "abc"}],
        "completion": [{"role": "assistant", "content": "hat"}],
    }
    names = {name for row in (*rows, pair) for name in row}
    made = datasets.Dataset.from_list([{name: row.get(name) for name in sorted(names)} for row in (*rows, pair)])
    path = tmp_path / "table"
    if kind == "parquet":
        path = tmp_path / "table.parquet"
        made.to_parquet(path)
    else:
        (made if kind == "directory" else datasets.DatasetDict({"train": made})).save_to_disk(path)
    recipe = {**student, "name": kind, "runs": str(tmp_path), "rollout": {"from": str(path), "responses": 1}}
    plain = _from({**student, "runs": str(tmp_path)}, tmp_path / "plain.jsonl", [*rows, pair], "plain")
    del plain["rollout"]["prompts_per_shard"]
    found = [
        [
            (group.prompt.token_ids, group.responses[0].ids, group.responses[0].decided)
            for group in own_trajectories(run_of(one))
        ]
        for one in (recipe, plain)
    ]
    assert found[0] == found[1]
    tokenizer = AutoTokenizer.from_pretrained(student["student"]["model"])
    assert [tokenizer.decode(ids) for _, ids, _ in found[0]] == [
        "<look hat><|end|>",
        "<look ><|end|>",
        "hat<|end|>",
        "hat<|end|>",
    ]
    assert tokenizer.decode(found[0][3][0]).endswith("a:an<|end|>\nu:abc\na:")
    asked = [group.prompt.text for group in own_trajectories(run_of(recipe))]
    assert asked == [tokenizer.decode(ids) for ids, _, _ in found[0]]


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_logged_run_gives_the_losses_of_its_single_turns(
    student: dict[str, Any], tmp_path: Path, as_ids: bool
) -> None:
    """Given as messages, or as token ids with a mask."""
    turns = [(_ids(student, before), _ids(student, turn)) for run in TURNS for before, turn in run]
    single = [{"prompt_ids": before, "response_ids": turn, "id": str(n)} for n, (before, turn) in enumerate(turns)]
    rows: list[dict[str, Any]] = RUNS
    if as_ids:
        (first, call), (second, reply), (other, last) = turns
        between = second[len(first) + len(call) :]
        mask = [1] * len(call) + [0] * len(between) + [1] * len(reply)
        rows = [
            {"prompt_ids": first, "response_ids": [*call, *between, *reply], "mask": mask},
            {"prompt_ids": other, "response_ids": last},
        ]
    logged, block = _whole(_from(student, tmp_path / "log.jsonl", rows, f"logged-{as_ids}"))
    apart, _ = _whole(_from(student, tmp_path / "single.jsonl", single, "single"))
    written = [token for _, turn in turns for token in turn]
    assert block.sampled_P[block.decided_P].tolist() == written
    assert not block.decided_P.all()
    assert 0 < len(logged) <= len(written)
    assert logged.sampled_ids_N.tolist() == apart.sampled_ids_N.tolist()
    assert torch.equal(logged.candidate_ids_NC, apart.candidate_ids_NC)
    for name in ("log_b_NO", "log_q_NO", "r_NC"):
        np.testing.assert_allclose(getattr(logged, name), getattr(apart, name), atol=4 * LOGPROB, err_msg=name)
    losses = [log_residual_loss(one.log_b_NO, one.log_b_NO, one.log_q_NO, 2.0).sum() for one in (logged, apart)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=1e-3)


def test_what_is_said_of_a_context_counts_no_token_that_the_student_did_not_write(
    student: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with and without what a tool said after it: the same decisions, so the same shares of them."""
    (first, call), (second, _) = [(_ids(student, before), _ids(student, turn)) for before, turn in TURNS[0]]
    said = second[len(first) + len(call) :]
    row = {"prompt_ids": first, "messages": RUNS[0]["messages"][:2], "tools": TOOLS}
    alone = {**row, "response_ids": call}
    longer = {**row, "response_ids": [*call, *said], "mask": [1] * len(call) + [0] * len(said)}
    anchor = {"model": student["anchors"]["one"]["post"], "post_prompt": {"prefix": "the "}, "validity": "candidate"}
    recipe = {**student, "anchors": {"one": anchor}, "reference": {**student["reference"], "candidates": 250}}
    monkeypatch.setattr(shifts, "TOP", 0.5)  # of so few decisions
    figures = []
    for name, one in (("alone", alone), ("longer", longer)):
        run = make_cache(_from(recipe, tmp_path / f"{name}.jsonl", [one], name))
        (leak,) = shifts.judge_leak(run, "one")
        figures.append(leak.figures)
    assert figures[0]["nats"] > 0
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "ab"}]}, "no assistant turn"),
        ({"messages": [{"role": "robot", "content": "ab"}]}, "message 1 has the role 'robot'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 has no content, nor tool_calls"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "from = 'bot' must be one of human"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of f are not valid JSON",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "ab"},
                    {"role": "assistant", "content": "hat", "weight": 0},
                ]
            },
            "no assistant turn",
        ),
    ],
)
def test_what_is_no_log_is_refused_by_its_line(
    student: dict[str, Any], tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match="log.jsonl:1: .*" + message):
        own_trajectories(run_of(_from(student, tmp_path / "log.jsonl", [row], "refused")))


@pytest.mark.parametrize("composition", [{"refresh": 2}, {"method": "online"}])
def test_a_log_with_tools_is_not_sampled_again(
    student: dict[str, Any], tmp_path: Path, composition: dict[str, Any]
) -> None:
    """Not in the middle of training, when the first part has been paid for."""
    compositions = {"only": {**student["compositions"]["only"], **composition}}
    logged, single = (
        run_of(_from({**student, "compositions": compositions}, tmp_path / f"{name}.jsonl", rows, f"again-{name}"))
        for name, rows in (("logged", RUNS), ("single", RUNS[1:]))
    )
    said = r"compositions\.only samples while it trains, but .* rollout\.from = .*logged\.jsonl"
    with pytest.raises(InputError, match=said):
        train_stage.train(logged, QUIET)
    assert [re.search(said, finding.text) is not None for finding in _turns(logged)] == [True]
    assert not _turns(single)


def _turns(run: Run) -> list[Finding]:
    return [finding for finding in train_stage.validate(run) if finding.check == "turns"]


def test_a_template_that_rewrites_earlier_turns_is_refused(
    student: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(student)
    tokenizer = run.student.tokenizer
    kept = "{{ m.content if m.role != 'assistant' or loop.last else '' }}"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("{{ m.content }}", kept))
    turns = [{"role": role, "content": "hat"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(InputError, match=r"turn 2 .*prompt_ids"):
        read_log(Row("x:1", {"messages": turns}), run.student, None)


@pytest.mark.parametrize("mask", [[1], [0, 0], [1, 2], "yes"])
def test_a_mask_that_does_not_fit_is_refused(student: dict[str, Any], tmp_path: Path, mask: Any) -> None:
    rows = [{"prompt_ids": [5], "response_ids": [6, 7], "mask": mask}]
    with pytest.raises(InputError, match=r"own.jsonl:1: mask "):
        make_cache(_from(student, tmp_path / "own.jsonl", rows, "masked"))
