"""Effort levels: rows of a level have its weights, alpha and prompt; wrong recipes are refused."""

import io
import json
import shutil
import subprocess
import sys
import urllib.request
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from rich.console import Console

from lightning_weave.checks.preflight import preflight, this_machine
from lightning_weave.config import Control, check_recipe, dump_recipe, load_recipe, merge_tables
from lightning_weave.errors import InputError
from lightning_weave.plan import plan
from lightning_weave.progress import Progress
from lightning_weave.prompts import render, render_at_level, template_with_levels
from lightning_weave.report.results import describe, show_results, summaries
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.costs import cost_of
from lightning_weave.stages.forecast import forecast
from lightning_weave.stages.preview import preview
from lightning_weave.stages.run import make_everything, make_students
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.data import compose, find_dose, open_targets
from lightning_weave.train.schedule import Schedule, make_schedule
from lightning_weave.types import PromptForm
from lightning_weave.views.clean import forget, unneeded_folders
from pipeline.dial_world import LONGEST, make_dial_world
from pipeline.scored import copied, make_scored, trained
from pipeline.small_runs import student_tokenizer
from ports import vllm_server
from tiny import run_of

SAMPLES = 32
OPTIONS = {"/v1/chat/completions": {"n": SAMPLES, "max_tokens": LONGEST, "seed": 1}}
LEVELS = {"1": {"acc": 1.0}, "5": {"acc": 0.25, "brief": 0.75, "alpha": 0.5}}
EFFORT = {"levels": LEVELS, "default": "1", "control": {"prefix": "{level}+"}}
NAMED = {**EFFORT, "levels": {"a": LEVELS["1"], "b": LEVELS["5"]}, "default": "a"}
SYSTEM = Control(system="Reasoning effort: {level}")
# The shapes of templates in use: a default system turn (SmolLM2), a switch for thinking (Qwen3), a variable (gpt-oss).
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WITH_DEFAULT = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe nice.<|im_end|>\n' }}{% endif %}"
DROPS = "{%- for m in messages if m.role != 'system' %}{{ m.content }}{%- endfor %}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_scored(tmp_path_factory.mktemp("levels"))


def _open(recipe: dict[str, Any], composition: dict[str, Any]) -> Any:
    run = run_of({**recipe, "compositions": {"one": composition}})
    return run, open_cache(run, "one")


@pytest.mark.slow
def test_a_row_of_a_level_has_its_target_and_its_prompt(recipe: dict[str, Any]) -> None:
    """The target is that of a plain composition with the level's weights and alpha; only the prompt differs."""
    run, cache = _open(recipe, EFFORT)
    rows = list(range(len(cache)))
    find_dose(run, "one", cache, make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, slots=6))
    for slot, one in enumerate(run.recipe.compositions["one"].slots):
        _, plain = _open(recipe, {"weights": one.weights})
        expected = compose(plain.block(rows), plain.weights, one.alpha)
        numbers = [slot * len(cache) + row for row in rows]
        found = compose(cache.block(numbers), cache.weights, 2.0)
        torch.testing.assert_close(found.log_q_NO, expected.log_q_NO, rtol=1e-4, atol=1e-5)  # float32 weights
        assert torch.equal(found.log_b_NO, expected.log_b_NO)
        before, after = plain.block(rows).rollouts, cache.block(numbers).rollouts
        assert np.array_equal(before.response_ids.flat, after.response_ids.flat)
        text = [run.student.tokenizer.decode(ids) for ids in (before.prompt_ids[0], after.prompt_ids[0])]
        assert text[1] == (text[0] if one.level is None else f"{one.level}+{text[0]}")
        assert [cache.length(number) for number in numbers] == cache.block(numbers).tokens_R.tolist()


@pytest.mark.slow
def test_decisions_that_a_longer_prompt_pushes_out_of_the_context_are_masked(recipe: dict[str, Any]) -> None:
    _, cache = _open(recipe, EFFORT)
    assert cache.levels is not None
    assert cache.levels.limit == 256  # of the student
    for slot in (0, 1):
        block = cache.block([slot * len(cache) + row for row in range(len(cache))])
        limit = int(np.median(block.tokens_R))
        lengths = dict(zip(block.number_R.tolist(), map(len, block.rollouts.prompt_ids), strict=True))
        whole = compose(block, cache.weights, 2.0)
        limited = copy(cache)
        limited.levels = replace(cache.levels, limit=limit)
        batch = compose(limited.block(block.number_R), cache.weights, 2.0)
        fits = [
            (row, place)
            for row, place in zip(whole.rows_N.tolist(), whole.places_N.tolist(), strict=True)
            if lengths[row] + place <= limit
        ]
        assert list(zip(batch.rows_N.tolist(), batch.places_N.tolist(), strict=True)) == fits
        assert len(fits) < len(whole)
        assert max(batch.lengths) == limit


@pytest.mark.slow
def test_a_kl_budget_of_a_level_is_what_its_target_is_away(recipe: dict[str, Any]) -> None:
    budget = {"acc": 0.5, "brief": 0.5, "kl_budget": 0.02}
    run, cache = _open(recipe, {**NAMED, "levels": {"a": LEVELS["1"], "b": budget}})
    schedule = make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, slots=3)
    alphas = find_dose(run, "one", cache, schedule).levels
    rows = sorted({row for update in range(len(schedule)) for row in schedule.plain_rows(update)})
    batch = compose(cache.block([2 * len(cache) + row for row in rows]), cache.weights, 2.0)
    kl = (batch.log_q_NO.exp() * (batch.log_q_NO - batch.log_b_NO)).sum(dim=1).mean()
    assert alphas["a"] == 2.0
    assert float(kl) == pytest.approx(0.02, rel=0.02)  # rows count once here, in the schedule once per epoch


@pytest.mark.slow
def test_levels_train_refresh_and_are_evaluated_as_policies(recipe: dict[str, Any]) -> None:
    students = trained(recipe, dial=NAMED, other={**NAMED, "default": "b"}, parts={**NAMED, "refresh": 2, "epochs": 2})
    assert students.keys() == {"dial", "other", "parts"}
    benchmark = f"file:{recipe['prompts']['source']}"
    run = run_of({**recipe, "compositions": {"dial": NAMED}, "eval": {"benchmarks": [benchmark]}})
    assert run.policies == ["base", "dial", "dial@a", "dial@b"]
    prints = {run.stage("eval", policy, benchmark).fingerprint for policy in run.policies}
    assert len(prints) == 4
    card = (run.stage("train", "dial").folder / "final" / "README.md").read_text()
    assert "`b+`" in card  # no chat template: the prefix


BUDGET = {"acc": 0.25, "brief": 0.75, "kl_budget": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"lora": {"rank": 2}}),
        ("train", {"balance": "rows"}),
        ("train", {"balance": "tags"}),
        ("train", {"validation": 0.2}),
        ("anchors", {"acc": {"where": {"first": 4}}}),
        ("compositions", {"dial": {"levels": {"a": LEVELS["1"], "b": BUDGET}}}),
    ],
)
def test_levels_are_trained_and_forecast_with(
    recipe: dict[str, Any], tmp_path: Path, section: str, change: dict[str, Any]
) -> None:
    combined = {**copied(recipe, tmp_path), "compositions": {"dial": NAMED}, "tags": {"rules": {"product": r"\*"}}}
    combined = merge_tables(combined, {section: change})
    run = run_of(combined)

    def by_policy(run: Run) -> dict[str, Any]:
        return {point.policy: point for point in forecast(run)}

    before = by_policy(run)
    make_students(run, Progress(quiet=True))
    alphas = run.stage("train", "dial").require()["levels"]
    rows = describe({policy: (run, policy) for policy in ("dial", "dial@a", "dial@b")})
    assert rows["alpha"].to_dict() == {"dial": alphas[""], "dial@a": alphas["a"], "dial@b": alphas["b"]}
    assert alphas["a"] == alphas[""] == 2.0
    weights = {"a": {"acc": 1.0}, "b": {"acc": 0.25, "brief": 0.75}}
    plain = {level: {"weights": weights[level], "alpha": alphas[level]} for level in weights}
    after, alone = (by_policy(one) for one in (run, run_of({**combined, "compositions": plain})))
    assert list(before) == list(after) == ["base", "dial", "dial@a", "dial@b"]
    for policy, level in {"dial": "a", "dial@a": "a", "dial@b": "b"}.items():
        for found in (before[policy], after[policy]):
            assert (found.weights, found.alpha) == (weights[level], pytest.approx(alphas[level]))
            assert (found.tokens, found.kl) == pytest.approx((alone[level].tokens, alone[level].kl), rel=1e-4)


@pytest.mark.slow
def test_what_has_one_target_refuses_levels(recipe: dict[str, Any], tmp_path: Path) -> None:
    dial = {**recipe, "compositions": {"dial": NAMED}}
    with pytest.raises(InputError, match=r"compositions\.dial has effort levels"):
        open_targets(run_of(dial), "dial")
    with pytest.raises(InputError, match=r"policies\.aim\.decode.*effort levels"):
        run_of({**dial, "policies": {"aim": {"decode": "dial"}}})
    with pytest.raises(InputError, match=r"dial.*effort levels"):
        preview(run_of(dial), Progress(quiet=True), Console(quiet=True), 2)
    budget = {"acc": {**recipe["anchors"]["acc"], "kl_budget": 0.02}}
    (tmp_path / "r.toml").write_text(tomli_w.dumps({**dial, "anchors": {**recipe["anchors"], **budget}}))
    command = [sys.executable, "-m", "lightning_weave.cli", "run", str(tmp_path / "r.toml")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "anchors.acc.kl_budget" in ended.stderr


def test_numbers_between_the_ends_are_levels() -> None:
    slots = {slot.level: slot for slot in _check(EFFORT).slots}
    assert list(slots) == [None, "1", "5", "2", "3", "4"]
    backwards = _check({**EFFORT, "levels": dict(reversed(LEVELS.items())), "default": 1.0})
    assert (backwards.slots, backwards.weights) == (list(slots.values()), LEVELS["1"])
    assert slots["2"].weights == pytest.approx({"acc": 0.8125, "brief": 0.1875})
    assert slots["2"].alpha == pytest.approx(1.625)
    tenths = {"0": LEVELS["1"], "1": LEVELS["5"]}
    assert "0.3" in {slot.level for slot in _check({**EFFORT, "levels": tenths, "default": 0}).slots}


def test_every_row_is_trained_at_every_level_in_turn() -> None:
    schedule = Schedule(groups=10, responses=2, epochs=3, prompts_per_round=5, updates_per_round=1, seed=1, slots=3)
    numbers = [number for update in range(len(schedule)) for number in schedule.rows(update)]
    assert sorted(numbers) == list(range(60))
    assert sorted(schedule.plain_rows(0)) == sorted(number % 20 for number in schedule.rows(0))


def _check(composition: dict[str, Any]) -> Any:
    pair = {"post": "a", "pre": "b"}
    anchors = {"acc": pair, "brief": {"post": "c", "pre": "d"}}
    data = {"name": "x", "student": {"model": "s"}, "anchors": anchors, "prompts": {"chat": False}}
    return check_recipe({**data, "compositions": {"one": composition}}).compositions["one"]


@pytest.mark.parametrize(
    "change",
    [
        {"default": "medium"},
        {"default": None},
        {"levels": LEVELS, "default": 3},  # between those that are named
        {"control": {"prefix": "effort"}},
        {"control": {"prefix": "{level}{other}"}},
        {"control": {"prefix": "{level}", "system": "{level}"}},
        {"control": {"system": "{level}"}},  # without a chat template
        {"control": None},
        {"method": "mixture"},
        {"weights": {"acc": 1.0}},
        {"levels": {"a": {"acc": 1.0}}},
        {"levels": {"a": {"acc": 1.0}, "b": {"acc": 0.4}}},
        {"levels": {"a": {"acc": 1.0}, "b": {"other": 1.0}}},
        {"levels": {"a": {}, "b": {"acc": 1.0}}},  # the default
        {"levels": {"a": {"acc": 0.4}, "b": {"acc": 1.0}}},
        {"levels": {"a": {"acc": "all"}, "b": {"acc": 1.0}}},
        {"levels": {"a": 1.0, "b": {"acc": 1.0}}},
        {"levels": 2},
        {"levels": {"a": {"acc": 1.0}, "b": {"acc": 1.0, "alpha": 0.0}}},
        {"levels": {"a": {"acc": 1.0}, "b": {"acc": 1.0, "alpha": 1.0, "kl_budget": 0.1}}},
    ],
)
def test_wrong_levels_are_refused(change: dict[str, Any]) -> None:
    composition = {key: value for key, value in {**NAMED, **change}.items() if value is not None}
    with pytest.raises(InputError, match="compositions") as refused:
        _check(composition)
    assert "weights" in change or "one.weights" not in str(refused.value)  # a key that the recipe does not have


def test_a_recipe_with_levels_is_written_and_read_again(tmp_path: Path) -> None:
    pair = {"post": "a", "pre": "b"}
    data = {"name": "x", "student": {"model": "s"}, "anchors": {"acc": pair, "brief": pair}, "prompts": {"chat": False}}
    recipe = check_recipe({**data, "compositions": {"one": NAMED}})
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe


@pytest.mark.parametrize("own", [CHATML, WITH_DEFAULT + CHATML, "\n" + CHATML])
@pytest.mark.parametrize(
    "control",
    [
        SYSTEM,
        Control(prefix='"{level}"\n'),
        Control(system='%}}"\\ ~ 1 -%}}{{{{ {level}'),
        Control(prefix="{level}, {level}: "),
    ],
)
@pytest.mark.parametrize("before", [[], *([{"role": "system", "content": text}] for text in ("Be kind.", ""))])
def test_the_exported_template_renders_what_training_rendered(own: str, control: Control, before: list[Any]) -> None:
    tokenizer, served = student_tokenizer(), student_tokenizer()
    tokenizer.chat_template = own
    served.chat_template = template_with_levels(tokenizer, control, ["low", "high"])
    messages = [*before, {"role": "user", "content": "1+1?"}]
    form = PromptForm("chat")

    def serve(**settings: str) -> str:
        return str(served.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings))

    assert serve() == render(messages, tokenizer, form) == serve(reasoning_effort="unknown")
    for level in ("low", "high"):
        assert serve(reasoning_effort=level) == render_at_level(messages, tokenizer, form, None, control, level)
    assert len({serve(), serve(reasoning_effort="low"), serve(reasoning_effort="high")}) == 3


PARTS = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
PARTS += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"


@pytest.mark.parametrize("control", [SYSTEM, Control(prefix="Effort {level}. ")])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_the_exported_template_takes_parts_of_content_and_answers_of_tools(control: Control, system: list[Any]) -> None:
    """As OpenAI-compatible servers pass them: content as a list of parts, and turns after the user's."""
    tokenizer, served = student_tokenizer(), student_tokenizer()
    tokenizer.chat_template = PARTS
    served.chat_template = template_with_levels(tokenizer, control, ["low", "high"])
    before = [*system, {"role": "user", "content": "0?"}, {"role": "assistant", "content": "0"}]
    asked = [*before, {"role": "user", "content": "1+1?"}]
    expected = render_at_level(asked, tokenizer, PromptForm("chat"), None, control, "low")
    in_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in asked]
    after = [{"role": "assistant", "content": "calls"}, {"role": "tool", "content": "2"}]
    for messages, rest in ((asked, ""), (in_parts, ""), ([*asked, *after], "[assistant]calls[tool]2")):
        text = served.apply_chat_template(messages, tokenize=False, reasoning_effort="low")
        assert text == expected + rest


@pytest.mark.parametrize("variable", ["reasoning_effort", "thinking_effort"])
def test_a_variable_of_the_template_itself_is_used(variable: str) -> None:
    """As in gpt-oss: the template writes its own system turn, with a default."""
    tokenizer, served = student_tokenizer(), student_tokenizer()
    own = f"{{%- if {variable} is not defined -%}}{{%- set {variable} = 'medium' -%}}{{%- endif %}}"
    tokenizer.chat_template = own + "{{ 'Reasoning: ' + " + variable + " + '\n' }}" + CHATML
    control, form = Control(variable=variable), PromptForm("chat")
    served.chat_template = template_with_levels(tokenizer, control, ["low", "medium", "high"])
    messages = [{"role": "user", "content": "1+1?"}]

    def serve(**settings: str) -> str:
        return str(served.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings))

    for level in ("low", "medium", "high"):
        text = serve(reasoning_effort=level)
        assert text == render_at_level(messages, tokenizer, form, None, control, level)
        assert text.startswith(f"Reasoning: {level}\n")
    assert serve() == render(messages, tokenizer, form) == serve(reasoning_effort="medium")


def test_a_number_is_a_level_of_the_exported_template() -> None:
    tokenizer, served = student_tokenizer(), student_tokenizer()
    served.chat_template = template_with_levels(tokenizer, SYSTEM, None)
    messages = [{"role": "user", "content": "1+1?"}]
    form = PromptForm("chat")
    for effort, expected in (
        (2, render_at_level(messages, tokenizer, form, None, SYSTEM, "2")),
        (2.0, render_at_level(messages, tokenizer, form, None, SYSTEM, "2")),
        (0.5, render_at_level(messages, tokenizer, form, None, SYSTEM, "0.5")),
        ("0.5", render_at_level(messages, tokenizer, form, None, SYSTEM, "0.5")),
        (None, render(messages, tokenizer, form)),  # as servers say that nobody asked
    ):
        text = served.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, reasoning_effort=effort)
        assert text == expected


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("dial")
    recipe = make_dial_world(root)
    (root / "held-out.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "7"}}\n' for n in range(200, 216)))
    return {**recipe, "eval": {**recipe["eval"], "benchmarks": [f"file:{root / 'held-out.jsonl'}"]}}


@pytest.fixture(scope="module")
def dial(world: dict[str, Any]) -> Run:
    """A chat student with three levels of length, trained and evaluated."""
    run = run_of(world)
    make_everything(run, Progress(quiet=True))
    return run


@pytest.mark.slow
def test_a_student_answers_at_the_length_of_its_level(dial: Run) -> None:
    tokens = {policy: results[0].tokens for policy, results in summaries(dial).items()}
    assert tokens["effort@high"] > 2 * tokens["effort@medium"] > 4 * tokens["effort@low"]
    assert tokens["effort"] == pytest.approx(tokens["base"], rel=0.3) == tokens["effort@medium"]
    out = io.StringIO()
    show_results(dial, Console(file=out))
    for step in ("high to medium", "medium to low"):
        (line,) = (line for line in out.getvalue().splitlines() if line.startswith(f"effort: {step}"))
        assert line.endswith("accuracy within noise, tokens in order")  # this student never gives an answer


@pytest.mark.slow
def test_plan_counts_the_evaluation_of_every_level(world: dict[str, Any]) -> None:
    run, out = run_of(world), io.StringIO()
    plan.run(run.recipe, this_machine(run.recipe), None, False, Console(file=out))
    assert run.policies == ["base", "effort", "effort@high", "effort@medium", "effort@low"]
    assert "5 policies" in out.getvalue()


@pytest.mark.slow
def test_clean_keeps_the_evaluations_of_levels_and_forgets_them_with_their_student(dial: Run) -> None:
    """`effort@low` looks like a stage folder, whose name ends in a fingerprint."""
    evaluated = [dial.stage("eval", policy, dial.recipe.eval.benchmarks[0]).folder for policy in dial.policies]
    assert unneeded_folders([dial]) == []
    ledger = read_ledger(dial.directory)
    for policy, folder in zip(dial.policies, evaluated, strict=True):
        spent = [row["device_seconds"] for row in ledger if row["name"].startswith(f"{policy}/")]
        cost = cost_of(folder, dial.directory, ledger)
        assert cost is not None
        assert spent
        assert cost.seconds == sum(spent)
    with pytest.raises(InputError) as refused:
        forget(dial, "effort", Console(quiet=True), yes=False)
    listed = {line.split()[0] for line in str(refused.value).splitlines() if line.startswith("  ")}
    assert listed >= {f"eval/effort{level}" for level in ("", "@high", "@medium", "@low")}


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_vllm_serves_the_levels(dial: Run, vllm_python: str, tmp_path: Path) -> None:
    """Over the OpenAI-compatible API: another prompt and another length at each level, and the default otherwise."""
    final = dial.stage("train", "effort").folder / "final"
    messages = [{"role": "user", "content": "200?"}]
    tokenizer = dial.student.tokenizer
    with vllm_server(vllm_python, final, tmp_path / "server.log") as url:

        def ask(path: str, **effort: str) -> dict[str, Any]:
            body = {"model": str(final), "messages": messages, "chat_template_kwargs": effort, **OPTIONS.get(path, {})}
            request = urllib.request.Request(
                f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            return json.loads(urllib.request.urlopen(request, timeout=300).read())

        lengths = {}
        for level in (None, "high", "medium", "low", "extreme"):
            effort = {} if level is None else {"reasoning_effort": level}
            form, control = PromptForm("chat"), Control(system="Reasoning effort: {level}")
            text = render(messages, tokenizer, form)
            if level in ("high", "medium", "low"):
                text = render_at_level(messages, tokenizer, form, None, control, level)
            assert ask("/tokenize", **effort)["tokens"] == tokenizer(text)["input_ids"]
            usage = ask("/v1/chat/completions", **effort)["usage"]
            assert usage["prompt_tokens"] == len(tokenizer(text)["input_ids"])
            lengths[level] = usage["completion_tokens"] / SAMPLES
    assert lengths["high"] > 2 * lengths["medium"] > 4 * lengths["low"]
    for level in (None, "extreme"):
        assert lengths["low"] * 2 < lengths[level] < lengths["high"] / 2


OWN_DEFAULT = "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'low' %}{%- endif %}"
OWN_DEFAULT += "{{ reasoning_effort + '\n' }}" + CHATML
NO_SYSTEM = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}"
VARIABLE = {"control": {"variable": "reasoning_effort"}}
LOW = {**VARIABLE, "default": "low"}
SAME = {"low": {"soon": 1.0}, "high": {"soon": 1.0, "alpha": 3.0}}
CODE = {"id": "c", "question_content": "Double it", "platform": "atcoder", "contest_date": "2025-01-20T00:00:00"}
CODE |= {"question_title": "c", "question_id": "c", "contest_id": "c", "starter_code": "", "metadata": "{}"}
CODE |= dict.fromkeys(("public_test_cases", "private_test_cases"), '[{"input":"1","output":"2","testtype":"stdin"}]')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "effort", "change"),
    [
        (DROPS, {}, {}),
        (NO_SYSTEM + CHATML, {}, {}),
        (CHATML, VARIABLE, {}),  # the template has no such variable
        (OWN_DEFAULT, VARIABLE, {}),  # its own default is another level
        (OWN_DEFAULT, {**VARIABLE, "default": "high", "levels": SAME}, {}),  # and another alpha
        (OWN_DEFAULT, LOW, {"prompts": {"format": "livecodebench"}}),
        (OWN_DEFAULT, LOW, {"eval": {"benchmarks": ["file:HERE/code.jsonl"]}}),
        (CHATML, {}, {"rollout": {"from": "HERE/log.jsonl", "responses": 1}}),  # its second prompt is token ids alone
    ],
)
def test_what_the_student_would_not_read_is_refused_before_anything_is_spent(
    world: dict[str, Any], tmp_path: Path, template: str, effort: dict[str, Any], change: dict[str, Any]
) -> None:
    shutil.copytree(world["student"]["model"], tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    rows = [{"messages": turns}, {"prompt_ids": [1, 2], "response_ids": [3, 4]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "code.jsonl").write_text(json.dumps(CODE))
    changed = {"runs": str(tmp_path / "runs"), "student": {"model": str(tmp_path / "student")}}
    recipe = merge_tables({**world, **changed}, {"compositions": {"effort": effort}, **change})
    run = run_of(json.loads(json.dumps(recipe).replace("HERE", str(tmp_path))))
    errors = [one for one in preflight(run) if one.verdict == "error"]
    assert any("compositions.effort.control" in f"{one.about} {one.check}" for one in errors), errors
    assert not (tmp_path / "runs").exists()
