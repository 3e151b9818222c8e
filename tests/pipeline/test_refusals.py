"""Wrong input to a run that is there already: refused, and the run is what it was. What it was made from may go."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.stages import run as run_stage
from pipeline.small_runs import QUIET, make_recipe, run_of

pytestmark = pytest.mark.slow
Ask = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> dict[str, Any]:
    """A whole run, with a benchmark of its own."""
    root = tmp_path_factory.mktemp("finished")
    (root / "sums.jsonl").write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    (root / "empty.jsonl").touch()
    section = {"benchmarks": [f"file:{root / 'sums.jsonl'}"], "samples": 1, "max_tokens": 4, "chat": False}
    recipe = make_recipe(root, "qwen3", "llama", "bytes", eval=section)
    (root / "r.toml").write_text(dump_recipe(check_recipe(recipe)))
    ended = forked.lweave("run", root / "r.toml")
    assert ended.code == 0, ended.said
    return recipe


@pytest.fixture
def ask(finished: dict[str, Any], forked: Forked) -> Ask:
    recipe = Path(finished["runs"]).parent / "r.toml"

    def run(command: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        ended = forked.lweave(command, recipe, *arguments, environment=environment)
        return ended.code, ended.said

    return run


def contents(folder: Path) -> dict[str, bytes]:
    changing = {".lock", ".holder", "ledger.jsonl", "log.txt"}
    paths = [path for path in folder.rglob("*") if path.name not in changing]
    links = {str(path): str(path.readlink()).encode() for path in paths if path.is_symlink()}
    return links | {str(path): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize(
    ("command", "change", "message"),
    [
        ("run", "prompts.source=nope.jsonl", "prompts.source = 'nope.jsonl'"),
        ("reference", "reference.candidates=5000", "reference.candidates = 5000"),
        ("score", 'anchors.one.aliases={"<|end|>"="nope"}', "'nope' is not a token of the anchor's tokenizer"),
        ("train", "train.dtype=float16", "train.dtype"),
        ("train", "train.lora={targets=['q_proj', 'q_prj']}", "train.lora.targets: no layer is called 'q_prj'"),
        ("eval", "eval.sources={aime-2024='x.jsonl'}", "'aime-2024' is not in eval.benchmarks"),
        ("rollout", "prompts.screen_against=['{root}/empty.jsonl']", "empty.jsonl has no rows"),
    ],
)
def test_a_wrong_change_leaves_a_finished_run_as_it_was(
    finished: dict[str, Any], ask: Ask, command: str, change: str, message: str
) -> None:
    before = contents(Path(finished["runs"]))
    code, said = ask(command, "--set", change.replace("{root}", str(Path(finished["runs"]).parent)))
    assert code == 2
    assert message in said
    assert contents(Path(finished["runs"])) == before
    assert "Everything is up to date" in ask("status")[1]


def test_a_layer_that_the_student_lacks_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", train={"lora": {"targets": ["q_proj", "q_prj"]}})
    known = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(InputError, match=f"(?m)no layer is called 'q_prj'; the student has {known}$"):
        run_stage.run_all(run_of(recipe), QUIET)
    assert not Path(recipe["runs"]).exists()


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_a_rank_that_no_shard_belongs_to_is_refused(ask: Ask, rank: str) -> None:
    code, said = ask("rollout", environment={"RANK": rank, "WORLD_SIZE": "2"})
    assert code == 2
    assert f"RANK={rank} WORLD_SIZE=2" in said


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_sampled(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = ask("eval", "--lm-eval", str(tmp_path / "file"))
    assert code == 2
    assert "--lm-eval" in said


def test_anchors_and_prompts_may_go_once_the_cache_is_made(finished: dict[str, Any], ask: Ask) -> None:
    anchor = finished["anchors"]["one"]
    gone = [Path(place) for place in (anchor["post"], anchor["pre"], finished["prompts"]["source"])]
    for place in gone:
        place.rename(place.with_name(f"{place.name}-away"))
    try:
        assert "Everything is up to date" in ask("status")[1]
        for command in (["status", "--verify"], ["status", "--cost"], ["report"], ["run"]):
            code, said = ask(*command)
            assert code == 0, said
        again = ["--set", "compositions.again={weights={one=1.0}, alpha=3.0}", "--only", "again"]
        assert ask("train", *again)[0] == 0, "another composition of the same cache"
        code, said = ask("score", "--set", "reference.candidates=3")
        assert code == 2, "but what must be made anew needs them"
        assert "lweave reference" in said
    finally:
        for place in gone:
            place.with_name(f"{place.name}-away").rename(place)
    shutil.rmtree((Path(finished["runs"]) / "small" / "train" / "again").resolve())


def test_looking_at_a_run_with_other_settings_leaves_its_recipe(finished: dict[str, Any], ask: Ask) -> None:
    directory = Path(finished["runs"]) / finished["name"]
    recipe = (directory / "recipe.toml").read_bytes()
    links = {
        path: path.readlink()
        for stage in ("train", "eval")
        for path in (directory / stage).rglob("*")
        if path.is_symlink()
    }
    for command, *more in (["preview", "--problems", "1"], ["status"], ["status", "--verify"], ["report"], ["doctor"]):
        code, said = ask(command, *more, "--set", "compositions.only.alpha=1.5", "--set", "eval.seed=7")
        assert code == 0, said
        assert (directory / "recipe.toml").read_bytes() == recipe, command
        assert {path: path.readlink() for path in links} == links, command
