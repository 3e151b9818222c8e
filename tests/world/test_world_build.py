"""A miniature world: built twice alike, resumed after a kill, complete on disk, its benchmarks kept apart."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.store.files import TEMPORARY
from tiny_world import models
from tiny_world.build import build_world, read_report
from tiny_world.models import TOKENIZERS, Dimensions, Example, make_model, make_tokenizer, update
from tiny_world.task import make_rng
from world.problems import read_problems

MODELS = {"student"} | {
    f"{anchor}-{when}" for anchor in ("accuracy", "brevity", "thorough") for when in ("pre", "post")
}
COMMAND = Path(__file__).parents[2] / "scripts" / "build-world"


def build(directory: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    build_world(directory, 11, size="miniature")
    torch.set_num_threads(threads)


def digests(directory: Path) -> dict[str, str]:
    """Hash every file, the report without the time it took."""
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    found = {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != "world.json"
    }
    report = read_report(directory)
    assert report is not None
    return {**found, "world.json": repr(replace(report, seconds=0.0))}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world") / "built"
    build(directory)
    return directory


@pytest.mark.slow
def test_a_world_is_complete(world: Path) -> None:
    report = read_report(world)
    assert report is not None
    assert (report.seed, report.size, set(report.figures)) == (11, "miniature", MODELS)
    assert {path.name for path in world.iterdir()} == MODELS | {"benchmarks", "prompts.jsonl", "world.json"}
    for name in MODELS:
        path = world / name
        assert set(report.figures[name]) == {"easy", "medium", "hard"}
        assert Checkpoint(str(path)).dtype == torch.float16
        tokenizer = Checkpoint(str(path)).tokenizer
        assert Checkpoint(str(path)).stop_ids == {tokenizer.eos_token_id}
        assert GenerationConfig.from_pretrained(path).eos_token_id == tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert model.config.vocab_size >= len(tokenizer)
        assert all(bool(weight.isfinite().all()) for weight in model.parameters())


@pytest.mark.slow
def test_specialists_have_moved_from_bases_with_the_same_tokens(world: Path) -> None:
    for anchor in ("accuracy", "brevity", "thorough"):
        pre, post = world / f"{anchor}-pre", world / f"{anchor}-post"
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (pre / file).read_bytes() == (post / file).read_bytes()
        assert (pre / "model.safetensors").read_bytes() != (post / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_no_benchmark_problem_is_a_prompt(world: Path) -> None:
    benchmarks = {name: read_problems(world / "benchmarks" / f"{name}.jsonl") for name in ("easy", "medium", "hard")}
    assert [{len(problem.steps) for problem in problems} for problems in benchmarks.values()] == [{3}, {4}, {5}]
    held_out = [problem for problems in benchmarks.values() for problem in problems]
    prompts = read_problems(world / "prompts.jsonl")
    assert len(set(held_out)) == len(held_out) == 24
    assert len(set(prompts)) == len(prompts) == 24
    assert not set(held_out) & set(prompts)
    rows = [json.loads(line) for line in (world / "prompts.jsonl").read_text().splitlines()]
    assert rows[0] == {"id": "prompt-1", "problem": prompts[0].text, "answer": prompts[0].answer}


@pytest.mark.slow
def test_the_same_seed_builds_the_same_files_even_when_killed_between(world: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(world, again)
    # As a kill in the midst of post-training leaves it: some models whole, one half written, no figures.
    for name in ("student", "accuracy-post", "thorough-post"):
        shutil.rmtree(again / name)
    (again / f"{TEMPORARY}accuracy-post").mkdir()
    (again / f"{TEMPORARY}accuracy-post" / "model.safetensors").write_bytes(b"half")
    (again / "world.json").write_text(json.dumps({"seed": 11, "size": "miniature"}))
    torch.manual_seed(99)  # the state of this process must play no part
    build(again)
    assert digests(again) == digests(world)


@pytest.mark.slow
def test_another_process_builds_the_same_world(world: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(COMMAND), str(tmp_path / "other"), "--seed", "11", "--size", "miniature"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert digests(tmp_path / "other") == digests(world)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not empty and holds no world"):
        build_world(tmp_path, seed=1, size="miniature")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_world_of_another_seed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps({"seed": 1, "size": "miniature"}))
    with pytest.raises(InputError, match=r"seed 1 and size miniature, not of seed 2 and size miniature"):
        build_world(tmp_path, seed=2, size="miniature")


def test_an_update_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unlike length in one batch, padded, or each alone: the sum over tokens must not notice."""
    tokenizer = make_tokenizer(TOKENIZERS["student"], make_rng(0, "tokenizer"))
    examples = [Example([1, 2, 3], [4, 5, 6, 7, 8, 9]), Example([3], [2]), Example([5, 5], [1, 1, 1])]
    losses, weights = [], []
    for rows in (1, 2, 3):
        monkeypatch.setattr(models, "MICRO_BATCH", rows)
        model = make_model("llama", Dimensions(1, 16, 2, 16), tokenizer, make_rng(0, "weights")).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append(update(model, examples, {optimizer: 0.1}))
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    model = make_model("llama", Dimensions(1, 16, 2, 16), tokenizer, make_rng(0, "weights")).double()
    logp = model(input_ids=ids).logits[0].log_softmax(-1).detach()
    alone = -sum(float(logp[at, ids[0, at + 1]]) for at in range(2, 8)) / models.TYPICAL_TOKENS
    assert update(model, examples[:1], {}) == pytest.approx(alone, rel=1e-6)
    assert losses[1:] == pytest.approx(losses[:1] * 2)
    torch.testing.assert_close(weights[1], weights[0])
    torch.testing.assert_close(weights[2], weights[0])
