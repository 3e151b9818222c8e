"""docs/paper.md executed as it stands, in rehearsal; then every table and figure of the paper is looked for."""

import csv
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from forked import Job, serve
from hub import serve_hub
from lightning_weave.config import merge_tables
from paper.paper_hub import push_data, push_models

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "paper.md"
AT_ONCE = 2
MARK = "rehearsal with small random models, no result"
FIVE = ("AIME 2024", "AIME 2025", "HMMT 2025", "LCB v5", "LCB v6")
MATH = FIVE[:3]
SHIFTS = ("klear", "decs", "klear-decs")
SWEEP = ("rho-0.250", "rho-0.375", "klear-decs", "rho-0.625", "rho-0.750")
PAIRS = ("klear", "decs", "mimo", "klear-decs", "klear-mimo", "decs-mimo")
STUDENTS = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-4B-Thinking-2507", "Qwen3.5-4B", "Olmo-3-7B-Think")
OUTSIDE = ("simplesd", "art", "promptcot-2", "instruct-2507", "interpolated-0.8")
# The paper's tables of results: where the page's commands put each, its blocks (students), rows and benchmarks.
TABLES = {
    "tab:main-results": ("main-results", STUDENTS, ("base", *SHIFTS), FIVE),
    "tab:q4-thinking-frontier": ("frontier", ("",), ("base", "klear", "decs", *SWEEP, *OUTSIDE), MATH),
    "tab:anchor-generalization": ("anchor-generalization", ("",), ("base", *PAIRS, "klear-decs-mimo"), FIVE),
    "tab:appendix-mimo-generalization": ("mimo-generalization", ("Qwen3-1.7B", "Qwen3.5-4B"), ("base", *PAIRS), FIVE),
    "tab:appendix-q4-weight-sweep": ("weight-sweep", ("",), ("base", *SWEEP), FIVE),
}
OBJECTIVES = ("Online DOPD", "Naive Offline", "Tilted-Target (ours)")
ABLATION = {  # tab:ablation-summary
    "(a) Tilted-target correction: klear": OBJECTIVES,
    "(a) Tilted-target correction: decs": OBJECTIVES,
    "(a) Tilted-target correction: decs + klear": OBJECTIVES,
    "(b) Composition: decs + klear": ("Data Mixture", "klear → decs", "decs → klear", "Tilted-Target (ours)"),
}
COSTS = {("Qwen3-1.7B", 2), ("Qwen3-4B", 1), ("Qwen3-4B", 2), ("Qwen3-4B", 3)}  # tab:training-cost
FIGURES = {  # the paper's figures of results, by the files of a report
    "fig:teaser, right (HMMT 2025)": "frontier/figures/frontier-HMMT-2025",
    "fig:accuracy-efficiency-tradeoff (a)": "main-results/figures/profile-Qwen3.5-4B-rehearsal*",
    "fig:accuracy-efficiency-tradeoff (b)": "frontier/figures/frontier",
    "fig:accuracy-efficiency-tradeoff (c)": "budgets/figures/budgets-AIME-2024",
}
pytestmark = [pytest.mark.paper, pytest.mark.timeout(6 * 3600)]  # the first test waits for the whole page


def page_commands() -> list[list[str]]:
    """The commands of the page in their order; those of one block that make different runs may run side by side."""
    together: list[list[str]] = []
    for block in re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        runs: set[str] = set()
        for line in block.splitlines():
            command = line.partition(" #")[0].strip()
            if not command.startswith(("lweave ", "hf ")):
                continue
            made = re.match(r"lweave run .*\{base,([^,]+),(math|code),", command)
            run = "/".join(made.groups()) if made else ""
            if together and run and runs and run not in runs and len(together[-1]) < AT_ONCE:
                together[-1].append(command)
                runs.add(run)
            else:
                together.append([command])
                runs = {run} if run else set()
    return together


def expanded(command: str) -> list[str]:
    """The words of a command as the shell gives them to the program."""
    script = f'for word in {command}; do printf "%s\\0" "$word"; done'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of someone who typed the whole page."""
    home = tmp_path_factory.mktemp("paper")
    lay_out(home)
    with pytest.MonkeyPatch.context() as patch, serve_hub(patch, home / "hub") as hub:
        push_models(hub, home / "models")
        push_data(hub)
        for name in ("HF_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "XDG_CACHE_HOME"):
            patch.setenv(name, str(home / "cache" / name))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        with serve() as forked:
            for commands in page_commands():
                if commands[0].startswith("hf "):
                    subprocess.run(expanded(commands[0]), cwd=home, check=True, capture_output=True)
                    continue
                jobs = [Job(expanded(command)[1:], folder=str(home), counted="^$") for command in commands]
                for command, ended in zip(commands, forked.together(*jobs), strict=True):
                    with (home / "said.txt").open("a") as log:
                        log.write(f"$ {command}\n{ended.said}\n")
                    assert ended.code == 0, f"{command}\n{ended.said}"
        yield home


def lay_out(home: Path) -> None:
    """Put the recipes where the page expects them: base.toml with the limits of a rehearsal, the others untouched."""
    shutil.copytree(ROOT / "recipes" / "paper", home / "recipes" / "paper")
    base = home / "recipes" / "paper" / "base.toml"
    layers = [base, ROOT / "recipes" / "rehearsal.toml"]
    data: dict = {}
    for layer in layers:
        data = merge_tables(data, tomllib.loads(layer.read_text(encoding="utf-8")))
    here = {"rehearsal": True, "engine": {"rollout": "hf", "eval": "hf"}, "machine": {"threads": 1}}
    base.write_text(tomli_w.dumps(merge_tables(data, here)), encoding="utf-8")


def rows(table: Path) -> list[dict[str, str]]:
    with open(table, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_says_how_it_is_executed_and_has_every_command() -> None:
    commands = [command for group in page_commands() for command in group]
    verbs = {command.split()[1] for command in commands if command.startswith("lweave")}
    assert {"plan", "doctor", "rehearse", "run", "report", "status"} == verbs
    assert len(commands) > 35
    assert "make test-paper" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("label", TABLES)
def test_each_table_of_results_has_its_rows_and_columns(reader: Path, label: str) -> None:
    place, students, policies, benchmarks = TABLES[label]
    folder = reader / "runs" / place / "tables"
    found = rows(folder / "results.csv")
    for student in students:
        block = [row["Policy"] for row in found if not student or row["Group"].startswith(f"{student} (")]
        assert sorted(block) == sorted(policies), student
    columns = [f"{name} {what}" for name in (*benchmarks, "Average") for what in ("Acc.", "#Tok.")]
    assert set(columns) | {"AES"} <= set(found[0])
    assert [row for row in found if not all(row[column] for column in columns)] == []
    assert all((folder / f"results.{kind}").stat().st_size for kind in ("md", "tex"))


def test_the_tables_say_where_code_has_one_sample(reader: Path) -> None:
    """Pass@1 in tab:appendix-mimo-generalization, the average over all samples elsewhere."""
    main, mimo = (
        (reader / "runs" / name / "tables" / "results.md").read_text()
        for name in ("main-results", "mimo-generalization")
    )
    assert "Samples per problem: 2." in main
    assert "HMMT 2025 2, LCB v5 1, LCB v6 1." in mimo


def test_the_ablation_has_the_papers_blocks(reader: Path) -> None:
    found = rows(reader / "runs" / "ablation" / "tables" / "ablation.csv")
    blocks: dict[str, list[str]] = {}
    for row in found:
        blocks.setdefault(row["Group"], []).append(row["Policy"])
    assert blocks.pop(MARK) == ["Base"]
    assert {name: sorted(members) for name, members in blocks.items()} == {
        name: sorted(members) for name, members in ABLATION.items()
    }
    assert all(f"{name} Acc." in found[0] for name in FIVE)


def test_the_costs_have_the_papers_columns_with_online_beside(reader: Path) -> None:
    folder = reader / "runs" / "costs" / "tables"
    with open(folder / "cost.csv", encoding="utf-8", newline="") as file:
        lines = {line[0].partition(",")[0]: line[1:] for line in csv.reader(file)}
    online = {
        (student.partition(" (")[0], int(count))
        for student, count, cost in zip(lines["Student"], lines["Number of anchors"], lines["Online DOPD"], strict=True)
        if cost != "–"
    }
    assert online >= COSTS
    assert {"Lightning Weave", "Online/offline cost ratio", "Student-only training"} <= lines.keys()


@pytest.mark.parametrize("label", FIGURES)
def test_each_figure_is_drawn(reader: Path, label: str) -> None:
    for kind in ("svg", "pdf", "png"):
        (drawn,) = (reader / "runs").glob(f"{FIGURES[label]}.{kind}")
        assert drawn.stat().st_size > 1000


HYPERPARAMETERS = (  # tab:appendix-training-hyperparameters
    "Replay rounds", "Cached trajectories per round", "Training epochs", "Maximum response length",
    "Rollout temperature", "Rollout top-p", "alpha", "Global batch size", "Learning rate", "LR schedule", "Optimizer",
    "Adam betas", "Weight decay", "Gradient clipping",
)  # fmt: skip


def test_the_hyperparameters_are_a_table(reader: Path) -> None:
    """One column for all runs, and a rehearsal changes only how much there is."""
    table = reader / "runs" / "main-results" / "tables" / "hyperparameters.csv"
    found = {row[f"Hyperparameter ({MARK})"]: row["Value"] for row in rows(table)}
    assert tuple(found) == HYPERPARAMETERS
    assert {key: found[key] for key in ("alpha", "Learning rate", "LR schedule", "Weight decay")} == {
        "alpha": "2", "Learning rate": "1e-06", "LR schedule": "constant", "Weight decay": "0.01",
    }  # fmt: skip
    recipe = tomllib.loads((reader / "runs" / "math" / "qwen3-4b" / "recipe.toml").read_text(encoding="utf-8"))
    train = recipe["train"]
    assert (train["learning_rate"], train["optimizer"]["betas"], train["optimizer"]["clip"]) == (
        1e-6,
        [0.9, 0.999],
        1.0,
    )
    assert (recipe["reference"]["candidates"], recipe["rollout"]["temperature"]) == (16, 1.0)


CASES = {
    "math A": "mimo right, klear-mimo right, klear wrong on aime-2024",
    "math B": "klear right, klear-mimo right, mimo wrong on aime-2024",
    "math C": "klear right, klear-decs right, decs wrong, klear-decs the shortest of them on aime-2024",
    "code D": "klear right, klear-decs right, decs wrong, klear-decs the shortest of them on livecodebench-v5",
}


@pytest.mark.parametrize("case", CASES)
def test_the_cases_are_reported_by_their_rules(reader: Path, case: str) -> None:
    """Random models are never right: each case is on the page with its rule, which no response fits."""
    page = (reader / "runs" / f"cases-{case.split()[0]}" / "index.html").read_text(encoding="utf-8")
    assert f"Rule: {CASES[case]}" in page


def test_everything_is_marked_as_a_rehearsal(reader: Path) -> None:
    tables = [*(reader / "runs").glob("*/tables/*.*"), *(reader / "runs").glob("*/index.html")]
    assert len(tables) > 30
    unmarked = [path for path in tables if MARK not in path.read_text(encoding="utf-8")]
    assert [path.name for path in unmarked if path.name != "cases.tex"] == []
