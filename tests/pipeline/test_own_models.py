"""docs/your-models.md, run as it is written on models that are tiny, up to a directory that is ready for the hub."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from lightning_weave.config import check_recipe, load_recipe, merge_overrides
from lightning_weave.errors import StaleInput
from lightning_weave.pipeline import run as run_stage
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.views import card

PAGE = Path(__file__).parents[2] / "docs" / "your-models.md"
QUIET = Progress(quiet=True)


def page_recipe() -> str:
    return re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]


def own_models(root: Path) -> Steps:
    """The recipe of the page with the tiny world's models in place of its own, and everything smaller."""
    world = tiny.make_world(root, prompts=16)
    anchor = world["anchors"]["acc"]
    (root / "held-out.jsonl").write_text("".join((root / "prompts.jsonl").read_text().splitlines(True)[:3]))
    smaller = {
        "runs": str(root / "runs"),
        "student.model": world["student"]["model"],
        "anchors.skill.post": anchor["post"],
        "anchors.skill.pre": anchor["pre"],
        "prompts.source": str(root / "prompts.jsonl"),
        "prompts.chat": False,
        "prompts.take": 16,
        "rollout.max_tokens": 12,
        "reference.candidates": 4,
        "train.prompts_per_round": 8,
        "eval.benchmarks": [f"file:{root / 'held-out.jsonl'}"],
        "eval.max_tokens": 12,
        "eval.chat": False,
        "machine.threads": 1,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in smaller.items()]
    return Steps(check_recipe(merge_overrides(tomllib.loads(page_recipe()), sets)), "mine.toml")


def test_the_recipe_of_the_page_is_ten_lines_and_loads(tmp_path: Path) -> None:
    text = page_recipe()
    assert len(text.strip().splitlines()) <= 10
    (tmp_path / "mine.toml").write_text(text)
    assert load_recipe([tmp_path / "mine.toml"]).train.lora is not None


@pytest.mark.slow
def test_the_page_leads_to_a_student_that_is_ready_for_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.set_num_threads(1)
    steps = own_models(tmp_path)
    with pytest.raises(StaleInput, match="is not there yet"):
        card.run(steps, "skill", None, QUIET)
    run_stage.run(steps, QUIET)
    out = card.run(steps, "skill", tmp_path / "my-student", QUIET)

    final = steps.store.run_dir / "train" / "skill" / "final"
    trained = AutoModelForCausalLM.from_pretrained(out)
    assert not any("lora" in name for name, _ in trained.named_parameters())
    assert (out / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    before = AutoModelForCausalLM.from_pretrained(steps.student.path)
    moved = [
        name
        for (name, old), new in zip(before.named_parameters(), trained.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert any("q_proj" in name for name in moved)
    assert not any("embed" in name or "norm" in name for name in moved)
    assert AutoTokenizer.from_pretrained(out).eos_token == tiny.ENDS["student"]
    assert load_recipe([out / "recipe.toml"]) == steps.recipe

    text = (out / "README.md").read_text()
    summary = json.loads((steps.store.run_dir / "eval" / "skill" / "held-out" / "summary.json").read_text())
    row = next(
        line
        for line in text.splitlines()
        if line.startswith("| skill") and "held-out" not in line and "acc-post" not in line
    )
    assert f"{summary['tokens']:.0f}" in row
    assert "3 problems" in text
    assert "max_tokens 12" in text
