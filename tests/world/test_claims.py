"""The claims of the paper on tiny worlds: what is compared, and how it is judged."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_weave.bench.statistics import BudgetPoint, ProblemMeans
from lightning_weave.progress import Progress
from lightning_weave.stages import prompts
from lightning_weave.world.demo import load_demo
from lightning_weave.world.layout import lay_out_world
from tiny_world import claims
from tiny_world.claims import CLAIMS, SWEEP, World, check, claims_table, load_experiment, results_table, write_claims

QUIET = Progress(quiet=True)
SMALL = [
    "prompts.take=16",
    "rollout.prompts_per_shard=4",
    "train.epochs=4",
    "train.prompts_per_round=8",
    "train.updates_per_round=2",
    "machine.threads=1",
]


def test_the_command_starts() -> None:
    script = Path(__file__).parents[2] / "scripts" / "claims"
    assert subprocess.run([sys.executable, script, "--help"], capture_output=True).returncode == 0


def test_seeds_and_worlds_have_runs_of_their_own() -> None:
    names = [
        load_experiment(World(seed), "full", number, ["name=x"]).recipe.name for seed in (None, 7) for number in (0, 1)
    ]
    assert names == ["x", "x-1", "x-world-7", "x-world-7-1"]
    assert load_demo().recipe.name == "demo"
    refresh = load_experiment(World(7), "refresh", 2, []).recipe
    assert refresh.name == "demo-refresh-world-7-2"
    named = {policy for claim in claims.REFRESH_CLAIMS for policy in (claim.one, claim.two)}
    assert named == refresh.compositions.keys(), "what is compared is trained, and nothing else"


def test_the_work_of_refreshed_states_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16 prompts with 4 responses: sampled once, once per part, or in every one of four epochs."""
    monkeypatch.chdir(tmp_path)
    lay_out_world()
    run = load_experiment(World(), "refresh", 0, SMALL)
    prompts.build_prompts(run, QUIET)
    monkeypatch.setattr(claims, "RESAMPLES", 50)
    found = {name: policy(60, 40, 5) for name in ("base", *run.recipe.compositions)}
    found["strong-refresh-4"] = policy(80, 40, 5)
    monkeypatch.setattr(claims, "summaries", lambda run: found)
    monkeypatch.setattr(claims, "pool", lambda seeds: seeds[0])
    text = write_claims({World(): [run]}, "refresh", "scripts/claims refresh", QUIET).read_text()
    assert text.startswith("Made by `scripts/claims refresh`.")
    for line in ("offline | 16 | 64", "refresh-2 | 16 | 128", "refresh-4 | 16 | 256", "online-exact | 16 | 256"):
        assert f"| {line} |" in text
    assert "| strong-long-refresh-4 | 80 | 256 |" in text
    assert "| at four times the dose, four parts beat offline | **holds** aes +1." in text
    assert "| at four times the dose, two parts beat offline | **within noise** aes +0.00" in text


def policy(accuracy: float, tokens: float, spread: float) -> list[ProblemMeans]:
    """200 problems of two benchmarks around the given means."""
    found = []
    for name in ("x", "y"):
        rng = np.random.default_rng(len(found))
        ids = tuple(f"p{n}" for n in range(200))
        found.append(ProblemMeans(name, ids, accuracy + spread * rng.normal(size=200), np.full(200, tokens)))
    return found


def test_claims_are_judged_by_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RESAMPLES", 400)  # nothing here is a near thing
    names = {claim.one for claim in CLAIMS} | {claim.two for claim in CLAIMS} | set(SWEEP)
    policies = {"base": policy(60, 40, 5), **{name: policy(60, 40, 5) for name in sorted(names)}}
    same = {finding.claim: finding.verdict for finding in check(policies)}
    assert same["tilted is close to online, composition"] == "holds"
    assert same["composition beats the data mixture"] == "within noise"
    assert same["length falls as the brevity share grows"] == "does not hold"
    assert same["some composition is dominated by no single anchor"] == "holds", "ties are kept"

    policies["weave-50"] = policy(80, 20, 5)
    better = {finding.claim: finding.verdict for finding in check(policies)}
    assert better["composition beats the data mixture"] == "holds"
    assert better["composition is more accurate than the accuracy anchor"] == "holds"
    assert better["twice the dose moves the composition up"] == "does not hold"
    assert better["tilted is close to online, composition"] == "does not hold"
    for share, name in enumerate(SWEEP):
        policies[name] = policy(80 - share, 40 - share, 5)
    assert {finding.claim: finding.verdict for finding in check(policies)}[
        "length falls as the brevity share grows"
    ] == "holds"


def test_every_training_seed_is_shown_with_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RESAMPLES", 50)
    seeds = [
        {"base": policy(50, 40, 0), "weave-50": policy(up, 20, 0), "brevity-only": policy(50, 20, 0)} for up in (75, 60)
    ]
    mean = {"base": policy(50, 40, 0), "weave-50": policy(67.5, 20, 0), "brevity-only": policy(50, 20, 0)}
    finding = next(
        finding for finding in check(mean, seeds) if finding.claim == "composition beats the brevity anchor alone"
    )
    assert finding.figures == "aes +1.05 [+1.05, +1.05] (+1.50, +0.60)"
    assert "| weave-50 | 67.5 | 20.0 | 1.55 | 1.55 to 1.55 | 2.00, 1.10 |" in results_table(mean, seeds)


def test_what_was_not_evaluated_is_said() -> None:
    found = {"here": check({"base": policy(60, 40, 5), "weave-50": policy(70, 30, 5)})}
    assert "**not measured**" in claims_table(found)
    assert "| weave-50 | 70" in results_table({"base": policy(60, 40, 0), "weave-50": policy(70, 30, 0)})


def test_sets_benchmarks_budgets_and_surviving_positions_are_claims_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RESAMPLES", 200)
    policies = {name: policy(70, 30, 5) for name in (*claims.SETS, "mixture-50")} | {"base": policy(60, 40, 5)}
    policies |= {"all-three": policy(85, 30, 5), "weave-50": policy(75, 25, 5)}

    def evaluated(gain: float) -> dict[str, list[Any]]:
        curves = {"weave-50": (40 + gain, 70), "accuracy-only": (30, 69), "brevity-only": (39, 60)}
        points = {
            name: [BudgetPoint(budget, value, 10, 0.5) for budget, value in zip((16, 32), curve, strict=True)]
            for name, curve in curves.items()
        }
        return {name: [SimpleNamespace(budgets=found)] for name, found in points.items()}

    def verdicts(policies: Any, gain: float, kept: list[float]) -> list[tuple[str, str]]:
        return [(one.verdict, one.figures) for one in check(policies, (), [evaluated(gain)], kept)[-4:]]

    first, everywhere, budgets, surviving = verdicts(policies, 0, [0.95, 1.0])
    assert (first[0], first[1].split()[-1]) == ("holds", "weave-50")
    assert everywhere == ("holds", "+5.0 with -5.0 tokens, +5.0 with -5.0 tokens")
    assert budgets == ("holds", "+1.0 at 16, +1.0 at 32")
    assert surviving == ("holds", "95.0%, 100.0%")

    policies["weave-50"] = policy(90, 31, 5)  # more accurate than the mixture, but longer
    assert [verdict for verdict, _ in verdicts(policies, -2, [0.5])] == ["does not hold"] * 4
    assert [one.verdict for one in check({"base": policy(60, 40, 5)})[-4:]] == ["not measured"] * 4
