"""The method in one file, `examples/weave.py`: it runs, and it computes what the pipeline computes."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lightning_weave.cli import app
from lightning_weave.world.layout import shipped_world

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "weave.py"
IN_THE_DEMO = {"accuracy alone": "accuracy-only", "composition": "weave-25"}  # the same weights in recipes/demo.toml


@pytest.fixture(scope="module")
def weave() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weave", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pipeline_updates(folder: Path, trajectories: list, responses: int, candidates: int) -> dict[str, dict[str, float]]:
    """Take one update on all these trajectories with the demo's recipe; return its figures for each composition.

    They are read from the tracker, which has them in float32: metrics.jsonl rounds to six digits.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder / "own.jsonl").write_text("".join(json.dumps(each._asdict()) + "\n" for each in trajectories))
    (folder / "runs").mkdir()
    (folder / "runs" / "demo-world").symlink_to(shipped_world())
    settings = {
        "rollout.from": "own.jsonl",
        "rollout.responses": responses,
        "reference.candidates": candidates,
        "train.prompts_per_round": len(trajectories) // responses,
        "train.updates_per_round": 1,
        "train.epochs": 1,
        "train.trackers": ["tensorboard"],
        "machine.threads": 1,
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    only = [part for name in IN_THE_DEMO.values() for part in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for verb in ("rollout", "reference", "score", "train"):
            command = [verb, str(ROOT / "recipes" / "demo.toml"), *options, *(only if verb == "train" else [])]
            result = CliRunner().invoke(app, command, catch_exceptions=False)
            assert result.exit_code == 0, result.output
    figures = {}
    for example, demo in IN_THE_DEMO.items():
        events = EventAccumulator(str(folder / "runs" / "demo" / "train" / demo / "tensorboard")).Reload()
        first = {figure: events.Scalars(f"train/{figure}")[0] for figure in ("loss", "grad_norm", "kept")}
        figures[example] = {figure: scalar.value for figure, scalar in first.items()}
    return figures


@pytest.mark.slow
def test_its_first_update_is_the_pipelines(weave: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    student = weave.load("student")
    trajectories = weave.sample(student, weave.load_problems("prompts", 6), weave.RESPONSES, temperature=1.0, top_p=1.0)
    # The anchors cannot spell the student's padding: after it, this response has no valid decision.
    trajectories[5].response_ids[7] = student.tokenizer.pad_token_id
    # Its own responses leave the student sure of where they end. On nonsense it is not, so the anchors' end counts too.
    trajectories[6].response_ids[:] = random.Random(4).choices(range(student.tokenizer.eos_token_id), k=40)
    expected = pipeline_updates(tmp_path, trajectories, weave.RESPONSES, weave.CANDIDATES)

    candidate_ids_NC, log_b_NO = weave.find_candidates(student, trajectories)
    shifts = [weave.find_shift(anchor, student, trajectories, candidate_ids_NC) for anchor in weave.ANCHORS]
    for name, weights in weave.COMPOSITIONS.items():
        target = weave.compose(candidate_ids_NC, log_b_NO, shifts, weights)
        assert 0 < target.valid_N.sum() < len(target.valid_N)
        student.lm.zero_grad()
        loss = weave.weave_loss(student, trajectories, target)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in student.lm.parameters()])
        found = {"loss": loss.item(), "grad_norm": norm.item(), "kept": target.valid_N.float().mean().item()}
        assert found == pytest.approx(expected[name], rel=1e-5, abs=0)


@pytest.mark.slow
def test_it_prints_base_one_anchor_and_their_composition(weave: ModuleType) -> None:
    sizes = ["--prompts", "8", "--updates", "2", "--problems", "10"]
    run = subprocess.run([sys.executable, EXAMPLE, *sizes], check=True, capture_output=True, text=True)
    _, *lines = run.stdout.split("\n\n")[1].splitlines()
    rows = {line[:16].strip(): [float(number) for number in line[16:].split()] for line in lines}
    assert list(rows) == ["base", *weave.COMPOSITIONS]
    for accuracy, tokens, _ in rows.values():
        assert 0 < accuracy <= 100
        assert 10 < tokens <= weave.MAX_TOKENS
    assert rows["base"][2] == 0
