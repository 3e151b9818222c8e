"""Runs that several tests look at, made once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.run import Run
from pipeline.small_runs import make_cache, make_recipe

# student, anchors, the anchors' tokenizer
PAIRS = {
    "qwen3-llama-bytes": ("qwen3", "llama", "bytes"),
    "llama-gemma3-pieces": ("llama", "gemma3", "pieces"),
    "olmo3-qwen3.5-bytes": ("olmo3", "qwen3.5", "bytes"),
    "qwen3.5-olmo3-pieces": ("qwen3.5", "olmo3", "pieces"),
    "gemma3-qwen3-same": ("gemma3", "qwen3", "student"),
}
STUDENT_LIMIT, ANCHOR_LIMIT = 64, 40


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=list(PAIRS))
def sampled_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rollouts, reference and scores of one pair of architectures, all through the stages."""
    torch.set_num_threads(1)
    return make_cache(make_recipe(tmp_path_factory.mktemp("sampled"), *PAIRS[request.param]))


@pytest.fixture(scope="session", params=["qwen3-llama-bytes", "qwen3.5-olmo3-pieces"])
def edge_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trajectories at the edges, brought by the user, with anchors whose context is shorter than the longest row."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("edges")
    recipe = make_recipe(root, *PAIRS[request.param], anchor_limit=ANCHOR_LIMIT, rollout={"responses": 1})
    recipe["rollout"]["from"] = str(write_edges(root / "own.jsonl", Path(recipe["student"]["model"])))
    return make_cache(recipe)


def write_edges(path: Path, student: Path) -> Path:
    """Each line is a way for an index to be off by one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student)
    ids = tokenizer.get_vocab()
    end, the, hat, half, think, lost = (ids[word] for word in ("<|end|>", "Ġthe", "hat", "æĺ", "<think>", "é!"))
    rest = [ids[letter] for letter in "abcdefgh"]
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [the], "response_ids": [end]},  # one token after one token, and it is the end
        {"prompt_ids": [end], "response_ids": [the]},
        {"prompt_ids": [hat, end, think], "response_ids": [half, the, hat, think, end]},
        {"prompt_ids": [the, hat], "response_ids": []},
        {"prompt_ids": [hat, the], "response_ids": [*rest, lost, *rest]},  # no spelling from there on
        {"prompt_ids": [lost, the], "response_ids": rest},  # none at all
        {"prompt_ids": [the] * 20, "response_ids": ([hat, *rest] * 9)[: STUDENT_LIMIT - 20]},  # fills the context
        {"prompt_ids": [hat] * (STUDENT_LIMIT - 1), "response_ids": [end]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
