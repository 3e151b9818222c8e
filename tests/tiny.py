"""Tiny checkpoints with real architectures and real tokenizers, random weights, and a recipe over them."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from lightning_weave.config import Recipe, check_recipe
from lightning_weave.run import Run

LETTERS = "0123456789+-*=.:{}\\ \n" + "".join(sorted(set("QuestionAnswerhmmwaitboxed")))
ENDS = {"student": "<|end|>", "accuracy": "</s>", "brevity": "<|eot|>"}
WORDS = {  # only the student has `}.`; only brevity splits the words of the prompt
    "student": ("Question", "Answer", " hmm", " wait", " \\boxed{", "}."),
    "accuracy": ("Question", "Answer", " hmm", " wait", " \\boxed{"),
    "brevity": ("Quest", "ion", "Ans", "wer", " hmm", " wait", " \\boxed{"),
}


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ids in an order of its own."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def visible(text: str) -> list[str]:
        return [by_bytes.pre_tokenize_str(letter)[0][0] for letter in text]

    merges = {}
    for word in WORDS[name]:
        pieces = visible(word)
        merges |= {("".join(pieces[:length]), pieces[length]): None for length in range(1, len(pieces))}
    tokens = sorted({*visible(LETTERS), *("".join(pair) for pair in merges)})
    order = np.random.default_rng(sum(map(ord, name))).permutation(len(tokens))
    vocabulary = {tokens[int(place)]: number for number, place in enumerate(order)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer, backend.decoder = by_bytes, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDS[name], pad_token="<pad>")


def make_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A small random model; its output matrix has rows that belong to no token."""
    shape = {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tied = family == "qwen3"
    config = Qwen3Config(**shape, head_dim=8, tie_word_embeddings=tied) if tied else LlamaConfig(**shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_model(folder: Path, spelling: str, family: str, seed: int, noise_from: Path | None = None) -> Path:
    """Save a random model; with `noise_from`, that model with its weights moved a little (a 'post-trained' one)."""
    tokenizer = make_tokenizer(spelling)
    model = make_model(family, tokenizer, seed)
    if noise_from is not None:
        model = type(model).from_pretrained(noise_from, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if noise_from is not None else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int, seed: int = 5) -> Path:
    """Problems such as 9-1-4*0, all different, with their answers."""
    rng = np.random.default_rng(seed)
    rows = {}
    while len(rows) < count:
        digits, operations = rng.permutation(10)[: rng.integers(4, 7)], rng.choice(list("+-*"), 6)
        problem = str(digits[0]) + "".join(f"{o}{d}" for o, d in zip(operations, digits[1:], strict=False))
        value = int(digits[0])
        for operation, digit in zip(operations, digits[1:], strict=False):
            value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[str(operation)] % 10
        rows[problem] = {"problem": problem, "answer": str(value), "id": f"p{len(rows)}"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return path


def make_world(root: Path, prompts: int = 12) -> dict:
    """Student and two anchor pairs with three tokenizers, and the recipe that weaves them."""
    root.mkdir(parents=True, exist_ok=True)
    student = save_model(root / "student", "student", "qwen3", 1)
    pre_a = save_model(root / "acc-pre", "accuracy", "llama", 2)
    pre_b = save_model(root / "brief-pre", "brevity", "qwen3", 3)
    end = ENDS["student"]
    return {
        "name": "tiny",
        "runs": str(root / "runs"),
        "student": {"model": str(student)},
        "anchors": {
            "acc": {
                "post": str(save_model(root / "acc-post", "accuracy", "llama", 4, pre_a)),
                "pre": str(pre_a),
                "aliases": {end: ENDS["accuracy"]},
            },
            "brief": {
                "post": str(save_model(root / "brief-post", "brevity", "qwen3", 5, pre_b)),
                "pre": str(pre_b),
                "aliases": {end: ENDS["brevity"]},
            },
        },
        "compositions": {
            "acc-only": {"weights": {"acc": 1.0}},
            "brief-only": {"weights": {"brief": 1.0}},
            "both": {"weights": {"acc": 0.5, "brief": 0.5}},
        },
        "prompts": {
            "source": str(save_prompts(root / "prompts.jsonl", prompts)),
            "columns": {"prompt": "problem", "answer": "answer", "id": "id"},
            "format": "question-answer",
            "chat": False,
            "take": prompts,
        },
        "rollout": {"responses": 2, "max_tokens": 12, "prompts_per_shard": 4},
        "reference": {"candidates": 4},
        "train": {"epochs": 2, "prompts_per_round": 4, "updates_per_round": 2, "learning_rate": 1e-3},
        "eval": {"benchmarks": []},
        "machine": {"threads": 1},
    }


def run_of(recipe: dict | Recipe, trust: bool = False) -> Run:
    return Run(recipe if isinstance(recipe, Recipe) else check_recipe(recipe), "tiny.toml", trust)
