"""`lweave init` in many situations: the recipe passes doctor, or the message says what is missing."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2VLConfig

from forked import Forked
from hub import serve_hub
from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.cli import app
from lightning_weave.config import Recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.plan.architecture import find_gpu, shipped_config
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.run import Run
from lightning_weave.stages.prompts import planned_prompts
from lightning_weave.views import doctor, init
from tiny import make_tokenizer, make_world, save_prompts
from train.layouts import save_layout

QUIET = Console(quiet=True)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}Answer:"
THINKING = CHAT + "<think>\n"
SWITCH = CHAT + "{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    make_world(root, prompts=12)
    save_prompts(root / "bench.jsonl", 3, seed=9)
    for name, template in (("chat", CHAT), ("thinking", THINKING), ("switch", SWITCH)):
        shutil.copytree(root / "student", root / name)
        (root / name / "chat_template.jinja").write_text(template)
    return root


def pair(post: str, pre: str | None = None) -> dict[str, str]:
    return {"post": post} | ({} if pre is None else {"pre": pre})


def write(world: Path, out: Path, **changes: Any) -> tuple[Recipe, init.Draft]:
    """Write a recipe for the tiny world, with one thing changed."""
    words = {
        "student": str(world / "student"),
        "anchors": {"acc": pair(str(world / "acc-post"), str(world / "acc-pre"))},
        "prompts": str(world / "prompts.jsonl"),
        "benchmarks": [str(world / "bench.jsonl")],
        **changes,
    }
    draft = init.run(out / "mine.toml", **words, console=QUIET)
    return load_recipe([out / "mine.toml"], [f"runs={json.dumps(str(out / 'runs'))}"]), draft


def errors(recipe: Recipe) -> list[str]:
    found = doctor.examine(Run(recipe, "mine.toml"))
    return [finding.line for finding in found if finding.verdict == "error"]


def rows(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def test_a_base_student_with_other_tokenizers_and_a_short_context(world: Path, tmp_path: Path) -> None:
    pairs = {name: pair(str(world / f"{name}-post"), str(world / f"{name}-pre")) for name in ("acc", "brief")}
    recipe, draft = write(world, tmp_path, anchors=pairs)
    assert errors(recipe) == []
    assert (recipe.prompts.chat, recipe.prompts.format) == (False, "boxed")
    assert (recipe.prompts.columns.prompt, recipe.prompts.columns.answer, recipe.prompts.columns.id) == (
        "problem",
        "answer",
        "id",
    )
    assert recipe.prompts.take == 12
    assert recipe.prompts.max_tokens + recipe.rollout.max_tokens == 256  # its context
    assert recipe.anchors["acc"].aliases == {"<|end|>": "</s>"}
    assert recipe.anchors["brief"].aliases == {"<|end|>": "<|eot|>"}
    assert recipe.compositions["even"].weights == {"acc": 0.5, "brief": 0.5}
    assert recipe.eval.benchmarks == [f"file:{world / 'bench.jsonl'}"]
    assert any("a base model without a chat template" in text for text in draft.assumed)
    assert any("updates" in text for text in draft.assumed)
    assert "# the student has no chat template" in draft.text


@pytest.mark.slow
def test_a_student_larger_than_memory_is_trained_with_lora(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights stay on the hub: configuration and tokenizer say enough."""
    pytest.importorskip("peft")
    large = tmp_path / "large"
    shutil.copytree(world / "chat", large)
    config = shipped_config("Qwen/Qwen3-4B")
    (large / "config.json").write_text(json.dumps(config))
    with serve_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.push("org/large", large)
        card, cluster = PlannedMachine(find_gpu("RTX4090"), 1), PlannedMachine(find_gpu("H100"), 8)
        recipe, draft = write(world, tmp_path, student="org/large", machine=card)
        assert errors(recipe) == []
        assert recipe.train.lora is not None
        assert (recipe.train.learning_rate, recipe.train.gradient_checkpointing) == (1e-4, True)
        assert recipe.rollout.batch_size < 64
        assert any("RTX4090 has 24 GB" in text for text in draft.assumed)
        assert not any("does not fit" in text for text in draft.assumed)
        (tmp_path / "many").mkdir()
        full, _ = write(world, tmp_path / "many", student="org/large", machine=cluster)
        assert full.train.lora is None

        (large / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 200}))
        hub.push("org/huge", large)
        (tmp_path / "huge").mkdir()
        _, draft = write(world, tmp_path / "huge", student="org/huge", machine=card)
        assert any(text.startswith("train (LoRA, 1 GPU) does not fit") for text in draft.assumed)
        assert hub.sent(".safetensors") == []


def test_layers_with_names_of_their_own_are_named(world: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("student")
    config = GPT2Config(vocab_size=80, n_embd=16, n_layer=1, n_head=2, n_positions=256, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    recipe, draft = write(world, tmp_path, student=str(tmp_path / "gpt2"), overrides=["train.lora.rank=2"])
    assert recipe.train.lora is not None
    assert recipe.train.lora.rank == 2
    assert recipe.train.lora.targets == "all-linear"
    assert any("memory was not checked" in text for text in draft.assumed)


def test_lora_gets_its_own_learning_rate(world: Path, tmp_path: Path) -> None:
    """The paper's rate is for full training: an adapter hardly moves with it."""
    for name, overrides, rate in (("lora", [], 1e-4), ("set", ["train.learning_rate=3e-4"], 3e-4)):
        (tmp_path / name).mkdir()
        recipe, _ = write(world, tmp_path / name, overrides=["train.lora.rank=2", *overrides])
        assert recipe.train.learning_rate == rate


def test_what_is_set_is_never_guessed(world: Path, tmp_path: Path) -> None:
    sets = ["prompts.take=5", "rollout.max_tokens=7", "compositions.own.weights.acc=1.0", "prompts.format=plain"]
    recipe, draft = write(world, tmp_path, overrides=sets)
    assert (recipe.prompts.take, recipe.rollout.max_tokens, recipe.prompts.format) == (5, 7, "plain")
    assert list(recipe.compositions) == ["own"]
    assert not any("take" in text for text in draft.assumed)


def _adapter(folder: Path, base: str) -> str:
    """An adapter of the base's query projections, as peft saves it."""
    peft = pytest.importorskip("peft")
    if not Path(base).exists():
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return str(folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(folder)
    return str(folder)


def _multimodal(root: Path) -> dict[str, Any]:
    """A student that can see, of which only the text is trained, and a pair with its tokenizer."""
    post, pre = (str(save_layout(name, root / name)) for name in ("tied", "of two dtypes"))
    return {
        "student": str(save_layout("multimodal Gemma 3", root / "sees")),
        "anchors": {"acc": pair(post, pre)},
        "prompts": rows(root / "words.jsonl", *({"problem": f"w{n} w{n + 1}"} for n in range(3, 9))),
        "benchmarks": [rows(root / "asked.jsonl", {"id": "a", "problem": "w3 w4", "answer": "w5"})],
    }


def _cannot_see(root: Path, world: Path) -> str:
    shutil.copytree(world / "student", root / "pictures")
    Qwen2VLConfig().save_pretrained(root / "pictures")
    return str(root / "pictures")


def _parquet(path: Path) -> str:
    data = [
        {
            "data_source": "dapo",
            "prompt": [{"role": "user", "content": f"{n}+1"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "index": n,
        }
        for n in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(data), path)
    return str(path)


def _odd(path: Path) -> str:
    return rows(path, *({"Frage": f"{n}+1?", "Quelle": "buch"} for n in range(4)))


SMALL_CARD = PlannedMachine(replace(find_gpu("RTX4090"), memory=1_500_000), 1)
# A situation -> what is given instead of the tiny world's own, and what the recipe assumes.
ACCEPTED: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "a base model without a chat template": (lambda world, root: {}, "a base model without a chat template"),
    "a chat model": (lambda world, root: {"student": str(world / "chat")}, "a chat model"),
    "a thinking model": (lambda world, root: {"student": str(world / "thinking")}, "a thinking model"),
    "thinking that can be switched off": (
        lambda world, root: {"student": str(world / "switch")},
        "thinking = false switches that off",
    ),
    "a student larger than memory": (
        lambda world, root: {"machine": SMALL_CARD, "overrides": ["rollout.batch_size=1"]},
        "train.lora.rank = 16: train would need",
    ),
    "an adapter as a specialist": (
        lambda world, root: {"anchors": {"acc": pair(_adapter(root / "lora", str(world / "acc-pre")))}},
        "anchors.acc.aliases",
    ),
    "a multimodal student": (lambda world, root: _multimodal(root), "no column has answers"),
    "messages and nested answers in Parquet": (
        lambda world, root: {"prompts": _parquet(root / "data.parquet")},
        'prompts.columns.answer = "reward_model.ground_truth"',
    ),
    "odd columns, with the one named": (
        lambda world, root: {"prompts": _odd(root / "odd.jsonl"), "overrides": ["prompts.columns.prompt=Frage"]},
        "no column has answers",
    ),
    "no benchmark": (lambda world, root: {"benchmarks": []}, "none was given: 6 of your 12 rows"),
    "no specialist yet": (lambda world, root: {"anchors": {}}, "a base model without a chat template"),
}
MISSING: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "odd columns": (lambda world, root: {"prompts": _odd(root / "odd.jsonl")}, r"which column is the problem\?"),
    "an adapter of a base that is not here": (
        lambda world, root: {"student": _adapter(root / "adapter", "org/base")},
        "--student: .*LoRA adapter whose base cannot be used: model 'org/base'",
    ),
    "a whole model without what it came from": (
        lambda world, root: {"anchors": {"acc": pair(str(world / "acc-post"))}},
        r"anchors\.acc\.pre is missing",
    ),
    "an architecture that writes no text": (
        lambda world, root: {"student": _cannot_see(root, world)},
        "not a causal language model",
    ),
    "an adapter that is not here": (
        lambda world, root: {"anchors": {"acc": pair(str(root / "adapterr"))}},
        "--anchor acc, post: model '.*adapterr': no such directory",
    ),
    "an empty file of prompts": (
        lambda world, root: {"prompts": rows(root / "empty.jsonl")},
        r"empty\.jsonl: is empty",
    ),
    "no answers in a benchmark": (
        lambda world, root: {"benchmarks": [rows(root / "unanswered.jsonl", {"problem": "1+1?"})]},
        "expected problem and answer",
    ),
}


@pytest.mark.parametrize("situation", ACCEPTED)
@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_a_situation_leads_to_a_recipe_that_doctor_accepts(world: Path, tmp_path: Path, situation: str) -> None:
    given, said = ACCEPTED[situation]
    recipe, draft = write(world, tmp_path, **given(world, tmp_path))
    assert any(said in text for text in draft.assumed), draft.assumed
    # On this machine the paper's benchmarks cannot be fetched, which is no fault of the recipe.
    assert [text for text in errors(recipe) if "eval.benchmarks" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("situation", [name for name in ACCEPTED if name != "no specialist yet"])
def test_a_situation_leads_to_a_recipe_that_goes_through_a_rehearsal(
    world: Path, tmp_path: Path, forked: Forked, situation: str
) -> None:
    """The whole recipe with doubles of its models."""
    write(world, tmp_path, **ACCEPTED[situation][0](world, tmp_path))
    ended = forked.lweave("rehearse", "mine.toml", folder=str(tmp_path))
    assert ended.code == 0, ended.said
    assert "Next: lweave run mine.toml" in ended.said
    assert (tmp_path / "runs/mine-rehearsal/report/index.html").exists()


@pytest.mark.parametrize("situation", MISSING)
def test_a_situation_that_lacks_something_is_told_what(world: Path, tmp_path: Path, situation: str) -> None:
    given, said = MISSING[situation]
    with pytest.raises(InputError, match=said):
        write(world, tmp_path, **given(world, tmp_path))
    assert not (tmp_path / "mine.toml").exists()


def test_what_is_missing_is_said_before_anything_is_written(world: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"student": str(tmp_path / "model.gguf")}, "a GGUF file"),
        ({"student": str(tmp_path / "empty")}, "an empty directory"),
        ({"anchors": {"acc": pair(str(tmp_path / "empty"), str(world / "acc-pre"))}}, "--anchor acc, post: .*empty"),
        ({"prompts": str(tmp_path / "no.jsonl")}, "no such file"),
        ({"benchmarks": ["aime-1999"]}, "unknown benchmark"),
        ({"overrides": ["train.lorra.rank=3"]}, "train.lorra"),
    ]
    for changes, said in wrong:
        with pytest.raises(InputError, match=said):
            write(world, tmp_path, **changes)
    assert not (tmp_path / "mine.toml").exists()


def test_a_recipe_is_never_written_over(world: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        write(world, tmp_path)
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_without_benchmarks_a_part_of_the_prompts_is_held_out(world: Path, tmp_path: Path) -> None:
    """And the number of prompts is what is left of them, as the run will count it."""
    odd = rows(tmp_path / "odd.jsonl", *({"q": f"{n:02}{s}+1?", "a": str(n + 1)} for s in ("", " ") for n in range(40)))
    columns = ["prompts.columns.prompt=q", "prompts.columns.answer=a"]
    recipe, draft = write(world, tmp_path, prompts=odd, benchmarks=[], overrides=columns)
    assert (recipe.eval.benchmarks, recipe.eval.samples) == (["held-out"], 4)
    assert any("40 of your 80 rows, which are not trained on" in text for text in draft.assumed)
    held = {problem.question for problem in load_eval_benchmark(recipe, "held-out").problems}
    prompts, report = planned_prompts(Run(recipe, "mine.toml"))
    assert report is not None
    assert (len(held), len(prompts), report.notes) == (20, recipe.prompts.take, [])
    assert not any(problem in prompt.text for problem in held for prompt in prompts)
    assert errors(recipe) == []


def test_a_benchmark_may_have_the_columns_of_the_prompts(world: Path, tmp_path: Path) -> None:
    odd = rows(tmp_path / "odd.jsonl", *({"Frage": f"{n}+1?", "a": str(n + 1)} for n in range(9)))
    columns = ["prompts.columns.prompt=Frage", "prompts.columns.answer=a"]
    recipe, _ = write(world, tmp_path, prompts=odd, benchmarks=[odd], overrides=columns)
    assert recipe.eval.columns == recipe.prompts.columns
    assert errors(recipe) == []


def test_the_command_ends_with_what_to_type(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_weave import cli

    out = tmp_path / "mine.toml"
    anchor = f"acc={world / 'acc-post'},{world / 'acc-pre'}"
    words = ["--student", str(world / "student"), "--anchor", anchor, "--prompts", str(world / "prompts.jsonl")]
    cli.app(["init", str(out), *words], standalone_mode=False)
    said = capsys.readouterr().out
    assert said.rstrip().endswith(f"lweave report {out}")
    with pytest.raises(InputError, match="must look like NAME=POST,PRE"):
        cli.app(["init", str(out), *words, "--anchor", "acc=only,"], standalone_mode=False)


def command(world: Path, out: Path, *words: str) -> None:
    place = ["init", str(out), "--student", str(world / "chat"), "--bench", str(world / "bench.jsonl")]
    app([*place, "--prompts", str(world / "prompts.jsonl"), *words], standalone_mode=False)


@pytest.mark.parametrize("words", ["system:Be brief.", 'system:"Be brief."', "prefix:Question: ", "template:{prompt}!"])
def test_a_prompt_that_works_is_an_anchor_and_is_trained(world: Path, tmp_path: Path, words: str) -> None:
    command(world, tmp_path / "mine.toml", "--anchor", f"brief=student+{words}")
    recipe = load_recipe(tmp_path / "mine.toml", [f"runs={json.dumps(str(tmp_path / 'runs'))}"])
    kind, _, text = words.partition(":")
    anchor = recipe.anchors["brief"]
    assert (anchor.model, anchor.post_prompt.model_dump(exclude_none=True)) == ("student", {kind: text.strip('"')})
    assert recipe.compositions["brief"].weights == {"brief": 1.0}
    assert errors(recipe) == []


def test_anchors_of_all_kinds_share_a_composition(world: Path, tmp_path: Path) -> None:
    anchors = ["--anchor", "brief=student+system:Be brief.", "--set", 'anchors.long.model="student"']
    anchors += ["--set", 'anchors.long.post_prompt.system="Explain."']
    adapter = _adapter(tmp_path / "lora", str(world / "chat"))
    command(world, tmp_path / "mine.toml", *anchors, "--anchor", f"lora={adapter}")
    recipe = load_recipe(tmp_path / "mine.toml")
    assert recipe.compositions["even"].weights.keys() == {"brief", "long", "lora"}


@pytest.mark.parametrize("text", ["brief", "brief=", "=a,b", "brief=a,", "brief=student+system:", "brief=+system:x"])
def test_an_anchor_that_is_none_is_named(world: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=f"--anchor {re.escape(text)}: must look like NAME=POST,PRE"):
        command(world, tmp_path / "mine.toml", "--anchor", text)


def test_an_anchor_in_no_composition_is_an_error(world: Path, tmp_path: Path) -> None:
    recipe, _ = write(world, tmp_path)
    lone = recipe.model_copy(update={"compositions": {}})
    said = [line for line in errors(lone) if line.startswith("anchors.acc: it is in no composition")]
    assert said
    assert "weights = { acc = 1.0 }" in said[0]


def test_answers_that_are_named_are_used(world: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "odd.jsonl", *({"q": f"{n}+{n}?", "a": str(2 * n)} for n in range(20)))
    columns = ["prompts.columns.prompt=q", "prompts.columns.answer=a"]
    recipe, _ = write(world, tmp_path, prompts=data, overrides=columns)
    assert (recipe.prompts.columns.answer, recipe.prompts.format, recipe.eval.format) == ("a", "boxed", "boxed")
    with pytest.raises(InputError) as raised:
        write(world, tmp_path / "again", prompts=data)
    assert "which column is the problem? It has q, a. Set it: --set prompts.columns.prompt=NAME" in str(raised.value)
