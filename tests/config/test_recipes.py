"""Merging, overriding and writing back recipes."""

import re
import tomllib
from pathlib import Path

import pytest

from lightning_weave.config import (
    Grading,
    Recipe,
    check_recipe,
    dump_recipe,
    load_recipe,
    merge_overrides,
    merge_tables,
)
from lightning_weave.config.composition import METHODS

BASE = """
name = "base"
[student]
model = "Qwen/Qwen3-4B"
[anchors.klear]
post = "Kwai-Klear/Klear-Reasoner-8B"
pre = "Qwen/Qwen3-8B-Base"
[anchors.decs]
post = "pixas/DECS_1.5B"
pre = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
aliases = { "<|im_end|>" = "<｜end▁of▁sentence｜>" }
[compositions.klear-decs]
weights = { klear = 0.5, decs = 0.5 }
"""


def load(tmp_path: Path, *texts: str, sets: tuple[str, ...] = ()) -> Recipe:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.toml")
        files[-1].write_text(text, encoding="utf-8")
    return load_recipe(files, sets)


def test_unsaid_values_are_the_papers(tmp_path: Path) -> None:
    recipe = load(tmp_path, BASE)
    rollout, train = recipe.rollout, recipe.train
    assert (rollout.temperature, rollout.responses, rollout.max_tokens) == (1.0, 4, 2048)
    assert (rollout.seed, train.seed, recipe.prompts.take, recipe.reference.candidates) == (42, 1234, 3200, 16)
    assert (train.epochs, train.prompts_per_round, train.updates_per_round) == (2, 64, 4)
    adam = train.optimizer
    assert (train.learning_rate, adam.betas, adam.weight_decay, adam.clip) == (1e-6, [0.9, 0.999], 0.01, 1.0)
    assert (recipe.eval.temperature, recipe.eval.top_p) == (0.6, 0.95)
    # 3,200 prompts x 4 responses for two epochs in rounds of 256: the paper's 100 rounds and 400 updates
    rounds = 3200 * 4 * train.epochs // (train.prompts_per_round * rollout.responses)
    assert (rounds, rounds * train.updates_per_round) == (100, 400)


def test_later_files_win_and_weights_are_replaced_whole(tmp_path: Path) -> None:
    over = "[compositions.klear-decs]\nweights = { klear = 1.0 }\n[train]\nlearning_rate = 1e-5\nepochs = 3"
    recipe = load(tmp_path, BASE, over, sets=("train.epochs=4", "name=other", "student.model=Qwen/Qwen3-1.7B"))
    assert recipe.compositions["klear-decs"].weights == {"klear": 1.0}
    assert (recipe.train.learning_rate, recipe.train.epochs) == (1e-5, 4)
    assert (recipe.name, recipe.student.model) == ("other", "Qwen/Qwen3-1.7B")


def test_raw_weights_need_normalize_false(tmp_path: Path) -> None:
    over = "[compositions.klear-decs]\nnormalize = false\nweights = { klear = 1.0, decs = 1.0 }\nalpha = 1.25"
    assert load(tmp_path, BASE, over).compositions["klear-decs"].weights == {"klear": 1.0, "decs": 1.0}


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load(tmp_path, BASE, '[rollout]\nfrom = "own.jsonl"\n[train.lora]\nrank = 8')
    again = load(tmp_path, dump_recipe(recipe))
    assert again == recipe
    assert again.rollout.from_ == "own.jsonl"


@pytest.mark.parametrize(
    "way",
    [
        "alpha = 1.5",
        "kl_budget = 0.02",
        "method = 'online'\nobjective = 'reverse-kl'",
        "method = 'mixture'\nkl_budget = 0.02",
        "method = 'sequential'\nsequence = ['decs', 'klear']\ndose = 'matched'\nresample = false",
        "method = 'teacher'\nweights = { decs = 1.0 }",
        "epochs = 3",
    ],
)
def test_every_way_to_train_reads_back_as_itself(tmp_path: Path, way: str) -> None:
    recipe = load(tmp_path, BASE, f"[compositions.klear-decs]\n{way}")
    assert load(tmp_path, dump_recipe(recipe)).model_dump() == recipe.model_dump()


def test_a_later_file_or_an_override_changes_the_method(tmp_path: Path) -> None:
    over = "[compositions.klear-decs]\nmethod = 'sequential'\nsequence = ['klear', 'decs']"
    later = load(tmp_path, BASE, over).compositions["klear-decs"]
    assert (later.method, later.sequence, later.weights) == (
        "sequential",
        ["klear", "decs"],
        {"klear": 0.5, "decs": 0.5},
    )
    online = load(tmp_path, BASE, sets=("compositions.klear-decs.method=online",))
    assert online.compositions["klear-decs"].method == "online"
    resolved = dump_recipe(online)
    back = load(tmp_path, resolved, sets=("compositions.klear-decs.method=joint",))
    assert back == load(tmp_path, BASE)


def test_methods_without_weights_or_alpha_have_none(tmp_path: Path) -> None:
    made = "[compositions.sharp]\nmethod = 'self'\nsharpen = 0.5\n[compositions.klear-decs]\nkl_budget = 0.02"
    recipe = load(tmp_path, BASE, made)
    assert recipe.compositions["sharp"].weights == recipe.compositions["sharp"].used == {}
    assert recipe.compositions["klear-decs"].alpha is None
    written = dump_recipe(recipe)
    assert "alpha" not in written[written.index("[compositions.klear-decs]") : written.index("[compositions.sharp]")]
    assert load(tmp_path, written) == recipe


def test_the_page_has_every_method_with_the_keys_of_its_own() -> None:
    page = (Path(__file__).parents[2] / "docs" / "your-models.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"(\w+)"`[^|]*\|[^|]*\|([^|]*)\|$', page, flags=re.MULTILINE)
    assert [method for method, _ in rows] == list(METHODS)
    shared = {"method", "alpha", "objective", "epochs", "seed", "weights", "normalize", "allow_negative", "routes"}
    for method, keys in rows:
        assert set(re.findall(r"`(\w+)", keys)) - shared == set(METHODS[method].model_fields) - shared


def test_plain_data_is_checked_the_same() -> None:
    assert check_recipe({"name": "x", "student": {"model": "m"}}).train.epochs == 2


def test_setting_one_weight_keeps_the_others_but_a_table_replaces_them() -> None:
    base = {"compositions": {"even": {"weights": {"acc": 0.5, "brief": 0.5}}}}
    one = merge_overrides(base, ["compositions.even.weights.acc=0.7"])
    assert one["compositions"]["even"]["weights"] == {"acc": 0.7, "brief": 0.5}
    for override in ("compositions.even.weights={acc=1.0}", "compositions.even={weights={acc=1.0}}"):
        assert merge_overrides(base, [override])["compositions"]["even"]["weights"] == {"acc": 1.0}
    later = {"compositions": {"even": {"weights": {"acc": 1.0}}}}
    assert merge_tables(base, later) == later, "a later file replaces the whole table"


TEMPLATE = "{problem}\n\nPut the final answer in \\boxed{{}}."
ASKED = [  # [prompts], [eval] -> how prompts and evaluation ask
    ({}, {}, "plain", "boxed"),
    ({"columns": {"answer": "answer"}}, {}, "boxed", "boxed"),
    ({"format": "plain"}, {}, "plain", "plain"),
    ({"format": "question-answer"}, {}, "question-answer", "question-answer"),
    ({"format": "dapo"}, {}, "dapo", "boxed"),  # its answers are not boxed
    ({"format": "livecodebench"}, {}, "livecodebench", "boxed"),
    ({"format": TEMPLATE}, {}, TEMPLATE, TEMPLATE),
    ({"format": TEMPLATE}, {"format": "question-answer"}, TEMPLATE, "question-answer"),
    ({"format": "plain"}, {"format": TEMPLATE}, "plain", TEMPLATE),
]


@pytest.mark.parametrize(("prompts", "evaluation", "asked", "examined"), ASKED)
def test_evaluation_asks_as_the_prompts_do(prompts: dict, evaluation: dict, asked: str, examined: str) -> None:
    said = {"chat": True, "thinking": False, "system": "Be brief."} if asked != "livecodebench" else {"thinking": False}
    recipe = check_recipe({"name": "x", "student": {"model": "s"}, "prompts": prompts | said, "eval": evaluation})
    assert (recipe.prompts.format, recipe.eval.format) == (asked, examined)
    assert (recipe.eval.system, recipe.eval.thinking) == (said.get("system"), False)
    assert check_recipe(tomllib.loads(dump_recipe(recipe))) == recipe


def test_evaluation_may_ask_otherwise_in_every_respect() -> None:
    prompts = {"format": TEMPLATE, "system": "Be brief.", "thinking": False}
    evaluation = {"format": "plain", "chat": False, "thinking": True}
    recipe = check_recipe({"name": "x", "student": {"model": "s"}, "prompts": prompts, "eval": evaluation})
    section = recipe.eval
    assert (section.format, section.system) == ("plain", None)
    assert (section.chat, section.thinking) == (False, True)


def test_graders_are_kept_as_they_are_said() -> None:
    graders = {
        "letters": "choice",
        "file:b/sums.jsonl": "numeric:0.01",
        "words": "regex:#### (.*)",
        "own": "my.py:grade",
    }
    names = ["file:a/letters.jsonl", "file:b/sums.jsonl", "file:words.jsonl", "file:own.jsonl"]
    evaluation = {"benchmarks": names, "graders": graders}
    recipe = check_recipe({"name": "x", "student": {"model": "s"}, "eval": evaluation})
    assert check_recipe(tomllib.loads(dump_recipe(recipe))) == recipe
    rules = [Grading.parse(text) for text in recipe.eval.graders.values()]
    assert [rule.kind for rule in rules] == ["choice", "numeric", "regex", "python"]
    assert (rules[1].tolerance, rules[2].pattern, rules[3].function) == (0.01, "#### (.*)", "my.py:grade")
    assert list(map(str, rules)) == list(graders.values())


def test_a_revision_follows_a_hub_name_and_never_a_path() -> None:
    data = {
        "name": "x",
        "student": {"model": "Qwen/Qwen3-4B@main"},
        "anchors": {
            "a": {"post": "x/post@v1", "pre": "./local@dir"},
            "s": {"model": "student", "post_prompt": {"prefix": "y"}},
        },
        "policies": {"p": {"model": "runs/r/train/even@3f2a91c4/final"}},
    }
    recipe = check_recipe(data)
    assert (recipe.student.name, recipe.student.revision) == ("Qwen/Qwen3-4B", "main")
    assert recipe.anchor_model("a", "post") == ("x/post", "v1")
    assert recipe.anchor_model("a", "pre") == ("./local@dir", None)
    assert recipe.anchor_model("s", "pre") == ("Qwen/Qwen3-4B", "main")
    assert (recipe.policies["p"].name, recipe.policies["p"].revision) == ("runs/r/train/even@3f2a91c4/final", None)


def test_the_engine_of_a_stage_has_its_dtype_and_options() -> None:
    engine = {
        "score": "vllm",
        "python": "p",
        "dtype": {"rollout": "float32"},
        "options": {"tensor_parallel_size": 2, "seed": 1, "score": {"tensor_parallel_size": 4}},
    }
    recipe = check_recipe({"name": "x", "student": {"model": "s"}, "engine": engine, "eval": {"batch_size": 3}})
    score, rollout, evaluation = (recipe.engine_of(stage) for stage in ("score", "rollout", "eval"))
    assert (score.engine, score.dtype, score.options) == ("vllm", "auto", {"tensor_parallel_size": 4, "seed": 1})
    assert (rollout.dtype, rollout.python, rollout.options) == ("float32", "p", {"tensor_parallel_size": 2, "seed": 1})
    assert (rollout.batch_size, evaluation.batch_size, score.token_budget) == (64, 3, 16384)
    assert check_recipe(tomllib.loads(dump_recipe(recipe))) == recipe


def test_an_anchor_may_have_an_engine_or_a_server_for_each_side() -> None:
    anchors = {
        "plain": {"post": "a", "pre": "b"},
        "big": {"post": "a", "pre": "b", "engine": "vllm", "options": {"quantization": "fp8"}},
        "far": {"post": "a", "pre": "b", "engine": {"post": "http://gpu-7:8000"}},
    }
    recipe = check_recipe({"name": "x", "student": {"model": "s"}, "anchors": anchors})
    scored = {name: [recipe.scored_by(name, role) for role in ("post", "pre")] for name in anchors}
    assert scored == {"plain": ["hf", "hf"], "big": ["vllm", "vllm"], "far": ["server", "hf"]}
    far = recipe.anchors["far"]
    assert (far.server("post"), far.server("pre"), far.own_engine("post")) == ("http://gpu-7:8000", None, None)
    assert check_recipe(tomllib.loads(dump_recipe(recipe))) == recipe


def test_a_check_stops_warns_or_is_off() -> None:
    checks = {"truncated": 0.7, "unanswered": "warn", "surviving": False}
    section = check_recipe({"name": "x", "student": {"model": "s"}, "checks": checks}).checks
    assert section.levels("truncated", 0.5) == (0.5, 0.7)
    assert section.levels("unanswered", 0.5) == (0.5, False)
    assert section.levels("surviving", 0.5) == (False, False)
