"""What scoring and training may cost per token: a change that makes a place dearer by more than 5 % fails with it.

Counted on the fake device, where nothing is timed. `scripts/plan-docs --budgets` writes budgets.json again.
"""

import json
from pathlib import Path

import pytest

from fake_counts import TOKENS, Counts, count, total
from fake_runs import Setting, config_of
from lightning_weave.plan.architecture import find_gpu, read_shape
from lightning_weave.plan.costs import roofline, update_seconds

FILE = Path(__file__).with_name("budgets.json")
MODELS = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-30B-A3B")
GPUS = {"score": 1, "train": 8}  # a row on each
SETTINGS = {f"{stage} {model}": Setting(stage, model, "bfloat16", GPUS[stage]) for model in MODELS for stage in GPUS}
SETTINGS["reference Qwen/Qwen3-4B"] = Setting("reference", "Qwen/Qwen3-4B", "bfloat16")
ROOM = 1.05
FEW = 0.002  # of a measure's sum over all kinds: what is too little to be a budget


def excesses(found: Counts, allowed: Counts) -> list[str]:
    """List the places that cost more than they may."""
    listed = []
    for part in ("layer", "rest"):
        for kind in sorted({*found[part], *allowed[part]}):
            for measure in ("operations", "bytes", "kernels", "microseconds"):
                now, before = (counts[part].get(kind, {}).get(measure, 0.0) for counts in (found, allowed))
                all_kinds = sum(each.get(measure, 0.0) for each in allowed[part].values())
                if now > ROOM * before + FEW * all_kinds:
                    listed.append(f"{part}, {kind}: {before:g} -> {now:g} {measure} per token")
    return listed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_place_costs_more_than_its_budget() -> None:
    allowed = json.loads(FILE.read_text(encoding="utf-8"))
    assert allowed.keys() == SETTINGS.keys()
    found = dict(zip(SETTINGS, count(list(SETTINGS.values())), strict=True))
    dearer = [f"{name}: {place}" for name in SETTINGS for place in excesses(found[name], allowed[name])]
    assert not dearer, "\n".join(dearer)


def test_a_place_that_costs_more_is_named() -> None:
    allowed = json.loads(FILE.read_text(encoding="utf-8"))["train Qwen/Qwen3-4B"]
    assert not excesses(allowed, allowed)
    dearer = json.loads(json.dumps(allowed))
    dearer["layer"]["other"]["bytes"] *= 1.06
    dearer["rest"]["copies"] = {"kernels": 0.1}
    assert [place.split(":")[0] for place in excesses(dearer, allowed)] == ["layer, other", "rest, copies"]


def planned(setting: Setting) -> float:
    """Predict the microseconds per token of one row, as `lweave plan` does before it knows an efficiency."""
    shape, gpu = read_shape(config_of(setting.model), setting.model), find_gpu("H100")
    train = setting.stage == "train"
    dtype = "bfloat16" if setting.dtype == "bfloat16" else "float32"
    seconds = roofline(shape, 0, TOKENS, gpu, dtype, train, setting.checkpointing)
    update = update_seconds(shape, gpu, dtype, 1, 1 / setting.world) if train else 0.0
    return 1e6 * (seconds + update) / TOKENS


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_predicts_what_was_counted(name: str) -> None:
    counted = total(json.loads(FILE.read_text(encoding="utf-8"))[name], SETTINGS[name].model)
    assert planned(SETTINGS[name]) == pytest.approx(sum(counted.values()), rel=0.06)


OTHERS = (  # other dtypes, recomputed activations, other families
    Setting("train", "Qwen/Qwen3-1.7B", "bfloat16", 8, checkpointing=True),
    Setting("train", "Qwen/Qwen3-1.7B", "float32", 8),
    Setting("score", "Qwen/Qwen3-4B", "float32"),
    Setting("score", "pixas/DECS_1.5B", "bfloat16"),
)


@pytest.mark.slow
def test_plan_predicts_what_is_counted_elsewhere() -> None:
    for setting, counts in zip(OTHERS, count(OTHERS), strict=True):
        assert planned(setting) == pytest.approx(sum(total(counts, setting.model).values()), rel=0.1), setting
