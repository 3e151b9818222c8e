"""The paper's runs: every combination loads, says what the paper says, and docs/paper.md names only what exists."""

import itertools
import re
from pathlib import Path

import pytest

from lightning_weave.config import Recipe, load_recipe
from lightning_weave.plan.architecture import find_gpu
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "recipes" / "paper"
STUDENTS = {
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-4b-thinking-2507": "Qwen/Qwen3-4B-Thinking-2507",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "olmo-3-7b-think": "allenai/Olmo-3-7B-Think",
}
PAIRS = {
    "klear": ("Kwai-Klear/Klear-Reasoner-8B", "Qwen/Qwen3-8B-Base"),
    "decs": ("pixas/DECS_1.5B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    "mimo": ("XiaomiMiMo/MiMo-7B-RL-0530", "XiaomiMiMo/MiMo-7B-Base"),
}
TORCHRUN = "torchrun --nproc-per-node 8"
MACHINES = f'{TORCHRUN} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$HOST:29500"'
LAUNCHES = {
    1: "lweave run",
    8: f"{TORCHRUN} -m lightning_weave.cli run",
    16: f"srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 {MACHINES} -m lightning_weave.cli run",
}
SUBSETS = ["-".join(names) for count in (1, 2, 3) for names in itertools.combinations(PAIRS, count)]


def paper(*names: str) -> Recipe:
    return load_recipe([PAPER / f"{name}.toml" for name in names])


@pytest.mark.parametrize("domain", ["math", "code"])
@pytest.mark.parametrize("student", STUDENTS)
def test_every_student_domain_and_composition_loads(student: str, domain: str) -> None:
    for composition in [*SUBSETS, "sweep", "ablation", "klear-decs-online", "klear-decs-mimo-online"]:
        recipe = paper("base", student, domain, composition)
        assert recipe.student.model == STUDENTS[student]
        assert (recipe.runs, recipe.name) == (f"runs/{domain}", student)
        assert recipe.prompts.max_tokens == {"math": 1024, "code": 4096}[domain]
        used = {anchor for section in recipe.compositions.values() for anchor in section.weights}
        assert used == set(recipe.anchors)  # an anchor that nobody uses would be scored for nothing
        for name in recipe.anchors:
            models = [recipe.anchor_model(name, role) for role in ("post", "pre")]
            assert tuple(model and model[0] for model in models) == PAIRS[name]
        assert {section.alpha for section in recipe.compositions.values()} == {2.0}
        assert (recipe.prompts.take, recipe.rollout.responses, recipe.rollout.max_tokens) == (3200, 4, 2048)


def test_an_anchor_is_the_same_in_every_file_that_names_it() -> None:
    seen: dict[str, set[str]] = {}
    for composition in [*SUBSETS, "sweep", "ablation", "klear-decs-online", "klear-decs-mimo-online"]:
        for name, anchor in paper("base", "qwen3-4b", "math", composition).anchors.items():
            seen.setdefault(name, set()).add(anchor.model_dump_json())
    assert {name: len(versions) for name, versions in seen.items()} == dict.fromkeys(PAIRS, 1)


def test_equal_compositions_and_the_sweep_have_the_papers_weights() -> None:
    for names in SUBSETS:
        anchors = names.split("-")
        weights = paper("base", "qwen3-4b", "math", names).compositions[names].weights
        assert weights == pytest.approx(dict.fromkeys(anchors, 1 / len(anchors)))
    sweep = paper("base", "qwen3-4b", "math", "sweep").compositions
    shares = [0.25, 0.375, 0.5, 0.625, 0.75]
    named = {share: f"rho-{share:.3f}" if share != 0.5 else "klear-decs" for share in shares}  # that is trained already
    assert {name: section.weights["decs"] for name, section in sweep.items()} == {
        name: share for share, name in named.items()
    }
    assert sweep["klear-decs"] == paper("base", "qwen3-4b", "math", "klear-decs").compositions["klear-decs"]


def test_the_ablation_table_is_whole() -> None:
    compositions = paper("base", "qwen3-4b", "math", "ablation").compositions
    methods = {name: (section.method, section.objective) for name, section in compositions.items()}
    for setting in ("klear", "decs", "klear-decs"):
        assert methods[setting] == ("joint", None)
        assert methods[f"{setting}-naive"] == ("joint", "direct-opd")
        assert methods[f"{setting}-online"] == ("online", None)
    assert methods["mixture"] == ("mixture", None)
    assert compositions["klear-then-decs"].sequence == ["klear", "decs"]
    assert compositions["decs-then-klear"].sequence == ["decs", "klear"]
    assert len(methods) == 12


def test_the_cases_have_the_papers_rules() -> None:
    cases = paper("base", "qwen3-4b", "math", "cases-math").report.cases
    cases |= paper("base", "qwen3-4b", "code", "cases-code").report.cases
    said = {name: (case.benchmark, case.wrong, case.right, case.shortest) for name, case in cases.items()}
    both = (["decs"], ["klear", "klear-decs"], "klear-decs")
    assert said == {
        "A": ("aime-2024", ["klear"], ["mimo", "klear-mimo"], None),
        "B": ("aime-2024", ["mimo"], ["klear", "klear-mimo"], None),
        "C": ("aime-2024", *both),
        "D": ("livecodebench-v5", *both),
    }


def test_online_with_three_anchors_has_the_weights_of_the_cached_one() -> None:
    online = paper("base", "qwen3-4b", "math", "klear-decs-mimo-online").compositions["klear-decs-mimo-online"]
    cached = paper("base", "qwen3-4b", "math", "klear-decs-mimo").compositions["klear-decs-mimo"]
    assert (online.method, online.weights, online.alpha) == ("online", cached.weights, cached.alpha)


def test_the_page_has_the_launches_of_every_student_with_what_plan_says() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    found = text.partition("<!-- launches -->\n")[2].partition("<!-- /launches -->")[0]
    assert found == "\n".join(map(_launches, STUDENTS))


def _launches(student: str) -> str:
    """A student's table: how to start its part of the main results, and what it takes."""
    parts = ("base", student, "math", "klear", "decs", "klear-decs")
    recipe = paper(*parts)
    lines = [
        f"{recipe.student.model.split('/')[1]}, with `FILES` = `recipes/paper/{{{','.join(parts)}}}.toml`:",
        "",
        "| GPUs | launch | one composition | all three | evaluation of a policy | GB of each GPU in training |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for gpus, launch in LAUNCHES.items():
        plan = make_plan(recipe, PlannedMachine(find_gpu("H100"), gpus))
        each = next(row for row in plan.memory if row.stage == "train")
        hours = " | ".join(f"{h / gpus:.1f} h" for h in (plan.one_composition, plan.all_compositions, plan.evaluation))
        room = f"{(each.weights + each.working) / 1e9:.0f}" + ("" if each.fits else ", does not fit")
        lines.append(f"| {gpus} | `{launch} FILES` | {hours} | {room} |")
        assert all(row.fits for row in plan.memory if row.stage != "train"), student
    return "\n".join(lines) + "\n"


def test_the_page_names_only_recipes_and_policies_that_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    commands = re.findall(r"lweave (\w+) +recipes/paper/\{([^}]*)\}\.toml", text)
    assert len(commands) > 25
    known: set[str] = set()
    for _, files in commands:
        recipe = paper(*files.split(","))
        known |= {*recipe.compositions, *recipe.policies}
    rows = re.findall(r"^\| [^|]* \| ((?:`[\w.-]+` ?)+) \|$", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)}
    assert {"rho-0.375", "interpolated-0.8", "mixture", "decs-then-klear"} <= named <= known
    files = set(
        re.findall(r"`([\w.-]+)`", next(line for line in text.splitlines() if line.startswith("| `qwen3-1.7b")))
    )
    assert files == {path.stem for path in PAPER.glob("*.toml")} - {"base"}
