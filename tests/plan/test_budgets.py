"""What scoring and training may cost per token: a change that makes a place dearer by more than 5 % fails with it.

Counted on the fake device, where nothing is timed. `scripts/plan-docs --budgets` writes budgets.json again.
"""

import json
from pathlib import Path

import pytest

from fake_counts import Counts, count
from fake_runs import Setting

FILE = Path(__file__).with_name("budgets.json")
MODELS = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-30B-A3B")
SETTINGS = {f"{stage} {model}": Setting(stage, model, "bfloat16") for model in MODELS for stage in ("score", "train")}
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
