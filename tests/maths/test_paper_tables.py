"""The paper's printed tables, recomputed from their own per-benchmark columns.

All averages and 28 of 47 AES values follow from the columns by the paper's definition. The other 19 are named below
with what was printed, what the definition gives (`mean_aes`) and what the printed averages give (`aes_of_means`): 18 of
them are the score of the averages, and one is neither, though no further off than the rounding of its columns allows.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

import oracle
from lightning_weave.maths import aes_of_means, mean_aes, pareto_front

BENCHMARKS = ("aime24", "aime25", "hmmt25", "lcb5", "lcb6")
HALF_A_CENT = 0.005 + 1e-9  # AES and mean accuracy are printed to two places

PRINTED_OTHERWISE = {  # (table, student, group, policy): (printed, mean_aes, aes_of_means of the printed averages)
    ("main", "Qwen3-4B-Thinking-2507", "", "Klear-only"): (0.18, 0.1748, 0.1786),
    ("main", "Qwen3.5-4B", "", "Klear-only"): (0.25, 0.2447, 0.2251),
    ("ablation", "Qwen3-4B", "Klear-only", "Online DOPD"): (0.21, 0.2184, 0.2075),
    ("ablation", "Qwen3-4B", "Klear-only", "Naive Offline"): (-0.15, -0.1271, -0.1546),
    ("ablation", "Qwen3-4B", "DECS-only", "Online DOPD"): (-0.11, -0.1271, -0.1071),
    ("ablation", "Qwen3-4B", "DECS-only", "Naive Offline"): (-0.31, -0.3367, -0.3137),
    ("ablation", "Qwen3-4B", "Klear+DECS", "Online DOPD"): (0.38, 0.3963, 0.3837),
    ("mimo", "Qwen3-1.7B", "", "Klear-only"): (0.20, 0.2056, 0.1961),
    ("mimo", "Qwen3-1.7B", "", "DECS-only"): (-0.08, -0.0954, -0.0811),
    ("mimo", "Qwen3-1.7B", "", "MiMo-RL"): (0.02, 0.0095, 0.0155),
    ("mimo", "Qwen3-1.7B", "", "Klear+DECS"): (0.38, 0.3674, 0.3789),
    ("mimo", "Qwen3-1.7B", "", "Klear+MiMo-RL"): (0.44, 0.4812, 0.4439),
    ("mimo", "Qwen3-1.7B", "", "DECS+MiMo-RL"): (0.25, 0.2266, 0.2532),
    ("mimo", "Qwen3.5-4B", "", "Klear-only"): (0.22, 0.2477, 0.2183),
    ("mimo", "Qwen3.5-4B", "", "DECS-only"): (-0.16, -0.1116, -0.1627),
    ("mimo", "Qwen3.5-4B", "", "MiMo-RL"): (0.09, 0.0315, 0.0884),
    ("mimo", "Qwen3.5-4B", "", "Klear+DECS"): (0.68, 0.7645, 0.6822),
    ("mimo", "Qwen3.5-4B", "", "Klear+MiMo-RL"): (0.61, 0.6942, 0.6139),
    ("mimo", "Qwen3.5-4B", "", "DECS+MiMo-RL"): (0.59, 0.6677, 0.5860),
}
NEITHER = ("main", "Qwen3.5-4B", "", "Klear-only")


@dataclass(frozen=True)
class Row:
    name: tuple[str, str, str, str]
    points: list[tuple[float, float]]
    mean: tuple[float, float]
    aes: float


def read_rows() -> list[Row]:
    with (Path(__file__).parent / "paper_tables.csv").open(newline="") as file:
        return [
            Row(
                name=(line["table"], line["student"], line["group"], line["policy"]),
                points=[(float(line[f"{k}_acc"]), float(line[f"{k}_tokens"])) for k in BENCHMARKS],
                mean=(float(line["mean_acc"]), float(line["mean_tokens"])),
                aes=float(line["aes"]),
            )
            for line in csv.DictReader(file)
        ]


ROWS = read_rows()
BASES = {row.name[:2]: row for row in ROWS if row.name[3] == "Base"}
POLICIES = [row for row in ROWS if row.name[3] != "Base"]


def as_defined(row: Row) -> float:
    return mean_aes(row.points, BASES[row.name[:2]].points)


def of_averages(row: Row) -> float:
    return aes_of_means([row.mean], [BASES[row.name[:2]].mean])


def test_every_row_is_here():
    assert (len(ROWS), len(POLICIES)) == (56, 47)
    assert len({row.name for row in ROWS}) == 56


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "/".join(filter(None, row.name)))
def test_averages_reproduce(row):
    accs, tokens = zip(*row.points, strict=True)
    assert abs(sum(tokens) / 5 - row.mean[1]) <= 0.5 + 1e-9
    assert abs(sum(accs) / 5 - row.mean[0]) <= 0.05 + HALF_A_CENT  # the columns have one place


def test_aes_reproduces_for_all_but_the_rows_named():
    differ = {row.name for row in POLICIES if abs(as_defined(row) - row.aes) > HALF_A_CENT}
    assert len(POLICIES) - len(differ) == 28
    assert differ == set(PRINTED_OTHERWISE)


@pytest.mark.parametrize("row", [row for row in POLICIES if row.name in PRINTED_OTHERWISE], ids=lambda row: row.name)
def test_rows_that_differ_have_these_values(row):
    printed, defined, averaged = PRINTED_OTHERWISE[row.name]
    assert row.aes == printed
    assert as_defined(row) == pytest.approx(defined, abs=6e-5)
    assert of_averages(row) == pytest.approx(averaged, abs=6e-5)
    assert (abs(averaged - printed) <= HALF_A_CENT) == (row.name != NEITHER)


def test_the_row_that_is_neither_is_within_the_rounding_of_its_columns():
    row = next(row for row in POLICIES if row.name == NEITHER)
    base = BASES[NEITHER[:2]].points
    highest = [
        oracle.aes(acc + 0.05, tokens - 0.5, base_acc - 0.05, base_tokens + 0.5)
        for (acc, tokens), (base_acc, base_tokens) in zip(row.points, base, strict=True)
    ]
    assert as_defined(row) < row.aes - 0.005 < sum(highest) / 5


FRONTIER = {  # Qwen3-4B-Thinking-2507, three mathematics benchmarks (q4-thinking-frontier)
    "Base": [(77.9, 19442), (73.9, 21170), (51.7, 23906)],
    "Klear-only": [(83.0, 18128), (78.5, 19792), (56.1, 23377)],
    "DECS-only": [(79.0, 17680), (75.5, 19460), (50.4, 21369)],
    "0.250": [(83.8, 17474), (78.5, 19300), (55.6, 22774)],
    "0.375": [(85.1, 17038), (79.3, 18760), (56.6, 22197)],
    "0.500": [(85.3, 16003), (80.4, 17970), (54.4, 20440)],
    "0.625": [(84.9, 15048), (80.4, 16963), (52.9, 18470)],
    "0.750": [(83.3, 14310), (79.6, 16409), (50.9, 16147)],
    "SimpleSD": [(76.7, 19473), (75.2, 21157), (51.0, 24053)],
    "Art": [(78.5, 15456), (76.3, 17703), (49.4, 17339)],
    "PromptCoT 2.0": [(75.8, 20177), (76.9, 21455), (54.0, 24838)],
    "MI": [(83.1, 15885), (77.5, 17542), (52.3, 19653)],
}


@pytest.mark.parametrize(
    ("benchmark", "front"),
    [(0, ["0.500", "0.625", "0.750"]), (1, ["0.625", "0.750"]), (2, ["0.375", "0.500", "0.625", "0.750"])],
)
def test_only_compositions_are_on_the_papers_front(benchmark, front):
    names = list(FRONTIER)
    assert [names[i] for i in pareto_front([FRONTIER[name][benchmark] for name in names])] == front
