"""`import lightning_weave as lw` on a tiny run, made and looked at from Python alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_weave as lw
from lightning_weave.api import Records
from lightning_weave.config import dump_recipe
from lightning_weave.errors import InputError
from tiny import make_world, save_prompts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> lw.Run:
    root = tmp_path_factory.mktemp("api")
    data = make_world(root, prompts=4)
    data["compositions"] = {"both": data["compositions"]["both"]}
    bench = save_prompts(root / "bench.jsonl", 3, seed=9)
    data["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "format": "question-answer"}
    (root / "tiny.toml").write_text(dump_recipe(lw.Run(data).recipe))
    run = lw.Run(lw.Recipe.load(root / "tiny.toml", ["train.epochs=1"]), quiet=True)
    assert run.recipe.train.epochs == 1
    with pytest.raises(lw.InputError, match=r"nothing is cached yet. Make it with: run.rollout\(\), run.reference\(\)"):
        _ = run.cache
    with pytest.raises(InputError, match=r"rollout is not there yet. Make it with: run.rollout\(\)"):
        run.reference()
    assert {row["state"] for row in run.status()} == {"missing"}
    run.rollout()
    run.reference()
    with pytest.raises(lw.InputError, match=r"no anchor is scored yet. Make it with: run.score\(\)"):
        run.shifts([0])
    with pytest.raises(InputError, match=r"Make it with: run.score\('acc-post'\)"):
        run.target("both", [0])
    run.score()
    students = run.train("both")
    assert students.keys() == {"both"}
    assert students["both"].samefile(run.path / "train" / "both" / "final")
    run.eval()
    return run


@pytest.mark.slow
def test_importing_the_package_is_light_and_its_names_are_there() -> None:
    code = (
        "import sys, lightning_weave as lw\n"
        "lw.Run({'name': 'x', 'student': {'model': 'm'}}); lw.Recipe; lw.load_recipe; lw.InputError\n"
        "assert not {'torch', 'transformers', 'datasets', 'matplotlib'} & sys.modules.keys()\n"
        "assert set(lw.__all__) <= set(dir(lw)); lw.maths.tilted_target; lw.heads.fused_log_residual_loss\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Rum'"):
        _ = lw.Rum


def test_a_notebook_keeps_its_own_way_to_draw() -> None:
    code = "import lightning_weave.report.figures, matplotlib; print(matplotlib.get_backend())"
    for chosen in ({"MPLBACKEND": "svg"}, {}):
        environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | chosen
        said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.strip().lower() == chosen.get("MPLBACKEND", "agg")


def test_stages_made_from_python_are_those_of_the_command(run: lw.Run) -> None:
    assert {row["state"] for row in run.status()} == {"complete"}
    log = (run.path / "log.txt").read_text()
    assert "Run(...).train('both')" in log
    moved = lw.Run.open(run.path, quiet=True)
    assert moved.recipe == run.recipe
    with pytest.raises(lw.InputError, match="not a run directory"):
        lw.Run.open(run.path.parent)


def test_targets_are_the_tilt_of_the_composed_shifts(run: lw.Run) -> None:
    rows = [0, 3, 5]
    target, shifts = run.target("both", rows), run.shifts(rows)
    block = run.cache.block(rows)
    assert target.log_b_PO.shape == (len(block.sampled_P), run.recipe.reference.candidates + 1)
    both_P = ~np.isnan(shifts["acc"]).any(1) & ~np.isnan(shifts["brief"]).any(1)
    np.testing.assert_array_equal(target.valid_P, both_P)
    assert 0 < both_P.sum() < len(both_P)
    r_PC = 0.5 * shifts["acc"] + 0.5 * shifts["brief"]
    for p in range(len(both_P)):
        log_q_O = target.log_b_PO[p].astype(np.float64)
        if both_P[p]:
            log_q_O[:-1] += r_PC[p] / 2.0
            log_q_O -= np.log(np.exp(log_q_O).sum())
        np.testing.assert_allclose(target.log_q_PO[p], log_q_O, atol=1e-5)
    assert target.alpha == 2.0
    np.testing.assert_array_equal(
        run.target("both").log_q_PO[: len(run.target("both", [0]).log_q_PO)], run.target("both", [0]).log_q_PO
    )
    with pytest.raises(lw.InputError, match="no such composition; this recipe has both"):
        run.target("bot", rows)


def test_a_block_is_the_same_in_torch(run: lw.Run) -> None:
    rows = [5, 0]
    block = run.cache.block(rows)
    copied = block.tensors()
    place = 0
    for row, (prompt, response) in enumerate(zip(block.rollouts.prompt_ids, block.rollouts.response_ids, strict=True)):
        assert copied.tokens[row].tolist() == [*prompt.tolist(), *response.tolist()]
        for token in response.tolist():
            assert copied.row_P[place] == row
            assert copied.sampled_P[place] == copied.tokens[row][copied.state_P[place] + 1] == token
            place += 1
    assert place == len(copied.log_b_PO)
    np.testing.assert_array_equal(copied.candidate_ids_PC, block.candidates.ids.flat)
    np.testing.assert_array_equal(copied.log_b_PO, run.target("both", rows).log_b_PO)
    np.testing.assert_array_equal(copied.r_KPC, block.r_KPC)
    np.testing.assert_array_equal(copied.valid_KP, block.valid_KP)
    assert copied.candidate_ids_PC.dtype == copied.tokens[0].dtype == torch.int64
    copied.r_KPC[:] = 0  # a copy: what is cached stays as it is
    assert np.abs(run.cache.block(rows).r_KPC).max() > 0


def test_rows_that_are_not_there_are_refused_by_number(run: lw.Run) -> None:
    last = len(run.cache) - 1
    for wrong in (-1, last + 1):
        for read in (run.cache.block, run.shifts, lambda rows: run.target("both", rows)):
            with pytest.raises(lw.InputError, match=f"row {wrong}: this run has rows 0 to {last}"):
                read([0, wrong])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None,), "recipe: must be a file, a list of files, a dict or a Recipe, got None"),
        (("nowhere.toml",), "nowhere.toml: no such recipe"),
        (
            ({"name": "x", "student": {"model": "m"}}, "train.epochs=3"),
            r"must be a list such as \[\"train.epochs=3\"\]",
        ),
        (({"name": "x", "student": {"model": "m"}}, {"train.epochs": 3}), "overrides: must be a list"),
        (({"name": "x", "student": {"model": "m"}}, ["train.epoch=3"]), "unknown key train.epoch. Did you mean"),
    ],
)
def test_a_wrong_call_says_what_it_wants(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(lw.InputError, match=said):
        lw.Run(*arguments)


def test_the_demo_takes_its_overrides_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lw.InputError, match="overrides: must be a list"):
        lw.Run.demo("name=mine")
    assert lw.Run.demo(["name=mine"], quiet=True).path.name == "mine"


def test_results_are_plain_records(run: lw.Run) -> None:
    points = run.points()
    assert [point["policy"] for point in points] == ["base", "both"]
    (benchmark,) = run.recipe.eval.benchmarks
    assert [point["benchmarks"]["bench"]["accuracy"] for point in points] == [point["accuracy"] for point in points]
    samples = run.samples("both", benchmark)
    assert len(samples) == 3
    assert run.samples("both", "bench") == samples  # as tables name it
    assert {"problem", "text", "correct", "tokens"} <= samples[0].keys()
    json.dumps(samples)
    with pytest.raises(lw.InputError, match="no such policy"):
        run.samples("bot", benchmark)
    with pytest.raises(lw.InputError, match="'bunch': no such benchmark; this recipe has bench"):
        run.samples("both", "bunch")
    with pytest.raises(lw.InputError, match="'bot': no such policy; this recipe has base, both"):
        run.eval("bot")
    assert any(row["check"] == "vocabulary" for row in run.doctor())


def test_what_a_person_looks_at_draws_itself_in_a_notebook(run: lw.Run) -> None:
    assert "train/both" in run._repr_html_()
    assert "<th>policy</th>" in run.points()._repr_html_()
    assert "<pre" in run.decision(0, 0)._repr_html_()


def test_a_table_of_many_long_responses_stays_readable() -> None:
    many = Records({"policy": f"p{number}", "text": "word " * 10_000} for number in range(1000))
    page = many._repr_html_()
    assert "<td>p49</td>" in page
    assert "<td>p50</td>" not in page
    assert "950 more rows" in page
    assert len(page) < 20_000
    assert "<td>p7</td>" in many[7:9]._repr_html_()


def test_the_loop_of_the_page_has_the_loss_of_training(run: lw.Run) -> None:
    page = Path(__file__).parents[1] / "docs" / "python.md"
    code = page.read_text().split("```python\n")[2].split("```")[0].replace('"even"', '"both"')
    names: dict[str, Any] = {"run": run}
    exec(code, names)
    target = run.target("both", [0, 5])
    kept = target.valid_P
    log_b_NO, log_q_NO = (torch.from_numpy(part[kept]).double() for part in (target.log_b_PO, target.log_q_PO))
    # The student is the behaviour policy still, so its own log-probabilities are those of the cache.
    expected = lw.maths.log_residual_loss(log_b_NO, log_b_NO, log_q_NO, 2.0).mean()
    torch.testing.assert_close(names["loss"].detach().double(), expected, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
