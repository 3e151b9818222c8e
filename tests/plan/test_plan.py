"""The verb: every recipe of the paper has a plan, without torch and without weights; bytes are those of a real run."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import tiny
from lightning_weave import world
from lightning_weave.bench import definitions
from lightning_weave.bench.definitions import BenchmarkKind
from lightning_weave.config import check_recipe, load_recipe
from lightning_weave.plan.architecture import find_gpu, find_shape
from lightning_weave.plan.costs import CONSTANTS, PlannedMachine
from lightning_weave.plan.memory import cache_bytes, fit_training
from lightning_weave.plan.plan import make_plan, run
from lightning_weave.progress import Progress
from lightning_weave.stages import reference, rollout, score

PAPER = Path(__file__).parents[2] / "recipes" / "paper"
STUDENTS = ["qwen3-1.7b", "qwen3-4b", "qwen3-4b-thinking-2507", "qwen3.5-4b", "olmo-3-7b-think"]
SETS = ["klear", "decs", "mimo", "klear-decs", "klear-mimo", "decs-mimo", "klear-decs-mimo", "sweep", "ablation"]
EIGHT = PlannedMachine(find_gpu("H100"), 8)


def paper(*names: str):
    return load_recipe([PAPER / f"{name}.toml" for name in names])


def test_every_recipe_of_the_paper_has_a_plan() -> None:
    for student, domain, name in itertools.product(STUDENTS, ["math", "code"], SETS):
        plan = make_plan(paper("base", student, domain, name), EIGHT)
        assert 3 < plan.one_composition < 40, (student, domain, name)
        assert plan.all_compositions >= plan.one_composition
        # Students of 7B cost 16 bytes per weight to train; an H100 of eight has room for that.
        cached = [row for row in plan.memory if "online" not in row.what]
        assert all(row.fits for row in cached), (student, domain, name)


def test_more_compositions_cost_only_their_training() -> None:
    one = make_plan(paper("base", "qwen3-4b", "math", "klear-decs"), EIGHT)
    five = make_plan(paper("base", "qwen3-4b", "math", "sweep"), EIGHT)
    assert (one.compositions, five.compositions) == (1, 5)
    assert one.cache_hours == five.cache_hours
    training = one.one_composition - one.cache_hours
    assert five.all_compositions == pytest.approx(one.cache_hours + 5 * training)


def changed(recipe, **sections):
    """The same recipe with some keys of some sections changed."""
    data = recipe.model_dump(by_alias=True, exclude_none=True)
    return check_recipe({**data, **{name: {**data[name], **keys} for name, keys in sections.items()}})


def stage_hours(recipe, machine: PlannedMachine = EIGHT) -> dict[str, float]:
    plan = make_plan(recipe, machine)
    return {row.stage: row.gpu_hours for row in plan.stages} | {"eval": plan.evaluation}


def test_sampling_in_16_bits_costs_at_most_half() -> None:
    """Half of the bytes of weights and caches, and products on tensor cores."""
    recipe = paper("base", "qwen3-4b", "math", "klear")
    whole = stage_hours(changed(recipe, engine={"dtype": "float32"}))
    half = stage_hours(changed(recipe, engine={"dtype": "bfloat16"}))
    assert whole["rollout"] / 8 < half["rollout"] <= whole["rollout"] / 2
    assert whole["eval"] / 8 < half["eval"] <= whole["eval"] / 2


def test_long_responses_cost_more_per_token_to_sample() -> None:
    """Every step reads the cache of what was sampled before."""
    recipe = changed(paper("base", "qwen3-4b", "math", "klear"), engine={"dtype": "bfloat16"})
    short, long = (stage_hours(changed(recipe, rollout={"max_tokens": size}))["rollout"] for size in (2048, 8192))
    assert long > 6 * short


def test_recomputed_activations_cost_time() -> None:
    recipe = paper("base", "qwen3-4b", "math", "klear")
    recomputed, kept = (
        stage_hours(changed(recipe, train={"gradient_checkpointing": on}))["train"] for on in (True, False)
    )
    assert 0.75 * recomputed < kept < 0.9 * recomputed  # a fourth forward pass


def test_ranks_with_few_rows_wait() -> None:
    """Updates have 64 rows: on 64 GPUs half of the time of training is lost, on 128 half of the GPUs have none."""
    keys = {"gradient_checkpointing": False, "token_budget": 2048}  # one row at a time
    recipe = changed(paper("base", "qwen3-4b", "math", "klear"), train=keys)
    hours = {gpus: stage_hours(recipe, PlannedMachine(find_gpu("H100"), gpus))["train"] for gpus in (8, 16, 64, 128)}
    assert hours[8] == hours[16] == pytest.approx(hours[64] / 2) == pytest.approx(hours[128] / 4)
    # Several rows at a time gather the weights less often: 20 bytes of 4e9 parameters are 28 ms of an H100.
    rows = paper("base", "qwen3-4b", "math", "klear").train.epochs * 12800
    saved = hours[8] - stage_hours(changed(recipe, train={"token_budget": 2 * (2048 + 154)}))["train"]
    assert saved == pytest.approx(rows / 2 * 0.0283 / CONSTANTS.train / 3600, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "gpus", "longer", "keys", "expected"),
    [
        ("H200", 8, 0, {}, (False, 16384)),
        ("H100", 8, 0, {}, (False, 8192)),
        ("H100", 1, 0, {}, (True, 16384)),
        ("H100", 8, 30_000, {}, (True, 16384)),
        ("H100", 8, 0, {"gradient_checkpointing": True}, (True, 16384)),
        ("H100", 8, 0, {"token_budget": 16384}, (True, 16384)),
        ("RTX4090", 8, 0, {"gradient_checkpointing": False}, (False, 4096)),  # which does not fit
    ],
)
def test_memory_decides_what_is_kept(gpu: str, gpus: int, longer: int, keys: dict, expected: tuple[bool, int]) -> None:
    recipe = paper("base", "qwen3-4b", "math", "klear")
    recipe = changed(recipe, train=keys, rollout={"max_tokens": 2048 + longer})
    memory = find_gpu(gpu).memory
    *found, needed = fit_training(recipe, find_shape(recipe.student.name), gpus, memory, bytes_per_number=2)
    assert tuple(found) == expected
    (row,) = (row for row in make_plan(recipe, PlannedMachine(find_gpu(gpu), gpus)).memory if row.stage == "train")
    assert (row.weights, row.working) == (needed.weights, needed.working)
    assert row.fits == (max(needed.total, needed.loading) <= 0.9 * memory)


def test_online_training_always_recomputes() -> None:
    recipe = paper("base", "qwen3-1.7b", "math", "klear-decs-online")
    assert fit_training(recipe, find_shape(recipe.student.name), 8, 1e12, bytes_per_number=2)[:2] == (True, 16384)


def test_time_knows_the_dtype_of_products() -> None:
    recipe = paper("base", "qwen3-4b", "math", "klear")  # float32
    hours = {}
    for name, machine, dtype in (
        ("float32", {"tf32": False}, "float32"),
        ("tf32", {"tf32": True}, "float32"),
        ("16", {}, "bfloat16"),
    ):
        plan = make_plan(changed(recipe, machine=machine, engine={"dtype": {"score": dtype}}), EIGHT)
        hours[name] = sum(row.gpu_hours for row in plan.stages if row.stage == "score")
    assert hours["float32"] > 2 * hours["tf32"]
    assert hours["tf32"] > 1.5 * hours["16"]
    # No faster than the hardware: 80 % of 67 TFLOP/s.
    work = sum(row.operations for row in make_plan(recipe, EIGHT).stages if row.stage == "score")
    assert hours["float32"] * 3600 > work / (0.8 * 67e12)


def test_online_training_is_planned_as_it_is_run() -> None:
    recipe = paper("base", "qwen3-4b", "math", "ablation")
    plan = make_plan(recipe, EIGHT)
    hours = {(row.stage, row.what): row.gpu_hours for row in plan.stages}
    reference, training = hours["reference", "Qwen/Qwen3-4B"], hours["train", "klear-decs"]
    scoring = sum(cost for (stage, what), cost in hours.items() if stage == "score" and "MiMo" not in what)
    (sampling,) = (cost for (stage, _), cost in hours.items() if stage == "rollout")
    # Two epochs make the cache twice, each sampled by vLLM and read by the student as it is and as it was.
    expected = 2 * (sampling + 2 * reference + scoring) + training
    assert hours["train", "klear-decs-online"] == pytest.approx(expected)
    faster, slower = (
        make_plan(changed(recipe, engine={"rollout": "hf"}, rollout={"batch_size": size}), EIGHT) for size in (64, 8)
    )
    assert slower.online > faster.online, "transformers samples with the trained student, batch by batch"

    def online(plan):
        (row,) = [row for row in plan.memory if row.what.startswith("klear-decs-online")]
        return row

    kept, one = online(plan), online(make_plan(changed(recipe, train={"keep_anchors": False}), EIGHT))
    assert kept.weights - one.weights == pytest.approx(
        4 * (8.2e9 + 2 * 1.8e9), rel=0.05
    )  # of four anchors, the largest
    assert not kept.fits


def test_a_composition_may_train_longer_or_sample_again() -> None:
    recipe = paper("base", "qwen3-4b", "math", "ablation").model_dump(by_alias=True, exclude_none=True)
    recipe["compositions"]["mixture"]["epochs"] = 6
    recipe["compositions"]["decs-then-klear"]["resample"] = False
    plan = make_plan(check_recipe(recipe), EIGHT)
    hours = {row.what: row.gpu_hours for row in plan.stages}
    assert hours["mixture"] == pytest.approx(3 * hours["klear-decs"])
    work = {row.what: row.operations for row in plan.stages}
    assert work["mixture"] == pytest.approx(3 * work["klear-decs"])
    assert hours["decs-then-klear"] == hours["klear-decs"]
    # The second leg samples half of the trajectories anew, and scores them under its own pair.
    student = sum(row.gpu_hours for row in plan.stages if row.stage in ("rollout", "reference"))
    pair = hours["pixas/DECS_1.5B"] + hours["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"]
    assert hours["klear-then-decs"] == pytest.approx(hours["klear-decs"] + (student + pair) / 2)
    assert plan.compositions == 9  # online ones need no cache
    # Two epochs in four parts: three times half of the prompts again, and two students read them.
    recipe["compositions"]["klear-decs"]["refresh"] = 4
    refreshed = {row.what: row.gpu_hours for row in make_plan(check_recipe(recipe), EIGHT).stages}
    (reference,) = [row.gpu_hours for row in plan.stages if row.stage == "reference"]
    anchors = sum(row.gpu_hours for row in plan.stages if row.stage == "score")
    again = 3 / 2 * (student + reference + anchors)
    assert refreshed["klear-decs"] == pytest.approx(hours["klear-decs"] + again)
    recipe["compositions"]["klear-decs"]["refresh"] = "auto"
    (auto,) = [row for row in make_plan(check_recipe(recipe), EIGHT).stages if row.what == "klear-decs"]
    assert auto.least_gpu_hours == pytest.approx(hours["klear-decs"])
    assert auto.gpu_hours == pytest.approx(refreshed["klear-decs"])


@pytest.mark.parametrize("kind", ["math", "code"])
def test_evaluation_samples_as_the_benchmarks_do(monkeypatch: pytest.MonkeyPatch, kind: BenchmarkKind) -> None:
    recipe = paper("base", "qwen3-4b", kind, "klear").model_dump(by_alias=True, exclude_none=True)
    recipe["eval"] |= {"samples": None, "max_tokens": None}
    usual = make_plan(check_recipe(recipe), EIGHT).evaluation
    same = {"samples": definitions.SAMPLES[kind], "max_tokens": definitions.MAX_TOKENS[kind]}
    assert make_plan(check_recipe({**recipe, "eval": recipe["eval"] | same}), EIGHT).evaluation == usual
    monkeypatch.setitem(definitions.SAMPLES, kind, 2 * definitions.SAMPLES[kind])
    monkeypatch.setitem(definitions.MAX_TOKENS, kind, 3 * definitions.MAX_TOKENS[kind])
    # Six times the tokens, and each reads the cache of an answer that is three times as long.
    assert 6 * usual < make_plan(check_recipe(recipe), EIGHT).evaluation < 18 * usual


def test_a_checkpoint_that_two_pairs_share_is_scored_once() -> None:
    extra = {"anchors": {"other": {"post": "Qwen/Qwen3-4B", "pre": "Qwen/Qwen3-8B-Base"}}}
    recipe = paper("base", "qwen3-4b", "math", "klear").model_dump(by_alias=True, exclude_none=True)
    recipe["anchors"] |= extra["anchors"]
    scored = [row.what for row in make_plan(check_recipe(recipe), EIGHT).stages if row.stage == "score"]
    assert sorted(scored) == ["Kwai-Klear/Klear-Reasoner-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B-Base"]


def test_the_command_answers_without_torch(tmp_path: Path) -> None:
    files = [str(PAPER / f"{name}.toml") for name in ("base", "qwen3.5-4b", "code", "klear-decs-mimo")]
    code = (
        "import sys; sys.argv = ['lweave', 'plan', *sys.argv[1:], '--json', '--gpu', 'A100', '--gpus', '4']\n"
        "from lightning_weave.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", code, *files]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert (plan["gpu"], plan["gpus"], len(plan["stages"])) == ("A100", 4, 2 + 6 + 1)


def test_a_tiny_model_takes_the_time_of_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And the units are those in which it is not zero."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo-world").symlink_to(Path(world.__file__).parent / "shipped")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe([PAPER.parent / "demo.toml"])
    plan = make_plan(recipe, EIGHT)
    (hours,) = {row.gpu_hours for row in plan.stages if row.stage == "train"}
    layers, micro_batches = 3, recipe.train.epochs * plan.trajectories / 8  # one for the rows of a GPU
    assert 3600 * hours == pytest.approx(micro_batches * layers * 168 * 10e-6)
    run(recipe, EIGHT, None, as_json=False, console=Console(width=200))
    assert not re.search(r"(?<![\d.])0(\.0*)? ", capsys.readouterr().out)


@pytest.mark.slow
def test_disk_is_what_a_real_run_takes(tmp_path: Path) -> None:
    world = tiny.make_world(tmp_path, prompts=32)
    world["rollout"] |= {"prompts_per_shard": 32, "responses": 4, "max_tokens": 64}
    world["reference"]["candidates"] = 16
    run, quiet = tiny.run_of(world), Progress(quiet=True)
    rollout.rollout(run, quiet)
    reference.reference(run, quiet)
    score.score(run, quiet, ["acc-pre"])
    stages = [run.stage("rollout"), run.stage("reference")]
    stages.append(run.scores_of("acc")[1])
    manifests = [stage.require() for stage in stages]
    rows, positions = manifests[0]["rows"], manifests[0]["positions"]
    lines = (run.directory / "prompts" / "prompts.jsonl").read_text().splitlines()
    prompt_tokens = sum(len(json.loads(line)["token_ids"]) for line in lines) / len(lines)
    predicted = cache_bytes(prompt_tokens, positions / rows, rows, 16)
    taken = [sum(entry["bytes"] for entry in manifest["shards"]) for manifest in manifests]
    assert predicted["reference"] == pytest.approx(taken[1], rel=0.03)
    assert predicted["score"] == pytest.approx(taken[2], rel=0.03)
    assert 0 < taken[0] - predicted["rollout"] < 64 * rows + 4096  # offsets, checksums and a header come on top


@pytest.mark.parametrize("take", [None, 800, 5])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_with_few_prompts_makes_few_trajectories(tmp_path: Path, kind: str, take: int | None) -> None:
    path = tmp_path / f"prompts.{kind}"
    rows = [{"problem": str(number)} for number in range(60)]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    recipe = paper("base", "qwen3-4b", "math", "klear").model_dump(by_alias=True, exclude_none=True)
    recipe["prompts"] = {"source": str(path), "take": take}
    count = make_plan(check_recipe(recipe), EIGHT).trajectories
    assert count == (5 if take == 5 else 60) * recipe["rollout"]["responses"]
