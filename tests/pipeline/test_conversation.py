"""The student's prompt and what every side of an anchor reads come from one conversation, and survive an export.

The generated runs are few and short here; `make test-fuzz` has many and longer ones, of every architecture.
"""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from transformers import AutoTokenizer

from lightning_weave.cache.block import Block
from lightning_weave.errors import InputError
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages import rollout
from lightning_weave.stages.alignment import own_prompts
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import load_prompts, own_trajectories
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.views import export
from models.small_models import ARCHITECTURES
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of, save_checkpoint

TEMPLATE = (
    "{{ strftime_now('%Y') }}\n{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% set quiet = 'no' if enable_thinking is defined and not enable_thinking else '' %}"
    "{% for m in messages %}{{ m.role[0] }}: {% if m.role == 'assistant' %}{{ quiet }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.at }}]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}a: {{ quiet }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "hat"}'}}
ITSELF = {"model": "student", "post_prompt": {"template": "{prompt}"}}


def _base(root: Path, architecture: str, limit: int = 1024) -> dict[str, Any]:
    """A student, its own anchor, whose template writes tools, thinking and a date, and opens turns with a space."""
    recipe = make_recipe(root, architecture, "llama", "bytes")
    student = save_checkpoint(root / "long", architecture, "student", 1, limit=limit, stops=1)
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(student)
    recipe |= {"student": {"model": str(student)}, "anchors": {"one": ITSELF}, "date": "2020-02-03"}
    return recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _base(tmp_path_factory.mktemp("conversation"), "qwen3")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("conversations")
    return {name: _base(root / name, name, limit=4096) for name in ARCHITECTURES}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _from(recipe: dict[str, Any], folder: Path, rows: list[dict[str, Any]], **rollouts: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**recipe, "runs": str(folder), "rollout": {"from": str(path), "responses": 1, **rollouts}}


def _block(run: Run, name: str = "only") -> Block:
    cache = open_cache(run, name)
    return cache.block(range(len(cache)))


def _first_loss(run: Run) -> float:
    make_students(run, QUIET)
    return float(next(iter(read_lines(run.directory / "train" / "only" / "metrics.jsonl")))["loss"])


texts = st.lists(
    st.sampled_from(["the", " hat", "ab ", "是", "<think>", "<|end|>\nu: an", "<|stop|>", "\U000f0000", "\n\n", "é!"]),
    min_size=1,
    max_size=3,
).map("".join)


@st.composite
def logs(draw: st.DrawFn, turns: int) -> dict[str, Any]:
    """A logged run: some turns of both, with tools, tool calls, weights and thinking, or a prompt and a completion."""
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, turns))):
        messages.append(_user(draw(texts)))
        if draw(st.booleans()):
            messages += [
                _assistant("", tool_calls=[CALL]),
                {"role": "tool", "tool_call_id": "1", "content": draw(texts)},
            ]
        messages.append(_assistant(draw(texts), **draw(st.sampled_from([{}, {"weight": 0}, {"weight": 1}]))))
    messages += [_user(draw(texts)), _assistant(draw(texts))]
    row: dict[str, Any] = {"messages": messages, "id": draw(st.sampled_from(["x", "y"])), "hint": draw(texts)}
    if draw(st.booleans()):
        row = {**row, "prompt": messages[:-1], "completion": messages[-1:]}
        del row["messages"]
    row |= {"tools": TOOLS} if draw(st.booleans()) else {}
    return row | ({"thinking": draw(st.booleans())} if draw(st.booleans()) else {})


def runs(turns: int, rows: int) -> st.SearchStrategy[dict[str, Any]]:
    """Logs with up to so many turns before the last, or prompts to be answered; up to so many rows."""
    budget = st.sampled_from([60, 4000])
    logged = {"logs": st.lists(logs(turns), min_size=2, max_size=rows), "budget": budget}
    sampled = {
        "prompts": st.fixed_dictionaries({"chat": st.booleans(), "thinking": st.booleans()}),
        "format": st.sampled_from(["plain", "question-answer", "the {problem}!", "livecodebench"]),
        "asked": st.lists(texts, min_size=2, max_size=rows, unique=True),
        "budget": budget,
    }
    return st.fixed_dictionaries(logged) | st.fixed_dictionaries(sampled)


FEW, MANY = runs(turns=2, rows=4), runs(turns=5, rows=9)


def _recipe(base: dict[str, Any], folder: Path, drawn: dict[str, Any]) -> dict[str, Any]:
    recipe = {**base, "runs": str(folder), "score": {"token_budget": drawn["budget"]}}
    if "logs" in drawn:
        return _from(recipe, folder, drawn["logs"])
    source = folder / "asked.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n} {text}"}) + "\n" for n, text in enumerate(drawn["asked"])))
    prompts = {"source": str(source), "format": drawn["format"], **drawn["prompts"]}
    return {**recipe, "prompts": prompts, "rollout": {"responses": 2, "max_tokens": 5}}


def check_no_shift(recipe: dict[str, Any]) -> None:
    block = _block(make_cache(recipe))
    assert block.valid_KP.any()
    assert not block.r_KPC.any()


@settings(max_examples=8, derandomize=True)
@given(drawn=FEW)
def test_the_student_in_its_own_context_has_no_shift(
    base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_no_shift(_recipe(base, tmp_path_factory.mktemp("itself"), drawn))


@pytest.mark.fuzz
@settings(max_examples=60, derandomize=True)
@given(name=st.sampled_from(ARCHITECTURES), drawn=MANY)
def test_many_students_in_their_own_context_have_no_shift(
    bases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, name: str, drawn: dict[str, Any]
) -> None:
    check_no_shift(_recipe(bases[name], tmp_path_factory.mktemp("itself"), drawn))


def check_way_back(base: dict[str, Any], folder: Path, drawn: dict[str, Any]) -> None:
    hint = "{prompt} {hint}" if "logs" in drawn else "{prompt} an"
    recipe = _recipe({**base, "anchors": {"one": {**ITSELF, "post_prompt": {"template": hint}}}}, folder, drawn)
    recipe["train"] = {"prompts_per_round": 2, "updates_per_round": 1}
    run = make_cache(recipe)
    out = export.run(run, "only", folder / "out", QUIET)
    responses = run.recipe.rollout.responses
    back = make_cache({**recipe, "name": "back", "rollout": {"from": str(out), "responses": responses}})
    first, again = _block(run), _block(back)
    np.testing.assert_array_equal(again.decided_P, first.decided_P)
    np.testing.assert_array_equal(again.valid_KP, first.valid_KP)
    np.testing.assert_array_equal(again.r_KPC, first.r_KPC)
    assert _first_loss(back) == _first_loss(run) > 0


@settings(max_examples=3, derandomize=True)
@given(drawn=FEW)
def test_an_exported_data_set_has_the_same_first_loss_on_the_way_back(
    base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    check_way_back(base, tmp_path_factory.mktemp("export"), drawn)


@pytest.mark.fuzz
@settings(max_examples=20, derandomize=True)
@given(name=st.sampled_from(ARCHITECTURES), drawn=MANY)
def test_many_exported_data_sets_have_the_same_first_loss_on_the_way_back(
    bases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, name: str, drawn: dict[str, Any]
) -> None:
    check_way_back(bases[name], tmp_path_factory.mktemp("export"), drawn)


def test_a_mask_survives_export_and_import(base: dict[str, Any], tmp_path: Path) -> None:
    messages = [_user("ab"), _assistant("hat"), _user("the the the"), _assistant("an")]
    recipe = _from(base, tmp_path, [{"messages": messages}] * 2)  # two runs with one first prompt
    run = make_cache(recipe)
    out = export.run(run, "only", tmp_path / "out", QUIET)
    back = own_trajectories(run_of({**recipe, "rollout": {"from": str(out), "responses": 1}}))
    assert [group.responses for group in back] == [group.responses for group in own_trajectories(run)]
    assert 0 < sum(back[0].responses[0].decided or []) < len(back[0].responses[0].ids)


def test_columns_are_those_of_the_row_whatever_its_id(base: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"messages": [_user("ab"), _assistant("hat")], "id": "x", "hint": hint} for hint in ("the", "an")]
    recipe = _from(base, tmp_path, rows)
    recipe["anchors"] = {"one": {"model": "student", "post_prompt": {"template": "{prompt} {hint}"}}}
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    read = own_prompts(run, run.side("one", "post"), load_prompts(run, {"hint"})).read
    texts = [run.student.tokenizer.decode(ids) for ids in read if ids is not None]
    assert texts == [f"2020\nu: ab {hint}<|end|>\na: " for hint in ("the", "an")]
    recipe["rollout"]["responses"] = 2
    with pytest.raises(InputError, match=r"rollout\.from: the responses to prompt x have different values of 'hint'"):
        make_cache(recipe)


@pytest.mark.parametrize("prompt", ["student", "native"])
def test_messages_that_do_not_give_the_token_ids_are_refused(base: dict[str, Any], tmp_path: Path, prompt: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base["student"]["model"])
    ids = tokenizer("2020\nlook\nu: ab<|end|>\na: no", add_special_tokens=False)["input_ids"]
    row = {"prompt_ids": ids, "response_ids": [7], "id": "x", "messages": [_user("ab")], "tools": TOOLS}
    recipe = _from({**base, "anchors": {"one": {**ITSELF, "prompt": prompt}}}, tmp_path, [row])
    block = _block(make_cache(recipe))  # thinking is found out
    assert not block.r_KPC.any()
    for change, message in (
        ({"tools": None}, "other token ids than its messages give"),
        ({"messages": []}, "no messages"),
    ):
        with pytest.raises(InputError, match=f"the prompt x of rollout.from has {message}"):
            make_cache(_from(recipe, tmp_path / message[:2], [{**row, **change}]))


def test_special_tokens_in_a_text_stay_text(base: dict[str, Any], tmp_path: Path) -> None:
    recipe = _from(base, tmp_path, [{"messages": [_user("ab<|end|>\nu: an"), _assistant("the <|end|> hat")]}])
    run = run_of(recipe)
    tokenizer = run.student.tokenizer
    end = tokenizer.eos_token_id
    [group] = own_trajectories(run)
    assert group.prompt.token_ids.count(end) == 1, "the end of the user's turn"
    assert tokenizer.decode(group.prompt.token_ids) == "2020\nu: ab<|end|>\nu: an<|end|>\na: "
    response = group.responses[0]
    assert response.ids.index(end) == len(response.ids) - 1
    assert all(response.decided or [])
    assert tokenizer.decode(response.ids) == "the <|end|> hat<|end|>"


def test_a_turn_begins_after_the_space_that_opens_it(base: dict[str, Any], tmp_path: Path) -> None:
    """Where ` the` is one token, the space belongs to the prompt, as in a sampled response."""
    [group] = own_trajectories(run_of(_from(base, tmp_path, [{"messages": [_user("ab"), _assistant("the hat")]}])))
    tokenizer = AutoTokenizer.from_pretrained(base["student"]["model"])
    assert group.prompt.token_ids == tokenizer("2020\nu: ab<|end|>\na: ", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(group.responses[0].ids) == "the hat<|end|>"


def test_the_date_of_a_run_stays_that_of_its_first_day(base: dict[str, Any], tmp_path: Path) -> None:
    recipe = {**base, "runs": str(tmp_path), "prompts": {**base["prompts"], "chat": True}}
    del recipe["date"]
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "recipe.toml").write_text('date = "2021-01-01"\n')
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    assert {prompt.text[:5] for prompt in read_prompts(run.prompts_file)} == {"2021\n"}
    later = run_of({**recipe, "date": "2022-01-01"})
    assert later.stage("prompts").fingerprint != run.stage("prompts").fingerprint
    plain = {**recipe, "prompts": base["prompts"]}  # writes no date
    assert (
        run_of(plain).stage("prompts").fingerprint
        == run_of({**plain, "date": "2022-01-01"}).stage("prompts").fingerprint
    )


def test_how_prompts_are_rendered_is_no_setting_of_logged_runs(base: dict[str, Any], tmp_path: Path) -> None:
    recipe = _from(base, tmp_path, [{"messages": [_user("ab"), _assistant("hat")]}] * 2)
    run = make_cache(recipe)
    side = run.side("one", "post")
    for change in ({"chat": True}, {"thinking": False}):
        assert run_of({**recipe, "prompts": {**recipe["prompts"], **change}}).stage("score", side).complete
    recipe["rollout"]["responses"] = 2
    assert not run_of(recipe).stage("prompts").complete


def test_columns_reach_the_parts_and_legs_that_sample_again(base: dict[str, Any], tmp_path: Path) -> None:
    rows = [
        {
            "messages": [_user(f"ab {n}"), _assistant("hat")],
            "hint": f"the {n}",
            "kind": "k",
            "tools": TOOLS,
            "id": f"{n}",
        }
        for n in range(4)
    ]
    hinted = {"model": "student", "post_prompt": {"template": "{prompt} {hint}"}}
    other = {"model": "student", "post_prompt": {"template": "an {prompt}"}}
    recipe = _from(base, tmp_path, rows, max_tokens=4) | {
        "anchors": {"one": hinted, "two": other},
        "tags": {"column": "kind"},
        "compositions": {
            "refreshed": {"weights": {"k": {"one": 1.0}, "default": {"one": 1.0}}, "refresh": 2},
            "legs": {"method": "sequential", "weights": {"one": 0.5, "two": 0.5}, "sequence": ["two", "one"]},
        },
        "train": {"prompts_per_round": 1, "updates_per_round": 1},
    }
    run = make_cache(recipe)
    make_students(run, QUIET)
    assert all((run.directory / "train" / name / "final").is_dir() for name in recipe["compositions"])


def test_all_decisions_of_a_log_are_kept_where_all_have_a_target(base: dict[str, Any], tmp_path: Path) -> None:
    messages = [_user("ab"), _assistant("hat"), _user("the the the"), _assistant("an")]
    recipe = _from(base, tmp_path, [{"messages": messages}])
    recipe["train"] = {"prompts_per_round": 1, "updates_per_round": 1}
    run = make_cache(recipe)
    block = _block(run)
    assert block.valid_KP[0].tolist() == block.decided_P.tolist()
    make_students(run, QUIET)
    assert next(iter(read_lines(run.directory / "train" / "only" / "metrics.jsonl")))["kept"] == 1.0
