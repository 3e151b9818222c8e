"""`lweave sweep`: what it plans, what it spends, and that it does nothing twice."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_weave.config import Recipe, check_recipe
from lightning_weave.directory import with_others
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.results import summaries
from lightning_weave.stages import sweep
from lightning_weave.stages.sweep import extend, plan_sweep
from lightning_weave.views.clean import unneeded_folders
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)


def recipe(anchors: int = 2, **compositions: Any) -> Recipe:
    names = ["klear", "decs", "mimo"][:anchors]
    return check_recipe(
        {
            "name": "r",
            "student": {"model": "s"},
            "anchors": {name: {"post": f"{name}+", "pre": f"{name}-"} for name in names},
            "compositions": compositions,
        }
    )


def test_shares_of_one_anchor_leave_the_rest_to_the_others() -> None:
    plan = plan_sweep(recipe(), [0.25, 0.375])
    assert {one.name: one.composition.weights for one in plan} == {
        "decs-0.250": {"klear": 0.75, "decs": 0.25},
        "decs-0.375": {"klear": 0.625, "decs": 0.375},
    }
    (one,) = plan_sweep(recipe(3), [0.5], "klear")
    assert one.name == "klear-0.500"
    assert one.composition.weights == {"klear": 0.5, "decs": 0.25, "mimo": 0.25}


def test_a_grid_names_its_alphas() -> None:
    plan = plan_sweep(recipe(), [0.25, 0.75], alphas=[1, 4])
    assert [(one.name, one.composition.alpha) for one in plan] == [
        ("decs-0.250-alpha-1", 1.0),
        ("decs-0.750-alpha-1", 1.0),
        ("decs-0.250-alpha-4", 4.0),
        ("decs-0.750-alpha-4", 4.0),
    ]


def test_what_the_recipe_has_is_not_made_again() -> None:
    own = recipe(both={"weights": {"klear": 0.5, "decs": 0.5}}, only={"weights": {"decs": 1.0}})
    plan = plan_sweep(own, [0.5, 0.5, 1.0, 0.25])
    assert [(one.name, one.known) for one in plan] == [("both", True), ("only", True), ("decs-0.250", False)]
    other_objective = recipe(both={"weights": {"klear": 0.5, "decs": 0.5}, "objective": "direct-opd"})
    assert [one.name for one in plan_sweep(other_objective, [0.5])] == ["decs-0.500"]


def test_alpha_is_that_of_the_recipe_unless_it_has_several() -> None:
    one = recipe(a={"weights": {"klear": 1.0}, "alpha": 1.0})
    two = recipe(a={"weights": {"klear": 1.0}, "alpha": 1.0}, b={"weights": {"decs": 1.0}, "alpha": 3.0})
    assert plan_sweep(one, [0.5])[0].composition.alpha == 1.0
    assert plan_sweep(two, [0.5])[0].composition.alpha == 2.0


@pytest.mark.parametrize(
    ("shares", "options", "message"),
    [
        ([], {}, "--shares is empty"),
        ([1.5], {}, "--shares 1.5: a share is a number from 0 to 1"),
        ([0.5], {"alphas": [0.0]}, "--alphas 0: alpha must be greater than 0"),
        ([0.5], {"anchor": "nobody"}, "--anchor nobody: no such anchor; this recipe has klear, decs"),
    ],
)
def test_wrong_sweeps_are_refused(shares: list[float], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        plan_sweep(recipe(), shares, **options)


def test_one_anchor_has_nothing_to_share() -> None:
    with pytest.raises(InputError, match="needs two anchors or more"):
        plan_sweep(recipe(1), [0.5])


def test_a_sweep_goes_beside_every_other_method(tmp_path: Path) -> None:
    half = {"klear": 0.5, "decs": 0.5}
    others = {
        "budget": {"weights": half, "kl_budget": 0.1},
        "live": {"method": "online", "weights": half},
        "self": {"method": "self", "sharpen": 0.5},
    }
    run = run_of(recipe(**others).model_copy(update={"runs": str(tmp_path)}))
    known = extend(run, plan_sweep(run.recipe, [0.5])).recipe.compositions
    assert list(known) == [*others, "decs-0.500"]  # of the same weights, but not the same
    assert {name: known[name] for name in others} == run.recipe.compositions
    assert known["decs-0.500"].method == "joint"


@pytest.mark.slow
def test_a_sweep_trains_what_is_missing_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    world = make_world(tmp_path, prompts=4)
    world["compositions"] = {"both": {"weights": {"acc": 0.5, "brief": 0.5}}}
    bench = save_prompts(tmp_path / "sums.jsonl", 4, seed=9)
    world["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 2, "max_tokens": 8, "chat": False}
    run = run_of(world)
    plan = plan_sweep(run.recipe, [0.25, 0.5])

    def made() -> dict[str, int]:
        files = [*(run.directory / "train").rglob("*.safetensors"), *run.directory.rglob("samples.jsonl")]
        return {str(path.relative_to(run.directory)): path.stat().st_mtime_ns for path in files}

    first, second = (Console(record=True, width=200) for _ in range(2))
    sweep.sweep(run, plan, QUIET, first)
    said = first.export_text()
    assert "Sweep of 2: brief-0.250, both" in said
    assert "To train: 2, cost unknown yet" in said
    assert "Frontier, 3 of 3 evaluated:" in said
    known = with_others(run)
    assert known.policies == ["base", "both", "brief-0.250"]
    assert set(summaries(known)) == {"base", "brief-0.250", "both"}
    assert unneeded_folders([run]) == []
    before = made()
    assert {name.split("/")[1] for name in before if name.startswith("train")} == {
        run.stage("train", "both").folder.name,
        known.stage("train", "brief-0.250").folder.name,
    }
    sweep.sweep(run, plan, QUIET, second)
    assert made() == before
    assert "To train: 0, nothing to spend" in second.export_text()
    another = plan_sweep(run.recipe, [0.1, 0.9])
    more = sweep.forecast(extend(run, another), another)
    time = r"(\d+ [hm] )?\d+ [ms]"  # as `duration` writes it
    assert re.search(rf"To train: 2, about {time} of device time \({time} each, as measured\)", "\n".join(more))
    sweep.sweep(run, another, QUIET, second)
    assert {name: time for name, time in made().items() if name in before} == before
    known = with_others(run)  # sweeps add up
    assert known.policies[:2] == ["base", "both"]
    assert set(known.policies[2:]) == {"brief-0.100", "brief-0.250", "brief-0.900"}
    assert known.recipe.compositions["brief-0.250"].weights == {"acc": 0.75, "brief": 0.25}
    fewer = {**world, "anchors": {"acc": world["anchors"]["acc"]}, "compositions": {"x": {"weights": {"acc": 1.0}}}}
    found = with_others(run_of(fewer))
    assert list(found.recipe.anchors) == ["acc", "brief"], "what was computed knows its anchors"
    assert set(summaries(found)) == set(known.policies)
