"""A finished run stays finished: fingerprints of every method are literally those of earlier versions."""

import tomllib
from pathlib import Path

import pytest

from lightning_weave.config import Recipe, check_recipe, dump_recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.runs.steps import Steps
from tiny import make_world, steps_of

COMPOSITIONS = """
[compositions]
joint = { weights = { right = 0.5, brief = 0.5 } }
one = { weights = { right = 1.0, brief = 0.0 }, alpha = 1.5, epochs = 5 }
naive = { weights = { brief = 1.0 }, objective = "direct-opd" }
contrast = { weights = { right = 1.5, brief = -0.25 }, normalize = false, allow_negative = true }
budget = { weights = { right = 0.5, brief = 0.5 }, kl_budget = 0.02 }
mixture = { method = "mixture", weights = { right = 0.25, brief = 0.75 } }
mixture-budget = { method = "mixture", weights = { right = 0.5, brief = 0.5 }, kl_budget = 0.02 }
online = { method = "online", weights = { right = 0.5, brief = 0.5 } }
online-exact = { method = "online", weights = { right = 0.5, brief = 0.5 }, objective = "reverse-kl" }
sequential = { method = "sequential", weights = { right = 0.5, brief = 0.5 }, sequence = ["brief", "right"] }
teacher = { method = "teacher", weights = { right = 1.0 } }
self = { method = "self", sharpen = 0.5, alpha = 3.0 }

[compositions.matched]
method = "sequential"
weights = { right = 0.5, brief = 0.5 }
sequence = ["right", "brief"]
dose = "matched"
resample = false
"""

# As recipe.toml had it when a composition said its method by flags: every key is there.
WITH_FLAGS = """
[compositions.joint]
normalize = true
allow_negative = false
alpha = 2.0
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.one]
normalize = true
allow_negative = false
alpha = 1.5
epochs = 5
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 1.0, brief = 0.0 }

[compositions.naive]
normalize = true
allow_negative = false
alpha = 2.0
objective = "direct-opd"
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { brief = 1.0 }

[compositions.contrast]
normalize = false
allow_negative = true
alpha = 2.0
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 1.5, brief = -0.25 }

[compositions.budget]
normalize = true
allow_negative = false
kl_budget = 0.02
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.mixture]
normalize = true
allow_negative = false
alpha = 2.0
online = false
mixture = true
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.25, brief = 0.75 }

[compositions.mixture-budget]
normalize = true
allow_negative = false
kl_budget = 0.02
online = false
mixture = true
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.online]
normalize = true
allow_negative = false
alpha = 2.0
online = true
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.online-exact]
normalize = true
allow_negative = false
alpha = 2.0
objective = "reverse-kl"
online = true
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.sequential]
normalize = true
allow_negative = false
alpha = 2.0
online = false
mixture = false
sequence = ["brief", "right"]
dose = "full"
resample = true
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.matched]
normalize = true
allow_negative = false
alpha = 2.0
online = false
mixture = false
sequence = ["right", "brief"]
dose = "matched"
resample = false
teacher = false
weights = { right = 0.5, brief = 0.5 }

[compositions.teacher]
normalize = true
allow_negative = false
alpha = 2.0
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = true
weights = { right = 1.0 }

[compositions.self]
normalize = true
allow_negative = false
alpha = 3.0
online = false
mixture = false
sequence = []
dose = "full"
resample = true
teacher = false
sharpen = 0.5
weights = {}
"""

FINGERPRINTS = {
    "joint": "9dc8e793213d6001",
    "one": "8a1eab8fcb747d5b",
    "naive": "114cf9a887550c34",
    "contrast": "7c70afd6a9d4acc6",
    "budget": "9441fde8518a5436",
    "mixture": "1566a4f6ae42cc29",
    "mixture-budget": "91701e1c2dff5284",
    "online": "02808e7acb405233",
    "online-exact": "f45ebb7782be83cf",
    "sequential": "ce7b26d1f48f66f0",
    "matched": "4144484aae739dd6",
    "teacher": "b45941ef0b730bd0",
    "self": "a55323a13028af9f",
}


def write_recipe(folder: Path, compositions: str) -> Path:
    """Write a recipe over models that are a configuration only: enough to be identified by."""
    for name in ("student", "right", "right-base", "brief", "brief-base"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f'{{"name": "{name}"}}\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1?"}\n')
    path = folder / "recipe.toml"
    path.write_text(f"""
name = "all-methods"
runs = "{folder}/runs"
student.model = "{folder}/student"
anchors.right = {{ post = "{folder}/right", pre = "{folder}/right-base" }}
anchors.brief = {{ post = "{folder}/brief", pre = "{folder}/brief-base" }}
prompts.source = "{folder}/prompts.jsonl"
{compositions}""")
    return path


def fingerprints(recipe: Recipe) -> dict[str, str]:
    steps = Steps(recipe)
    return {name: steps.train(name).fingerprint for name in recipe.compositions}


@pytest.mark.parametrize("compositions", [COMPOSITIONS, WITH_FLAGS], ids=["by method", "by flags"])
def test_fingerprints_are_those_of_earlier_versions(tmp_path: Path, compositions: str) -> None:
    recipe = load_recipe([write_recipe(tmp_path, compositions)])
    assert fingerprints(recipe) == FINGERPRINTS
    assert fingerprints(check_recipe(tomllib.loads(dump_recipe(recipe)))) == FINGERPRINTS


def test_settings_that_came_later_count_only_where_they_are_used(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, COMPOSITIONS)
    said = ["train.warmup=0", "train.decay=constant", "train.token_budget=99"]
    assert fingerprints(load_recipe([path], said)) == FINGERPRINTS
    lora = fingerprints(load_recipe([path], ["train.lora={}"]))["joint"]
    assert lora == "a338d6c1d7ee88fa"
    used = ["train.warmup=3", "train.decay=cosine", "train.lora={stabilised=true}", "train.lora={targets='all-linear'}"]
    found = {fingerprints(load_recipe([path], [setting]))["joint"] for setting in used}
    assert len(found | {lora, FINGERPRINTS["joint"]}) == 6


def test_a_recipe_with_all_flags_is_read_as_the_methods_they_meant(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, WITH_FLAGS)
    data = tomllib.loads(path.read_text()) | tomllib.loads(COMPOSITIONS)
    assert load_recipe([path]) == check_recipe(data)


def test_a_recipe_with_all_flags_can_be_overridden(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, WITH_FLAGS)
    sets = [
        "compositions.mixture.method=joint",
        "compositions.joint.method=sequential",
        "compositions.joint.sequence=['brief', 'right']",
        "compositions.sequential.dose=matched",
    ]
    compositions = load_recipe([path], sets).compositions
    assert compositions["mixture"].method == "joint"
    assert compositions["joint"].sequence == ["brief", "right"]
    assert compositions["sequential"].dose == "matched"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compositions.online.mixture=true", 'compositions.online.mixture = true: write method = "mixture" instead'),
        ("compositions.joint.dose=matched", 'compositions.joint.dose = "matched": add method = "sequential"'),
        (
            "compositions.online.kl_budget=0.1",
            'compositions.online.kl_budget = 0.1: method = "online" has no kl_budget',
        ),
        (
            "compositions.joint.aplha=1.0",
            "unknown key compositions.joint.aplha. Did you mean compositions.joint.alpha?",
        ),
    ],
)
def test_what_is_set_over_the_flags_is_checked(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        load_recipe([write_recipe(tmp_path, WITH_FLAGS)], [override])
    assert message in str(raised.value)


def test_prompts_and_evaluations_of_recipes_that_say_how_they_ask_stay_done() -> None:
    """Models and data are named by their names here, not by content: only the settings are looked at."""

    class Known(dict[str, str]):
        def __contains__(self, name: object) -> bool:
            return True

        def __missing__(self, name: str) -> str:
            return name

    recipes = Path(__file__).parents[2] / "recipes"
    expected = {
        "demo": ["649483559742e704", "b16e4e1beaaccadb", "6d96981246eac4e5", "36891f453cf28890"],
        "paper/math": ["716948061dfb8b26", "e9c5513968298a4e", "a0ac6cddf06a95f5", "622243cc7426850d"],
        "paper/code": ["dab7b05a9fc9513d", "db6aa4e4cbe37689", "02a9384b1850514e"],
    }
    for name, fingerprints in expected.items():
        files = [name] if name == "demo" else ["paper/base", "paper/qwen3-4b", name]
        recipe = load_recipe([recipes / f"{file}.toml" for file in files])
        steps = Steps(recipe, "recipe.toml", _identities=Known())
        evaluated = [steps.eval("base", benchmark) for benchmark in recipe.eval.benchmarks]
        assert [step.fingerprint for step in (steps.prompts, *evaluated)] == fingerprints


def test_an_engine_that_scores_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    recipe = load_recipe([write_recipe(tmp_path, COMPOSITIONS)])

    def scored_by(**engine: object) -> list[str]:
        sections = {name: getattr(recipe, name).model_copy(update=engine) for name in ("reference", "score")}
        steps = Steps(recipe.model_copy(update=sections), "r.toml")
        return [steps.reference.fingerprint, steps.scores_of("right")[0].fingerprint]

    engine = scored_by(engine="vllm", options={"tensor_parallel_size": 2})
    assert not set(engine) & set(scored_by())
    assert engine == scored_by(engine="vllm", options={"tensor_parallel_size": 8}, parity=0.01, python="python")
    assert not set(engine) & set(scored_by(engine="vllm", options={"quantization": "fp8"}))


def test_products_in_tf32_make_other_numbers_and_only_those() -> None:
    def steps(**machine: object) -> Steps:
        recipe = {"name": "r", "student": {"model": "s"}, "prompts": {"source": "p"}, "machine": machine}
        recipe["anchors"] = {"a": {"post": "x", "pre": "y"}}
        recipe["compositions"] = {"c": {"weights": {"a": 1.0}}}
        named = {name: name for name in ("s", "x", "y", "p")}
        return Steps(check_recipe(recipe), "recipe.toml", _identities=named)

    usual, rounded, threads = steps(), steps(tf32=True), steps(threads=4)
    for of in (lambda made: made.reference, lambda made: made.scores_of("a")[0], lambda made: made.train("c")):
        assert of(usual).fingerprint == of(threads).fingerprint != of(rounded).fingerprint
    assert usual.rollout.fingerprint == rounded.rollout.fingerprint


def test_what_an_engine_makes_of_the_weights_is_part_of_its_samples(tmp_path: Path) -> None:
    """Only quantization changes the numbers; where an engine runs, and how fast, does not."""
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    world = make_world(tmp_path)

    def fingerprints(**options: object) -> list[str]:
        engine = {"engine": "vllm", "options": options}
        asked = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "chat": False}
        rollout = {**world["rollout"], **engine}
        steps = steps_of({**world, "rollout": rollout, "eval": {**asked, **engine}})
        return [steps.rollout.fingerprint, steps.eval("base", steps.recipe.eval.benchmarks[0]).fingerprint]

    plain = fingerprints()
    assert fingerprints(tensor_parallel_size=2) == plain
    assert all(one != two for one, two in zip(fingerprints(quantization="fp8"), plain, strict=True))
