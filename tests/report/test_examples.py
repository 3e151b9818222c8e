"""Examples are chosen by verdicts, lengths and seed: the rule that the page states, in slow words."""

import random
from inspect import signature
from statistics import median_low
from typing import Any

import pytest
from pandas import DataFrame

from lightning_weave.report import cases
from lightning_weave.report.cases import OUTCOME, Place, choose_examples


def outcomes(policy: str, share: float, tokens: int, seed: int) -> DataFrame:
    draw = random.Random(f"{policy} {seed}")
    rows = [
        (policy, bench, f"p{n}", sample, draw.random() < share, draw.randrange(tokens, 2 * tokens))
        for bench in ("one", "two")
        for n in range(9)
        for sample in range(3)
    ]
    return DataFrame(rows, columns=OUTCOME)


def right(policy: str, tokens: list[int]) -> DataFrame:
    """A right answer of every length."""
    return DataFrame([(policy, "one", f"p{n}", 0, True, length) for n, length in enumerate(tokens)], columns=OUTCOME)


def at(some: DataFrame) -> dict[Place, Any]:
    return {(one.benchmark, one.problem, one.sample): one for one in some.itertuples()}


@pytest.mark.parametrize("seed", range(5))
def test_each_example_meets_its_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SEED", seed)
    base, policy = outcomes("base", 0.5, 100, seed), outcomes("both", 0.7, 80, seed)
    chosen = choose_examples(base, policy)
    assert list(chosen) == ["better", "worse", "typical"]
    assert len({place[:2] for place in chosen.values()}) == 3  # three problems
    old, new = at(base), at(policy)
    assert (old[chosen["better"]].correct, new[chosen["better"]].correct) == (False, True)
    assert (old[chosen["worse"]].correct, new[chosen["worse"]].correct) == (True, False)
    taken = {chosen["better"][:2], chosen["worse"][:2]}
    left = [place for place in old if place[:2] not in taken]
    pairs = [(old[place].correct, new[place].correct) for place in left]
    most = max(pairs.count(pair) for pair in pairs)
    typical = chosen["typical"]
    pair = old[typical].correct, new[typical].correct
    assert pairs.count(pair) == most
    same = [place for place in left if (old[place].correct, new[place].correct) == pair]
    ratio = {place: new[place].tokens / old[place].tokens for place in same}
    assert ratio[typical] == median_low(ratio.values())


def test_without_a_change_of_verdict_length_decides() -> None:
    base = right("base", [100] * 6)
    chosen = choose_examples(base, right("both", [97, 98, 99, 100, 101, 102]))
    assert int(chosen["better"][1][1]) < 3
    assert int(chosen["worse"][1][1]) > 3
    assert list(choose_examples(base, right("both", [50] * 6))) == ["better", "typical"]
    assert choose_examples(base, right("both", [])) == {}


def test_a_choice_sees_no_text_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    base, policy = outcomes("base", 0.5, 100, 1), outcomes("both", 0.7, 80, 1)
    chosen = choose_examples(base, policy)
    assert choose_examples(base[::-1], policy[::-1]) == chosen
    others = []
    for seed in range(5):
        monkeypatch.setattr(cases, "SEED", seed)
        others.append(choose_examples(base, policy))
    assert any(other != chosen for other in others)
    assert list(signature(choose_examples).parameters) == ["base", "policy"]
