"""One decision, shown: against the cache and against the target worked out by hand."""

import json
from io import StringIO
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.views import inspect
from pipeline.expected import Words, read_cache
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe = make_recipe(tmp_path_factory.mktemp("inspect"), "qwen3", "llama", "bytes")
    one = recipe["anchors"]["one"]
    recipe["anchors"]["two"] = {"post": one["pre"], "pre": one["post"], "validity": "candidate"}
    recipe["compositions"] = {
        "only": {"weights": {"one": 1.0}},
        "mixed": {"weights": {"one": 0.25, "two": 0.75}, "alpha": 1.5},
        "endpoint": {"weights": {"one": 0.0, "two": 1.0}, "alpha": 0.5},
    }
    make_cache(recipe)
    return recipe


def tilt(behaviour: list[float], shift: list[float], alpha: float) -> list[float]:
    """Tilt one decision in plain Python; `other` is last and has no shift."""
    masses = [exp(b + r / alpha) for b, r in zip(behaviour, [*shift, 0.0], strict=True)]
    return [log(mass / sum(masses)) for mass in masses]


def test_every_number_is_that_of_the_cache(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    student = Words.of(Path(recipe["student"]["model"]))
    masked = 0
    partly = 0
    for number, (post, pre) in enumerate(zip(read_cache(run, "post"), read_cache(run, "pre"), strict=True)):
        for t in range(number % 3, len(post["response_ids"]), 3):
            seen = inspect.look(run, number, t)
            assert seen.ids == post["ids"][t].tolist()
            assert seen.behaviour == [*post["logp"][t].tolist(), post["other"][t]]
            assert seen.models["post"] == [
                score if known else None for score, known in zip(post["score"][t], post["mapped"][t], strict=True)
            ]
            known = (post["mapped"][t] & pre["mapped"][t]).tolist()
            shift = [
                float(a - b) if both else 0.0
                for a, b, both in zip(post["score"][t], pre["score"][t], known, strict=True)
            ]
            assert seen.shifts["one"] == [r if both else None for r, both in zip(shift, known, strict=True)]
            assert seen.valid == {"one": all(known), "two": any(known)}
            if any(known) and not all(known):  # the anchor lacks a token, and that is what is named
                partly += 1
                why = seen.masked["one"]
                assert [repr(inspect.visible(word)) in why for word in seen.tokens] == [not one for one in known]
            back = [-r for r in shift]
            mixed = [0.25 * r + 0.75 * b for r, b in zip(shift, back, strict=True)]
            for name, r, alpha in (("only", shift, 2.0), ("mixed", mixed, 1.5), ("endpoint", back, 0.5)):
                target = seen.targets[name]
                if all(known) or (name == "endpoint" and any(known)):
                    assert target == pytest.approx(tilt(seen.behaviour, r, alpha), abs=1e-5)
                else:
                    assert target is None
                    masked += 1
            before = post["prompt_ids"] + post["response_ids"][:t]
            if all(id in student.bytes_of for id in before):
                spelt = b"".join(student.bytes_of[id] for id in before)
                assert seen.before == spelt.decode(errors="backslashreplace")
    assert masked > 0
    assert partly > 0


@pytest.mark.slow
def test_targets_are_those_that_training_aims_at(recipe: dict[str, Any]) -> None:
    ways = {
        "opd": {"weights": {"one": 1.0}, "method": "teacher"},
        "sharp": {"method": "self", "sharpen": 0.5},
        "budget": {"weights": {"one": 1.0}, "kl_budget": 0.05},
        "dealt": {"weights": {"one": 0.5, "two": 0.5}, "method": "mixture"},
        "run": {"weights": {"one": 0.5, "two": 0.5}, "method": "sequential", "sequence": ["one", "two"]},
    }
    recipe = {**recipe, "compositions": {**recipe["compositions"], **ways}}
    run = run_of(recipe)
    assert "budget" not in inspect.look(run, 0, 0).targets, "alpha is solved when training begins"
    make_students(run, QUIET, ["budget"])
    alpha = run.stage("train", "budget").require()["alpha"]
    assert alpha != 2.0
    assert run.alpha("budget") == alpha
    assert {run.alpha(name) for name in ways if name != "budget"} == {2.0}
    dealt = set()
    for number, (post, pre) in enumerate(zip(read_cache(run, "post"), read_cache(run, "pre"), strict=True)):
        for t in range(len(post["response_ids"])):
            if not (post["mapped"][t] & pre["mapped"][t]).all():
                continue
            seen = inspect.look(run_of(recipe), number, t)
            assert "run" not in seen.targets
            shift = [float(a - b) for a, b in zip(post["score"][t], pre["score"][t], strict=True)]
            assert seen.targets["opd"][:-1] == pytest.approx(post["score"][t].tolist(), abs=1e-4)
            assert seen.targets["sharp"] == pytest.approx(tilt(seen.behaviour, gaps(seen.behaviour), 1.0), abs=1e-4)
            assert seen.targets["budget"] == pytest.approx(tilt(seen.behaviour, shift, alpha), abs=1e-5)
            back = [-r for r in shift]
            alone = {"one": tilt(seen.behaviour, shift, 2.0), "two": tilt(seen.behaviour, back, 2.0)}
            dealt |= {
                (number, name) for name, q in alone.items() if seen.targets["dealt"] == pytest.approx(q, abs=1e-5)
            }
    assert {name for _, name in dealt} == {"one", "two"}
    assert len(dealt) == len({number for number, _ in dealt}), "a row is dealt to one anchor"


def gaps(behaviour: list[float]) -> list[float]:
    """The shift that squares a distribution, against `other`."""
    return [b - behaviour[-1] for b in behaviour[:-1]]


def test_a_wrong_row_or_position_is_answered_with_the_range(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    length = len(read_cache(run)[3]["response_ids"])
    for row, position, message in (
        (12, 0, "row 12: this run has rows 0 to 11"),
        (-1, 0, "row -1: this run has rows 0 to 11"),
        (3, length, f"position {length}: row 3 has positions 0 to {length - 1}"),
        (3, -1, f"position -1: row 3 has positions 0 to {length - 1}"),
    ):
        with pytest.raises(InputError) as caught:
            inspect.look(run, row, position)
        assert str(caught.value) == message


def test_the_command_takes_a_run_directory_wherever_it_stands(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = Path(recipe["runs"]) / "small"
    (run / "recipe.toml").write_text(dump_recipe(check_recipe(recipe)))
    expected = inspect.look(run_of(recipe), 2, 1)
    moved = tmp_path / "elsewhere"
    moved.symlink_to(run, target_is_directory=True)
    for place in (run, moved, run / "recipe.toml"):
        result = CliRunner().invoke(app, ["inspect", str(place), "--row", "2", "--position", "1", "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        known = {name: found["targets"][name] for name in recipe["compositions"]}  # a directory may hold more
        assert {**found, "targets": known} == inspect.asdict(expected)
    with pytest.raises(InputError, match=r"not a run directory \(no recipe\.toml\)"):
        CliRunner().invoke(app, ["inspect", str(tmp_path), "--row", "0", "--position", "0"], catch_exceptions=False)


def test_what_is_not_scored_is_said(recipe: dict[str, Any]) -> None:
    one = recipe["anchors"]["one"]
    more = recipe | {"anchors": recipe["anchors"] | {"late": {**one, "bos": True}}}
    more["compositions"] = recipe["compositions"] | {"later": {"weights": {"one": 0.5, "late": 0.5}}}
    seen = inspect.look(run_of(more), 0, 0)
    assert seen.missing == ["late"]
    assert set(seen.shifts) == {"one", "two"}
    assert set(seen.targets) == set(recipe["compositions"])


def test_a_token_that_the_student_did_not_write_is_explained(recipe: dict[str, Any], tmp_path: Path) -> None:
    one = next(row for row in read_cache(run_of(recipe)) if len(row["response_ids"]) > 2)
    mask = [int(place != 1) for place in range(len(one["response_ids"]))]
    row = {"prompt_ids": one["prompt_ids"], "response_ids": one["response_ids"], "mask": mask}
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    logged = {**recipe, "runs": str(tmp_path), "rollout": {**recipe["rollout"], "from": str(tmp_path / "log.jsonl")}}
    logged["rollout"]["responses"] = 1
    make_cache(logged)
    seen = inspect.look(run_of(logged), 0, 1)
    assert "not written by the student" in seen.masked["one"]
    assert set(seen.targets.values()) == {None}


def shown(run: Run, row: int, position: int) -> str:
    out = StringIO()
    inspect.run(run, row, position, Console(file=out, width=60, force_terminal=False))
    return out.getvalue()


def test_a_person_sees_all_figures(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    seen, text = inspect.look(run, 1, 0), shown(run, 1, 0)
    lines = text.splitlines()
    assert lines[0].startswith("row 1 of 12: prompt p")
    assert any("candidate" in line and "behaviour" in line and "log p post" in line for line in lines)
    assert any("shift one" in line and "shift two" in line for line in lines)
    for logp in seen.behaviour:
        assert f"{exp(logp):.4f}" in text
    for logp in seen.models["pre"]:
        assert logp is None or f"{logp:+.3f}" in text
    assert sum(line.startswith(" other") for line in lines) == 3


def test_the_terminal_obeys_nothing_of_the_data(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", reference={"candidates": 60})
    student = Words.of(Path(recipe["student"]["model"]))
    escape = student.tokenizer("\x1b[31m[bold]\u202e")["input_ids"]
    (tmp_path / "own.jsonl").write_text(
        json.dumps({"prompt_ids": escape, "response_ids": escape, "id": "\x1b]0;"}) + "\n"
    )
    recipe["rollout"] |= {"from": str(tmp_path / "own.jsonl"), "responses": 1}
    text = shown(make_cache(recipe), 0, len(escape) - 1)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "\\x1b[31m[bold]" in text
