"""A directory for the hub: complete, made again by the same command, and never put over anything else."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import metadata_load, parse_eval_result_entries

from hub import serve_hub
from lightning_weave.cli.commands import app
from lightning_weave.config import dump_recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from lightning_weave.store import write_atomic
from lightning_weave.views import export as card
from report.evaluated import write_evaluations
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path_factory.mktemp("card"), prompts=4)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    run = run_of(recipe)
    make_cache(run, QUIET)
    make_students(run, QUIET)
    return run


def test_the_directory_holds_student_card_and_recipe(trained: Run, tmp_path: Path) -> None:
    out = card.card(trained, "both", tmp_path / "my-student", QUIET)
    final = trained.directory / "train" / "both" / "final"
    assert (out / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in final.iterdir()} | {"recipe.toml"}
    assert load_recipe([out / "recipe.toml"]) == trained.recipe
    text = (out / "README.md").read_text()
    assert "| acc | 0.5 | 0.25 |" in text
    assert "Not evaluated yet (`lweave eval RECIPE --only both`)" in text
    assert 'pipeline("text-generation", model=' in text
    assert str(trained.student.path.parent) not in text  # no path of this machine
    short = text.partition("```toml\n")[2].partition("```")[0]
    assert tomllib.loads(short)["compositions"]["both"]["weights"] == {"acc": 0.5, "brief": 0.5}
    assert 2 * len(short.splitlines()) < len(dump_recipe(trained.recipe).splitlines())
    (out / "adapter").mkdir()  # which a student of LoRA has
    assert card.card(trained, "both", out, QUIET) == out, "made by this command, so it may be replaced"


def test_the_hub_gets_the_licence_of_the_student_and_the_results(trained: Run, tmp_path: Path) -> None:
    bench = save_prompts(tmp_path / "sums.jsonl", 3)
    recipe = trained.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    recipe["eval"] |= {"benchmarks": [f"file:{bench}"], "chat": False}
    run = run_of(recipe)
    write_evaluations(run, {"base": (0.0, 50.0), "both": (1.0, 40.0)}, samples=6)
    readme = run.student.path / "README.md"
    readme.write_text("---\nlicense: other\nlicense_name: mine\ntags: [x]\n---\n# A model\n")
    try:
        card.card(run, "both", tmp_path / "out", QUIET)
    finally:
        readme.unlink()
    said = metadata_load(tmp_path / "out" / "README.md")
    assert (said["license"], said["license_name"], said["tags"]) == ("other", "mine", ["lightning-weave"])
    (model,) = said["model-index"]
    assert model["name"] == "tiny-both"
    (result,) = model["results"]
    assert result["dataset"]["name"] == "sums"
    (metric,) = result["metrics"]
    assert (metric["type"], metric["value"]) == ("accuracy", 100.0)
    assert metric["name"] == "accuracy in %, mean of 6 samples of 3 problems ± 0.0 (95 %), one training seed"
    card.card(run, "both", tmp_path / "out", QUIET)
    assert "license" not in metadata_load(tmp_path / "out" / "README.md"), "none is known"


def test_nothing_else_is_replaced(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    run_dir = trained.directory
    write_atomic(run_dir / "recipe.toml", dump_recipe(trained.recipe).encode())
    final = run_dir / "train" / "both" / "final"
    before = sorted(run_dir.rglob("*"))
    for place in (tmp_path / "precious", run_dir, final):  # the last two have a recipe, or a card, of their own
        with pytest.raises(InputError, match="was not made by this command"):
            card.card(trained, "both", place, QUIET)
    assert sorted(run_dir.rglob("*")) == before
    with pytest.raises(InputError, match="no directory can be made there"):
        card.card(trained, "both", run_dir / "recipe.toml" / "x", QUIET)
    with pytest.raises(InputError, match="no such composition; this run has both"):
        card.card(trained, "bot", None, QUIET)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the hub's client, which calls httpx in an old way
def test_a_student_is_pushed_with_card_results_and_report(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client uploads to a hub on this machine: private unless asked otherwise, and only what changed."""
    rows = [{"id": n, "problem": f"{n}+1", "answer": n + 1} for n in range(30)]
    problems = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    recipe = trained.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    recipe["eval"] |= {"benchmarks": ["aime-2025"], "chat": False}
    with serve_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.push_files("datasets/MathArena/aime_2025", {"test.jsonl": problems})
        run = run_of(recipe)
        write_evaluations(run, {"base": (0.0, 50.0), "both": (1.0, 40.0)}, samples=6)
        file = tmp_path / "tiny.toml"
        file.write_text(dump_recipe(run.recipe))
        words = ["export", str(file), "--composition", "both", "--out", str(tmp_path / "out"), "--push", "me/tiny"]
        app(words, standalone_mode=False)
        assert hub.private == {"me/tiny": True}
        files = list(hub.commits["me/tiny"].values())[-1]
        final = trained.directory / "train" / "both" / "final"
        assert files["model.safetensors"] == (final / "model.safetensors").read_bytes()
        (tmp_path / "README.md").write_bytes(files["README.md"])
        (model,) = metadata_load(tmp_path / "README.md")["model-index"]
        assert model["results"][0]["dataset"]["type"] == "MathArena/aime_2025"
        (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/aime-2025.yaml"]))
        assert (entry.dataset_id, entry.value) == ("MathArena/aime_2025", 100.0)
        assert files["report/index.html"].lstrip().lower().startswith(b"<!doctype html>")
        large = len(hub.large)
        app(words, standalone_mode=False)
        assert len(hub.large) == large
        hub.refused = 0
        with pytest.raises(InputError, match="me/tiny") as raised:
            app(words, standalone_mode=False)
        assert raised.value.code == 2
        hub.refused = None
        app([*words[:-1], "me/open", "--public"], standalone_mode=False)
        assert hub.private["me/open"] is False
    for wrong in ([*words[:-1], "tiny"], [*words, "--as", "targets"]):
        with pytest.raises(InputError, match="--push"):
            app(wrong, standalone_mode=False)
