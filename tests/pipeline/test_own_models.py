"""docs/your-models.md, run as it is written on models that are tiny, up to a directory that is ready for the hub."""

import json
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.bench.summary import read_summary
from lightning_weave.config import check_recipe, load_recipe, merge_overrides
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import run as run_stage
from lightning_weave.views import export as card
from pipeline.own_world import END, make_own_world

PAGE = Path(__file__).parents[2] / "docs" / "your-models.md"
QUIET = Progress(quiet=True)


def page_recipe() -> str:
    return re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]


def own_models(root: Path) -> Run:
    """The recipe of the page with a stranger's own models and data in place of its names, and nothing else changed."""
    own = make_own_world(root, prompts=256) | {
        "runs": str(root / "runs"),
        "prompts.source": str(root / "prompts.jsonl"),
        "eval.benchmarks": [f"file:{root / 'held-out.jsonl'}"],
        "machine.threads": 1,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    return Run(check_recipe(merge_overrides(tomllib.loads(page_recipe()), sets)), "mine.toml")


def test_the_recipe_of_the_page_is_ten_lines_and_loads(tmp_path: Path) -> None:
    text = page_recipe()
    assert len(text.strip().splitlines()) <= 10
    (tmp_path / "mine.toml").write_text(text)
    assert load_recipe([tmp_path / "mine.toml"]).train.lora is not None


@pytest.mark.slow
def test_the_page_leads_to_a_better_student_that_is_ready_for_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.set_num_threads(1)
    run = own_models(tmp_path)
    with pytest.raises(InputError, match="is not there yet"):
        card.card(run, "skill", None, QUIET)
    run_stage.run_all(run, QUIET)
    out = card.card(run, "skill", tmp_path / "my-student", QUIET)

    final = run.directory / "train" / "skill" / "final"
    trained = AutoModelForCausalLM.from_pretrained(out)
    assert not any("lora" in name for name, _ in trained.named_parameters())
    assert (out / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    student = AutoModelForCausalLM.from_pretrained(run.student.path)
    moved = [
        name
        for (name, old), new in zip(student.named_parameters(), trained.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert any("q_proj" in name for name in moved)
    assert not any("embed" in name or "norm" in name for name in moved)
    assert AutoTokenizer.from_pretrained(out).eos_token == END
    assert load_recipe([out / "recipe.toml"]) == run.recipe

    before, after = (
        read_summary(run.directory / "eval" / name / "held-out" / "summary.json") for name in ("base", "skill")
    )
    assert after.accuracy > before.accuracy + 2 * math.hypot(before.accuracy_error, after.accuracy_error), (
        "better than its base"
    )
    assert (before.no_answer, before.error, after.error) == (0.0, None, None)

    text = (out / "README.md").read_text()
    row = next(
        line
        for line in text.splitlines()
        if line.startswith("| skill") and "held-out" not in line and "specialist" not in line
    )
    assert f"{after.accuracy:.1f}" in row
    assert "50 problems" in text
    assert "max_tokens 4,096" in text or "max_tokens 4096" in text
