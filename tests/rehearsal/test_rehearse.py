"""A rehearsal goes through a whole recipe without a weight, is marked, resumes, and finds mistakes that show late."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from faults.conftest import CLOCKS, _timeless
from forked import Ended, Fault, Forked
from lightning_weave import rehearse
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import StartAgain, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.rehearse import doubles_of, heads_needed, small_recipe
from lightning_weave.run import Run
from lightning_weave.stages.prompts import own_trajectories
from lightning_weave.stages.work import LOCAL
from programs import write_program
from tiny import ENDS, make_world, save_prompts

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


class Stage:
    """A recipe over configurations and tokenizers alone, and the folder that it is rehearsed in."""

    def __init__(self, root: Path, forked: Forked) -> None:
        self.root = root
        self.forked = forked
        self.recipe = make_world(root / "world", prompts=12)
        self.recipe["runs"] = "runs"
        bench = save_prompts(root / "world" / "bench.jsonl", 6, seed=9)
        self.recipe["eval"] = {"benchmarks": [f"file:{bench}"], "chat": False}
        self.recipe["compositions"] = {"both": self.recipe["compositions"]["both"]}
        for file in (root / "world").rglob("*.safetensors"):
            file.unlink()
        config = root / "world" / "student" / "config.json"
        wide = json.loads(config.read_text()) | {"hidden_size": 2**26}  # no disk has room for its checkpoints
        config.write_text(json.dumps(wide))

    def rehearse(self, folder: str = "own", fault: dict[str, Any] | None = None, **changes: Any) -> Ended:
        """Rehearse the recipe with some sections changed, where nothing was wrong before, or in a folder of its own."""
        place = self.root / folder
        place.mkdir(exist_ok=True)
        if folder == "own" and self.run.exists():
            shutil.rmtree(place / "runs")
            shutil.copytree(self.run.parent, place / "runs", symlinks=True)
        (place / "r.toml").write_text(dump_recipe(check_recipe(self.recipe | changes)))
        return self.forked.lweave("rehearse", "r.toml", "--trust", folder=str(place), **(fault or {}))

    @property
    def run(self) -> Path:
        """The rehearsal as it was when nothing was wrong."""
        return self.root / "undisturbed" / "tiny-rehearsal"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Stage:
    made = Stage(tmp_path_factory.mktemp("rehearsal"), forked)
    ended = made.rehearse()
    assert ended.code == 0, ended.said
    (made.root / "said.txt").write_text(ended.said)
    shutil.copytree(made.root / "own" / "runs", made.root / "undisturbed", symlinks=True)
    return made


def test_it_goes_through_without_a_weight_and_says_what_that_proves(stage: Stage) -> None:
    said = " ".join((stage.root / "said.txt").read_text().split())
    for line in (
        "prompts: 8 prompts",
        "responses of Qwen3ForCausalLM, sampled with transformers",
        "score/acc-post: LlamaForCausalLM, scored with transformers",
        "updates of Qwen3ForCausalLM (joint), saved and exported",
        "the exported Qwen3ForCausalLM, with transformers",
        "Next: lweave run r.toml",
        "Plan of tiny",
    ):
        assert line in said, said
    assert "no weights here (*.safetensors)" in said  # what doubles cannot show
    assert not (stage.root / "own" / "runs" / "tiny").exists()
    doubles = json.loads((stage.run / "doubles" / "student" / "config.json").read_text())
    assert (doubles["hidden_size"], doubles["num_hidden_layers"]) == (32, 2)


def test_the_folder_the_tables_the_page_and_the_card_say_what_it_is(stage: Stage) -> None:
    mark = "rehearsal with small random models, no result"
    made = [*(stage.run / "report" / "tables").iterdir(), stage.run / "report" / "index.html"]
    made.append(stage.run / "publish" / "both" / "README.md")
    assert len(made) > 6
    assert [path.name for path in made if mark not in path.read_text()] == []
    assert "rehearsal = true" in (stage.run / "recipe.toml").read_text()


def test_no_real_command_takes_it_for_a_result(stage: Stage) -> None:
    final = stage.run / "train" / "both" / "final"
    place = str(stage.root / "own")
    bench = stage.recipe["eval"]["benchmarks"][0]
    ended = stage.forked.lweave("eval", "--model", final, "--bench", bench, "--set", "eval.chat=false", folder=place)
    assert ended.code == 2, ended.said
    assert "made by a rehearsal" in ended.said
    real = stage.root / "undisturbed" / "real"
    shutil.copytree(stage.run, real, symlinks=True)
    (real / "recipe.toml").write_text((real / "recipe.toml").read_text().replace("rehearsal = true", ""))
    ended = stage.forked.lweave("report", stage.run, real, folder=place)
    assert ended.code == 2
    assert "is a rehearsal, and others are not" in ended.said


def test_killed_and_started_again_it_ends_with_the_same_bytes(stage: Stage) -> None:
    for place in (r"doubles/.*brief-pre/config\.json", r"train/both@\w+/checkpoints", "eval/both/"):
        fault = {"counted": rf"^write .*{place}", "fault": Fault(event=1)}
        killed = stage.rehearse("killed", fault=fault)
        assert killed.code == -9, killed.said
    ended = stage.rehearse("killed")
    assert ended.code == 0, ended.said
    contents = [_contents(run) for run in (stage.run, stage.root / "killed" / "runs" / stage.run.name)]
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def _contents(run: Path) -> dict[str, Any]:
    """All that does not tell the time: the page and the costs do."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in CLOCKS]
    kept = [path for path in files if "report" not in path.relative_to(run).parts or path.name.startswith("results")]
    return {str(path.relative_to(run)): _timeless(path) for path in kept}


# Mistakes that show late: what is changed in the recipe, the stage at which the rehearsal ends, and what it says.


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file:{path}"


def test_a_benchmark_without_answers(stage: Stage, tmp_path: Path) -> None:
    bench = lines(tmp_path / "bench.jsonl", {"id": "1", "problem": "1+1", "answer": "2"}, {"id": "2", "problem": "1+2"})
    ended = stage.rehearse(eval={"benchmarks": [bench], "chat": False})
    assert ended.code == 2
    assert "bench.jsonl:2: has id, problem; expected problem and answer" in ended.said
    assert "stopped before eval/base/bench was made" in ended.said


def test_an_anchor_that_cannot_express_the_end_of_turn(stage: Stage) -> None:
    anchors = {**stage.recipe["anchors"], "acc": {**stage.recipe["anchors"]["acc"], "aliases": {}}}
    ended = stage.rehearse(anchors=anchors)
    assert ended.code == 0, ended.said
    listed = ended.said.partition("To look at before the real run")[2]
    assert "score: anchors.acc: <|end|> has no counterpart" in listed
    assert f'aliases = {{ "{ENDS["student"]}" = "{ENDS["accuracy"]}" }}' in listed


def test_an_export_that_the_engine_cannot_load(stage: Stage, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(TESTS / "stand_in"), *filter(None, sys.path)])
    said = {"PYTHONPATH": paths, "STAND_IN_RECORDS": tmp_path, "STAND_IN_REFUSES": "final"}
    words = (f"{name}={value}" for name, value in said.items())
    engine = write_program(tmp_path / "python", "env", *words, sys.executable)
    ended = stage.rehearse(engine={"eval": "vllm", "python": str(engine), "parity": 1e6})
    assert ended.code == 1, ended.said
    assert "ValueError: Model architectures ['Small'] are not supported" in ended.said
    assert re.search(r"train/both@\w+/final: the vLLM process failed", ended.said), ended.said
    assert 'If this vLLM cannot run the model, set engine.eval to "hf"' in ended.said
    assert "stopped before eval/both/bench was made" in ended.said


def test_no_disk_for_checkpoints(stage: Stage) -> None:
    said = " ".join((stage.root / "said.txt").read_text().split())
    assert "for checkpoints and students of 1 compositions" in said
    assert "set runs to a directory on another disk" in said


def test_a_grader_that_fails(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def grade(response, answer):\n    return response.split('####')[1] == answer\n")
    grader = f"{tmp_path}/own.py:grade"
    ended = stage.rehearse(eval={**stage.recipe["eval"], "graders": {"bench": grader}})
    assert ended.code == 2, ended.said
    assert "own.py:grade" in ended.said
    assert "IndexError: list index out of range" in ended.said
    assert "stopped before eval/base/bench was made" in ended.said


def test_a_case_of_a_policy_that_is_not_there(stage: Stage) -> None:
    ended = stage.rehearse(report={"cases": {"a": {"wrong": ["base"], "right": ["boht"]}}})
    assert ended.code == 2
    assert "boht" in ended.said
    assert "stopped after the last stage" in ended.said


def test_an_update_of_layers_that_are_not_there(stage: Stage) -> None:
    ended = stage.rehearse(train={**stage.recipe["train"], "lora": {"targets": ["query"]}})
    assert ended.code == 2
    assert "train.lora" in ended.said
    assert "stopped before train/both was made" in ended.said


def test_a_student_that_is_quantised(stage: Stage) -> None:
    shutil.copytree(stage.root / "world" / "student", quantised := stage.root / "quantised", dirs_exist_ok=True)
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    ended = stage.rehearse("other", student={"model": str(quantised)})
    assert ended.code == 2
    assert "its weights are quantised (fp8): it can be scored, but not trained" in ended.said
    assert "stopped before the first stage" in ended.said


def test_a_context_that_a_row_has_no_column_for(stage: Stage) -> None:
    context = {"template": "{prompt} Hint: {hint}"}
    anchors = {**stage.recipe["anchors"], "acc": {**stage.recipe["anchors"]["acc"], "post_prompt": context}}
    ended = stage.rehearse(anchors=anchors)
    assert ended.code == 2
    assert "anchors.acc.post_prompt" in ended.said
    assert "hint" in ended.said


def test_random_models_need_not_be_right_where_the_real_ones_must(stage: Stage) -> None:
    """Contexts with right responses, and an anchor that speaks in right ones only."""
    context = {"template": "{prompt} So: {right}"}
    of_acc, of_brief = ({"post_prompt": context}, {"where": {"answers": "right"}})
    both = {"acc": of_acc, "brief": of_brief}
    ended = stage.rehearse(anchors={name: {**one, **both[name]} for name, one in stage.recipe["anchors"].items()})
    assert ended.code == 0, ended.said


def test_a_pair_of_one_model(stage: Stage) -> None:
    anchors = {**stage.recipe["anchors"], "acc": {**stage.recipe["anchors"]["acc"]}}
    anchors["acc"]["post"] = anchors["acc"]["pre"]
    ended = stage.rehearse(anchors=anchors)
    assert ended.code == 2
    assert "anchors.acc: post and pre are the same model" in ended.said


def test_an_engine_that_is_not_installed(stage: Stage) -> None:
    ended = stage.rehearse(engine={"eval": "vllm", "python": "/no/such/python"})
    assert ended.code == 2
    assert "engine.python = '/no/such/python': no such executable" in ended.said


def test_a_recipe_is_made_smaller_and_nothing_of_it_larger(stage: Stage, tmp_path: Path) -> None:
    rows = [
        {"prompt_ids": [5, 6, number], "response_ids": [7] * 600, "id": f"p{number}"}
        for number in range(9)
        for _ in "123"
    ]
    lines(tmp_path / "own.jsonl", *rows)
    recipe = {
        **stage.recipe,
        "runs": str(tmp_path / "runs"),
        "rollout": {"from": str(tmp_path / "own.jsonl"), "responses": 3, "max_tokens": 5},
        "train": {"prompts_per_round": 1, "updates_per_round": 3, "checkpoint_every": 1, "epochs": 4},
        "compositions": {"both": {"weights": {"acc": 0.5, "brief": 0.5}, "epochs": 7, "refresh": 5}},
        "student": {"model": stage.recipe["student"]["model"]},
    }
    run = Run(check_recipe(recipe))
    small = small_recipe(run)
    assert (small.rollout.responses, small.rollout.max_tokens) == (3, 5)
    assert (small.train.prompts_per_round, small.train.updates_per_round, small.train.checkpoint_every) == (1, 1, 1)
    assert (small.train.epochs, small.compositions["both"].epochs, small.compositions["both"].refresh) == (1, None, 2)
    auto = {"both": {"weights": {"acc": 0.5, "brief": 0.5}, "refresh": "auto", "refresh_budget": 5}}
    small_auto = small_recipe(Run(check_recipe({**recipe, "compositions": auto}))).compositions["both"]
    assert (small_auto.refresh, small_auto.refresh_budget) == ("auto", 2)
    assert small.student.revision is None
    assert small.rehearsal
    assert small.checks.truncated is False
    kept = own_trajectories(Run(check_recipe({**recipe, "rollout": {"from": small.rollout.from_, "responses": 3}})))
    assert [group.prompt.id for group in kept] == [f"p{number}" for number in range(4)]
    assert {len(response.ids) for group in kept for response in group.responses} == {256}


def test_logs_that_begin_with_one_prompt_are_rehearsed(stage: Stage, tmp_path: Path) -> None:
    """As in an agent's log at responses = 1: each run is a group of one."""
    student = shutil.copytree(stage.root / "world" / "student", stage.root / "chats", dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
    template = template.replace("{{ m", "{% if m['role'] == 'assistant' %}\n{% endif %}{{ m")
    (student / "chat_template.jinja").write_text(template)
    turns = [[{"role": "user", "content": "1+2"}, {"role": "assistant", "content": f"{n}."}] for n in (3, 4, 5)]
    lines(tmp_path / "log.jsonl", *({"messages": run} for run in turns))
    changes = {"student": {"model": str(student)}, "rollout": {"from": str(tmp_path / "log.jsonl"), "responses": 1}}
    ended = stage.rehearse("other", **changes)
    assert ended.code == 0, ended.said
    assert "rollout: 3 responses" in ended.said


def test_an_error_keeps_its_exit_code_whatever_it_is_made_of(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: object) -> None:
        raise StartAgain("out of memory", "it resumes with half")

    monkeypatch.setattr(rehearse, "run_all", run_out_of_memory)
    run = Run(check_recipe({**stage.recipe, "runs": str(tmp_path / "runs")}))
    with pytest.raises(
        WeaveError, match=r"out of memory. Run the same command again(?s:.*)The rehearsal stopped"
    ) as end:
        rehearse.run(run, rehearse.rehearsed(run), LOCAL, Progress(quiet=True), Console())
    assert end.value.code == StartAgain.code


def test_trajectories_keep_the_columns_of_contexts_and_tags(stage: Stage, tmp_path: Path) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [7], "id": "p", "hint": "so", "kind": "short", "unread": "x"}
    lines(tmp_path / "own.jsonl", row)
    hinted = {**stage.recipe["anchors"]["acc"], "post_prompt": {"template": "{prompt} {hint} {answer}"}}
    recipe = {
        **stage.recipe,
        "runs": str(tmp_path / "runs"),
        "rollout": {"from": str(tmp_path / "own.jsonl"), "responses": 1},
        "anchors": {"acc": hinted},
        "tags": {"column": "kind"},
        "compositions": {"all": {"weights": {"short": {"acc": 1.0}, "default": {"acc": 1.0}}}},
    }
    run = Run(check_recipe(recipe))
    again = {"from": small_recipe(run).rollout.from_, "responses": 1}
    kept = own_trajectories(Run(check_recipe({**recipe, "rollout": again})))
    assert kept == own_trajectories(run)
    assert {key: (kept[0].prompt.columns or {})[key] for key in ("hint", "kind")} == {"hint": "so", "kind": "short"}


def test_models_of_one_line_are_told_from_others(stage: Stage) -> None:
    recipe = dict(stage.recipe)
    brief = recipe["anchors"]["brief"]
    recipe["anchors"] = {**recipe["anchors"], "again": {"post": recipe["student"]["model"], "pre": brief["post"]}}
    recipe["policies"] = {"other": {"model": recipe["anchors"]["acc"]["post"]}}
    lines_of = {one.name: [name.name for name in line] for one, line in doubles_of(Run(check_recipe(recipe))).items()}
    assert lines_of[recipe["student"]["model"]] == [brief["pre"], brief["post"], recipe["student"]["model"]]
    assert lines_of[recipe["anchors"]["acc"]["post"]] == [recipe["anchors"]["acc"][role] for role in ("pre", "post")]


def test_doubles_have_heads_for_all_gpus_of_an_anchors_own_engine(stage: Stage) -> None:
    brief = {**stage.recipe["anchors"]["brief"], "engine": "vllm", "options": {"tensor_parallel_size": 4}}
    recipe = {**stage.recipe, "anchors": {**stage.recipe["anchors"], "brief": brief}}
    assert heads_needed(check_recipe(stage.recipe)) == 1
    assert heads_needed(check_recipe(recipe)) == 4
