"""`lweave init` in many situations: the recipe passes doctor, or the message says what is missing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2VLConfig

from hub import serve_hub
from lightning_weave.config import Recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.find import _shipped
from lightning_weave.plan.gpus import find_gpu
from lightning_weave.runs.steps import Steps
from lightning_weave.views import doctor, init
from tiny import make_tokenizer, make_world, save_prompts

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


def write(world: Path, out: Path, **changes: Any) -> tuple[Recipe, init.Draft]:
    """Write a recipe for the tiny world, with one thing changed."""
    words = {
        "student": str(world / "student"),
        "anchors": {"acc": (str(world / "acc-post"), str(world / "acc-pre"))},
        "prompts": str(world / "prompts.jsonl"),
        "benchmarks": [str(world / "bench.jsonl")],
        **changes,
    }
    draft = init.run(out / "mine.toml", **words, console=QUIET)
    return load_recipe([out / "mine.toml"], [f"runs={json.dumps(str(out / 'runs'))}"]), draft


def errors(recipe: Recipe) -> list[str]:
    found = doctor.examine(Steps(recipe, "mine.toml"))
    return [finding.line for finding in found if finding.verdict == "error"]


def rows(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def test_a_base_student_with_other_tokenizers_and_a_short_context(world: Path, tmp_path: Path) -> None:
    pairs = {name: (str(world / f"{name}-post"), str(world / f"{name}-pre")) for name in ("acc", "brief")}
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


@pytest.mark.parametrize(
    ("student", "said"),
    [("chat", "a chat model"), ("thinking", "a thinking model"), ("switch", "thinking = false switches that off")],
)
def test_chat_and_thinking_students_are_asked_as_they_expect(
    world: Path, tmp_path: Path, student: str, said: str
) -> None:
    recipe, draft = write(world, tmp_path, student=str(world / student))
    assert recipe.prompts.chat
    assert any(said in text for text in draft.assumed)
    found = doctor.examine(Steps(recipe, "mine.toml"))
    assert [finding.verdict for finding in found if finding.check == "expects"] == ["ok"]
    assert not [finding.line for finding in found if finding.verdict == "error"]


@pytest.mark.slow
def test_a_student_larger_than_memory_is_trained_with_lora(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights stay on the hub: configuration and tokenizer say enough."""
    pytest.importorskip("peft")
    large = tmp_path / "large"
    shutil.copytree(world / "chat", large)
    config = _shipped("Qwen/Qwen3-4B")
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
    assert any("fits into memory is not known" in text for text in draft.assumed)


def test_messages_and_nested_answers_in_parquet(world: Path, tmp_path: Path) -> None:
    data = [
        {
            "data_source": "dapo",
            "prompt": [{"role": "user", "content": f"{n}+1"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "index": n,
        }
        for n in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "data.parquet")
    recipe, _ = write(world, tmp_path, prompts=str(tmp_path / "data.parquet"))
    columns = recipe.prompts.columns
    assert (columns.prompt, columns.answer, columns.id) == ("prompt", "reward_model.ground_truth", "index")
    assert errors(recipe) == []


def test_odd_columns_are_found_or_asked_for(world: Path, tmp_path: Path) -> None:
    odd = [{"Frage": f"{n}+1?", "Quelle": "buch"} for n in range(4)]
    source = rows(tmp_path / "odd.jsonl", *odd)
    with pytest.raises(InputError, match=r"which column is the problem\? It has Frage, Quelle; .*--set prompts"):
        write(world, tmp_path, prompts=source)
    assert not (tmp_path / "mine.toml").exists()
    recipe, draft = write(world, tmp_path, prompts=source, overrides=["prompts.columns.prompt=Frage"])
    assert recipe.prompts.columns.prompt == "Frage"
    assert (recipe.prompts.columns.answer, recipe.prompts.format) == (None, "plain")
    assert any("no column has answers" in text for text in draft.assumed)
    assert errors(recipe) == []


def test_what_is_set_is_never_guessed(world: Path, tmp_path: Path) -> None:
    sets = ["prompts.take=5", "rollout.max_tokens=7", "compositions.own.weights.acc=1.0", "prompts.format=plain"]
    recipe, draft = write(world, tmp_path, overrides=sets)
    assert (recipe.prompts.take, recipe.rollout.max_tokens, recipe.prompts.format) == (5, 7, "plain")
    assert list(recipe.compositions) == ["own"]
    assert not any("take" in text for text in draft.assumed)


def _adapter(root: Path) -> Path:
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    return root / "adapter"


def _multimodal(root: Path, world: Path) -> Path:
    shutil.copytree(world / "student", root / "pictures")
    Qwen2VLConfig().save_pretrained(root / "pictures")
    return root / "pictures"


def test_what_is_missing_is_said_before_anything_is_written(world: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").touch()
    unanswered = rows(tmp_path / "unanswered.jsonl", {"problem": "1+1?"})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"student": str(_adapter(tmp_path))}, "--student: .*LoRA adapter whose base cannot be used: model 'org/base'"),
        ({"student": str(tmp_path / "model.gguf")}, "a GGUF file"),
        ({"student": str(tmp_path / "empty")}, "an empty directory"),
        ({"student": str(_multimodal(tmp_path, world))}, "not a causal language model"),
        ({"anchors": {"acc": (str(tmp_path / "empty"), str(world / "acc-pre"))}}, "--anchor acc, post: .*empty"),
        ({"prompts": str(tmp_path / "no.jsonl")}, "no such file"),
        ({"benchmarks": [unanswered]}, "expected id, problem and answer"),
        ({"benchmarks": ["aime-1999"]}, "unknown benchmark"),
        ({"overrides": ["train.lorra.rank=3"]}, "train.lorra"),
    ]
    for changes, said in wrong:
        with pytest.raises(InputError, match=said):
            write(world, tmp_path, **changes)
    assert not (tmp_path / "mine.toml").exists()


def test_a_recipe_is_never_written_over(world: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        write(world, tmp_path)
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_without_benchmarks_the_papers_are_named(world: Path, tmp_path: Path) -> None:
    recipe, draft = write(world, tmp_path, benchmarks=[])
    assert recipe.eval.benchmarks == ["aime-2024", "aime-2025", "hmmt-feb-2025"]
    assert any("none was given" in text for text in draft.assumed)


def test_the_command_ends_with_what_to_type(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_weave import cli

    out = tmp_path / "mine.toml"
    anchor = f"acc={world / 'acc-post'},{world / 'acc-pre'}"
    words = ["--student", str(world / "student"), "--anchor", anchor, "--prompts", str(world / "prompts.jsonl")]
    cli.app(["init", str(out), *words], standalone_mode=False)
    said = capsys.readouterr().out
    assert said.rstrip().endswith(f"lweave report {out}")
    with pytest.raises(InputError, match="must look like NAME=POST,PRE"):
        cli.app(["init", str(out), *words, "--anchor", "acc=only"], standalone_mode=False)
