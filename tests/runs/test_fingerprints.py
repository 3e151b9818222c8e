"""A fingerprint holds what decides the content of a stage, and no names."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning_weave.config import Recipe, check_recipe, dump_recipe, load_recipe
from lightning_weave.config.fields import is_execution
from lightning_weave.run import Run, explain_change
from lightning_weave.store import differences
from tiny import make_world, run_of

COMPOSITIONS = """
[compositions]
joint = { weights = { right = 0.5, brief = 0.5 } }
one = { weights = { right = 1.0, brief = 0.0 }, alpha = 1.5, epochs = 5 }
naive = { weights = { brief = 1.0 }, objective = "direct-opd" }
contrast = { weights = { right = 1.5, brief = -0.25 }, normalize = false, allow_negative = true }
budget = { weights = { right = 0.5, brief = 0.5 }, kl_budget = 0.02 }
dial.method = "joint"
dial.levels = { a = { right = 1.0 }, b = { brief = 1.0 } }
dial.default = "a"
dial.control.prefix = "{level}:"
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
    run = Run(recipe)
    return {name: run.stage("train", name).fingerprint for name in recipe.compositions}


def test_a_recipe_that_is_written_and_read_again_has_the_same_fingerprints(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, COMPOSITIONS)
    recipe = load_recipe([path])
    made = fingerprints(recipe)
    assert len(set(made.values())) == len(made) == 14, "no two methods are the same"
    assert fingerprints(check_recipe(tomllib.loads(dump_recipe(recipe)))) == made
    said = ["train.warmup=0", "train.decay=constant", "train.token_budget=99"]
    assert fingerprints(load_recipe([path], said)) == made, "defaults that are said, and how it is executed"


def test_names_of_anchors_and_compositions_are_not_part_of_it(tmp_path: Path) -> None:
    made = fingerprints(load_recipe([write_recipe(tmp_path, COMPOSITIONS)]))
    text = re.sub(r"\bbrief\b(?!-base|/|\")", "a-first-one", (tmp_path / "recipe.toml").read_text())
    text = re.sub(r'"brief"', '"a-first-one"', text)
    (tmp_path / "recipe.toml").write_text(re.sub(r"(?m)^(\S+) = {(?=.*(weights|method))", r"my-\1 = {", text))
    renamed = load_recipe([tmp_path / "recipe.toml"])
    assert list(renamed.anchors) == ["right", "a-first-one"]
    assert [name.removeprefix("my-") for name in renamed.compositions] == list(made)
    assert list(fingerprints(renamed).values()) == list(made.values())


def test_the_anchors_of_weights_are_told_apart(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, COMPOSITIONS)
    made = fingerprints(load_recipe([path]))
    swap = re.sub(r"right|brief", lambda word: {"right": "brief", "brief": "right"}[word[0]], COMPOSITIONS)
    path.write_text(path.read_text().replace(COMPOSITIONS, swap))
    other = fingerprints(load_recipe([path]))
    even = {"joint", "budget", "mixture-budget", "online", "online-exact", "self"}
    assert {name for name in made if made[name] == other[name]} == even


def test_settings_of_training_count_where_they_are_used(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, COMPOSITIONS)
    used = ["train.warmup=3", "train.decay=cosine", "train.lora={}", "train.lora={stabilised=true}"]
    used += ["train.lora={targets='all-linear'}"]
    found = {fingerprints(load_recipe([path], [setting]))["joint"] for setting in used}
    assert len(found | {fingerprints(load_recipe([path]))["joint"]}) == 6


def test_an_engine_that_scores_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    recipe = load_recipe([write_recipe(tmp_path, COMPOSITIONS)])

    def scored_by(**engine: object) -> list[str]:
        run = Run(recipe.model_copy(update={"engine": recipe.engine.model_copy(update=engine)}), "r.toml")
        return [run.stage("reference").fingerprint, run.scores_of("right")[0].fingerprint]

    vllm = {"reference": "vllm", "score": "vllm"}
    engine = scored_by(**vllm, options={"tensor_parallel_size": 2})
    assert not set(engine) & set(scored_by())
    assert engine == scored_by(**vllm, options={"tensor_parallel_size": 8}, parity=0.01, python="python")
    assert not set(engine) & set(scored_by(**vllm, options={"quantization": "fp8"}))


def test_products_in_tf32_make_other_numbers_and_only_those() -> None:
    def run(**machine: object) -> Run:
        recipe = {"name": "r", "student": {"model": "s"}, "prompts": {"source": "p", "chat": False}, "machine": machine}
        recipe["anchors"] = {"a": {"post": "x", "pre": "y"}}
        recipe["compositions"] = {"c": {"weights": {"a": 1.0}}}
        named = {name: name for name in ("s", "x", "y", "p")}
        return Run(check_recipe(recipe), "recipe.toml", identities=named)

    usual, rounded, threads = run(), run(tf32=True), run(threads=4)
    for of in (
        lambda made: made.stage("reference"),
        lambda made: made.scores_of("a")[0],
        lambda made: made.stage("train", "c"),
    ):
        assert of(usual).fingerprint == of(threads).fingerprint != of(rounded).fingerprint
    assert usual.stage("rollout").fingerprint == rounded.stage("rollout").fingerprint


def test_what_an_engine_makes_of_the_weights_is_part_of_its_samples(tmp_path: Path) -> None:
    """Only quantization changes the numbers; where an engine runs, and how fast, does not."""
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    world = make_world(tmp_path)

    def fingerprints(**options: object) -> list[str]:
        engine = {"rollout": "vllm", "eval": "vllm", "options": options}
        asked = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "chat": False}
        run = run_of({**world, "engine": engine, "eval": asked})
        return [run.stage("rollout").fingerprint, run.stage("eval", "base", run.recipe.eval.benchmarks[0]).fingerprint]

    plain = fingerprints()
    assert fingerprints(tensor_parallel_size=2) == plain
    assert all(one != two for one, two in zip(fingerprints(quantization="fp8"), plain, strict=True))


def recipe_keys(
    model: type[BaseModel], prefix: str = "", marked: bool = False
) -> Iterator[tuple[str, tuple[FieldInfo, bool]]]:
    """Walk all keys of a recipe, with whether they are execution only; NAME stands for a name that the user chooses."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        kinds = list(_models(field.annotation))
        is_marked = marked or is_execution(field)
        for inner in kinds:
            inside = f"{key}.NAME." if get_origin(field.annotation) is dict else f"{key}."
            yield from recipe_keys(inner, inside, is_marked)
        if not kinds:
            yield key, (field, is_marked)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


ROUTED = "compositions.joint.weights={sums={right=1.0},default={brief=1.0}}"
MERGED = 'policies.new={merge="dare",weights={right=1.0}}'
# What a key is set to, where its kind does not tell; after " with " what has to be set for it to matter.
VALUES = {
    "report.cases.NAME.shortest": "report.cases.one.shortest=base",
    "checks.right": "checks.right=0.5",
    "checks.repeated": "checks.repeated=0.5",
    "checks.kl_rise": "checks.kl_rise=0.5",
    "report.students": 'report.students=["joint"]',
    "train.balance": "train.balance=rows",
    "train.trackers": 'train.trackers=["tensorboard"]',
    "train.validation": "train.validation=0.1",
    "train.updates_per_round": "train.updates_per_round=8",
    "train.lora.targets": "train.lora.targets='all-linear' with train.lora.rank=4",
    "tracking": 'tracking={project="mine"}',
    "harness.metrics": 'harness.metrics={ifeval="x"} with harness.tasks=["ifeval"]',
    "compositions.NAME.allow_negative": "compositions.joint.allow_negative=true",
    "compositions.NAME.normalize": "compositions.joint.normalize=false",
    "anchors.NAME.model": 'anchors.new={model="student",post_prompt={system="x"}}',
    "tags.rules": f'tags.rules={{sums="2"}} with tags.rules={{sums="1"}} {ROUTED}',
    "tags.column": f"tags.column=kind with tags.column=sort {ROUTED}",
    "compositions.NAME.routes": f'{ROUTED} with tags.rules={{sums="1"}}',
    "anchors.NAME.aliases": 'anchors.right.aliases={a="b"}',
    "anchors.NAME.engine": "anchors.right.engine=vllm",
    "anchors.NAME.missing": 'anchors.right.missing=mask with anchors.right.post_prompt={template="{prompt}{hint}"}',
    "anchors.NAME.options": "anchors.right.options={quantization='fp8'} with anchors.right.engine=vllm",
    "anchors.NAME.post": "anchors.right.post={folder}/brief",
    "anchors.NAME.pre": "anchors.right.pre={folder}/brief",
    "anchors.NAME.post_prompt.template": 'anchors.right.post_prompt.template="{prompt}!"',
    "anchors.NAME.pre_prompt.template": 'anchors.right.pre_prompt.template="{prompt}!"',
    "anchors.NAME.untrained": 'anchors.right.untrained=mask with anchors.right.aliases={a="b"}',
    "spans": 'spans={plan=["a","b"]} with spans={plan=["a","c"]} anchors.right.where.inside=plan',
    "anchors.NAME.where.answers": "anchors.right.where.answers=wrong with prompts.columns.answer=answer",
    "compositions.NAME.flip": "compositions.joint.flip=true",
    "compositions.NAME.shuffle": "compositions.joint.shuffle=states",
    "compositions.NAME.dose": "compositions.sequential.dose=matched",
    "compositions.NAME.kl_budget": "compositions.budget.kl_budget=0.5",
    "compositions.NAME.levels": "compositions.dial.levels.b.alpha=1.0",
    "compositions.NAME.default": "compositions.dial.default=b",
    "compositions.NAME.control.prefix": 'compositions.dial.control={prefix="{level} "}',
    "compositions.NAME.control.system": 'compositions.dial.control={system="{level}"}',
    "compositions.NAME.control.variable": 'compositions.dial.control={variable="effort"}',
    "compositions.NAME.method": "compositions.joint.method=mixture",
    "compositions.NAME.objective": "compositions.joint.objective=reverse-kl",
    "compositions.NAME.refresh": "compositions.joint.refresh=auto",
    "compositions.NAME.refresh_budget": 'compositions.joint.refresh_budget=3 with compositions.joint.refresh="auto"',
    "compositions.NAME.resample": "compositions.sequential.resample=false",
    "compositions.NAME.sequence": 'compositions.sequential.sequence=["right","brief"]',
    "compositions.NAME.sharpen": "compositions.self.sharpen=0.7",
    "compositions.NAME.weights": "compositions.joint.weights={right=0.25,brief=0.75}",
    "date": "date=2020-01-31 with policies.other.model={folder}/dated",
    "engine.dtype": "engine.dtype=bfloat16",
    "anchors.NAME.cache": "anchors.right.cache=file://{folder}/nowhere",
    "engine.parity": "engine.parity=0.01",
    "engine.options": 'engine.options={kv_cache_dtype="fp8"} with engine.rollout=vllm',
    "eval.adapters": "eval.adapters=true with engine.eval=vllm train.lora.rank=4",
    "eval.benchmarks": 'eval.benchmarks=["file:{folder}/more.jsonl"]',
    "eval.format": "eval.format=plain",
    "eval.graders": 'eval.graders={bench="regex:(.*)"}',
    "eval.profile": "eval.profile=exact",
    "eval.sources": 'eval.sources={gsm8k="{folder}/more.jsonl"} with eval.benchmarks=["gsm8k"]',
    "harness.args": "harness.args={limit=3} with harness.tasks=['ifeval']",
    "harness.include": "harness.include={folder}/student with harness.tasks=['ifeval']",
    "policies.NAME.model": "policies.other.model={folder}/brief",
    "policies.NAME.system": 'policies.other.system="x"',
    "policies.NAME.thinking": "policies.other.thinking=false",
    "policies.NAME.template": 'policies.other.template={effort="low"}',
    "policies.NAME.budget": "policies.other.budget=9",
    "policies.NAME.merge": f"{MERGED} with {MERGED.replace('dare', 'ties')}",
    "policies.NAME.weights": f"{MERGED.replace('1.0', '0.5')} with {MERGED}",
    "policies.NAME.density": f"policies.new.density=0.2 with {MERGED}",
    "policies.NAME.decode": 'policies.new={decode="joint"}',
    "eval.final": "eval.final=x with policies.other.budget=9",
    "prompts.format": 'prompts.format="{problem}!"',
    "prompts.screen_against": 'prompts.screen_against=["{folder}/more.jsonl"]',
    "prompts.source": "prompts.source={folder}/more.jsonl",
    "rollout.from": "rollout.from={folder}/more.jsonl",
    "student.model": "student.model={folder}/right",
    "train.lora.base": "train.lora={rank=4,base='nf4'} with train.lora.rank=4",
    "train.objective": "train.objective=reverse-kl",
    "train.optimizer.betas": "train.optimizer.betas=[0.8,0.9]",
    "train.optimizer.clip": "train.optimizer.clip=0.5",
}
PLACES = {
    "anchors.NAME": "anchors.right",
    "compositions.NAME": "compositions.joint",
    "policies.NAME": "policies.other",
    "report.cases.NAME": "report.cases.one",
}


def change(key: str, field: FieldInfo) -> str:
    """Set a key to something else than its default."""
    if key in VALUES:
        return VALUES[key]
    place = reduce(lambda text, one: text.replace(*one), PLACES.items(), key)
    match field.default:
        case bool(value):
            return f"{place}={str(not value).lower()}"
        case int(value) | float(value):
            return f"{place}={value / 2 if isinstance(value, float) and value else value + 1}"
        case str(value) if choices := [one for one in get_args(field.annotation) if isinstance(one, str)]:
            return f"{place}={next(one for one in reversed(choices) if one != value)}"
        case _:
            return f"{place}={json.dumps(field.examples[0] if field.examples else 'x')}"


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    path = write_recipe(folder, COMPOSITIONS)
    for name in ("bench", "more"):
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{name}?", "answer": "2"}}\n')
    shutil.copytree(folder / "right", folder / "dated")
    (folder / "dated" / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    text = path.read_text()
    section = (
        f'[eval]\nbenchmarks = ["file:{folder}/bench.jsonl"]\n[policies]\nother = {{ model = "{folder}/right" }}\n'
        '[report.cases.one]\nwrong = ["base"]\n'
    )
    path.write_text(text + section)
    return path


def everything(path: Path, sets: Sequence[str]) -> set[tuple[str, str]]:
    """Every stage but those of replicates, which `train.seeds` adds: it leaves the others as they are."""
    stages = Run(load_recipe([path], sets)).everything()
    return {(stage.path, stage.fingerprint) for stage in stages if "~" not in stage.path}


KEYS = dict(recipe_keys(Recipe))


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_changes_a_fingerprint_or_is_execution_only(every_method: Path, key: str) -> None:
    field, is_marked = KEYS[key]
    new, _, needs = change(key, field).replace("{folder}", str(every_method.parent)).partition(" with ")
    before = everything(every_method, needs.split())
    after = everything(every_method, [*needs.split(), new])
    assert (before == after) == is_marked, f"{new} {needs}: use it in run.py, or define the key with execution()"


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_change_is_explained_by_keys_that_exist(every_method: Path, key: str) -> None:
    """Of stages of scores, which do not know the anchors that share them, only the last part of the key is named."""
    new, _, needs = change(key, KEYS[key][0]).replace("{folder}", str(every_method.parent)).partition(" with ")
    before, after = (
        {stage.path: stage for stage in Run(load_recipe([every_method], sets)).everything()}
        for sets in (needs.split(), [*needs.split(), new])
    )
    for path in before.keys() & after.keys() - {path for path in before if path.startswith("score/")}:
        for setting, what in differences(dict(before[path].settings), dict(after[path].settings)):
            named = re.split(r": |\[| (?:has|is) ", explain_change(path, setting, what))[0]
            if named not in ("the benchmark's file", "compositions.joint.loss_weights"):
                pattern = re.sub(
                    r"^(?:the chat template of )?((anchors|compositions|policies)\.)[^.]+", r"\1NAME", named
                )
                known = (
                    pattern == one or f"{pattern}.".startswith(f"{one}.") or one.startswith(f"{pattern}.")
                    for one in KEYS
                )
                assert any(known), f"{path}: {setting}: {named}"


def test_own_trajectories_are_known_by_how_they_are_read(every_method: Path) -> None:
    """With `rollout.from` the prompts are those of the file, and contexts are rendered as its lines were."""
    given = [f"rollout.from={every_method.parent}/more.jsonl", 'anchors.right.post_prompt.prefix="x"']

    def changed(*sets: str) -> set[str]:
        before, after = dict(everything(every_method, given)), dict(everything(every_method, [*given, *sets]))
        return {path for path in before if before[path] != after[path]}

    for rendering in ("prompts.chat=false", "prompts.thinking=false", "prompts.format=livecodebench"):
        assert {path.partition("/")[0] for path in changed(rendering)} <= {"eval"}, rendering
    assert {"rollout", "reference", "train/joint", "train/self"} <= changed("rollout.responses=8")
    assert changed("prompts.take=7") == changed("prompts.max_tokens=99") == set()
    resampled = {path for path in changed("rollout.temperature=0.5") if not path.startswith("eval/")}
    assert resampled == {"train/online", "train/online-exact", "train/sequential", "train/matched"}


def test_the_order_of_anchors_does_not_matter(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, COMPOSITIONS)
    folder = path.parent
    right = f'anchors.right = {{ post = "{folder}/right", pre = "{folder}/right-base" }}\n'
    brief = f'anchors.brief = {{ post = "{folder}/brief", pre = "{folder}/brief-base" }}\n'
    shared = f'anchors.brief = {{ post = "{folder}/right", pre = "{folder}/right-base", aliases = {{ a = "b" }} }}\n'
    found = []
    for order in (right + shared, shared + right):
        changed = tmp_path / f"{len(found)}.toml"
        changed.write_text(path.read_text().replace(right + brief, order))
        found.append(sorted(stage.fingerprint for stage in Run(load_recipe([changed])).everything()))
    assert found[0] == found[1]
