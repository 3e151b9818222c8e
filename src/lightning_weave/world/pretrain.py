"""Make base models from scratch: tiny configurations of real architectures, trained on the corpus."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from lightning_weave.progress import Bar
from lightning_weave.world.corpus import Slips, draw_style, write_response
from lightning_weave.world.task import Exercise

Family = Literal["qwen3", "llama"]
MAX_POSITIONS = 256
MUON_RATE = 0.02
ADAMW_RATE = 4e-3
TYPICAL_TOKENS = 40  # of one response: losses are divided by this constant
IGNORED = -100
MICRO_BATCH = 24  # rows of similar length, to limit padding


@dataclass(frozen=True)
class Dimensions:
    """The size of a model."""

    layers: int
    width: int
    heads: int
    feed_forward: int


@dataclass(frozen=True)
class Example:
    """One tokenized prompt and its response; only the response is trained on."""

    prompt_ids: list[int]
    response_ids: list[int]


def make_model(
    family: Family, dimensions: Dimensions, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator
) -> PreTrainedModel:
    """Build an untrained model for the tokenizer."""
    common = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,  # padded, as most published checkpoints are
        "hidden_size": dimensions.width,
        "intermediate_size": dimensions.feed_forward,
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    match family:
        case "qwen3":
            config = Qwen3Config(
                **common,
                head_dim=dimensions.width // dimensions.heads,
                num_key_value_heads=dimensions.heads // 2,
                tie_word_embeddings=True,
            )
        case "llama":
            config = LlamaConfig(**common, num_key_value_heads=dimensions.heads, tie_word_embeddings=False)
        case _:
            assert_never(family)
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.integers(2**31)))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode(tokenizer: PreTrainedTokenizerFast, written: Sequence[tuple[Exercise, str]]) -> list[Example]:
    """Tokenize worked problems, including the end of sequence."""
    prompts = tokenizer([problem.prompt for problem, _ in written])["input_ids"]
    responses = tokenizer([response for _, response in written])["input_ids"]
    end = tokenizer.eos_token_id
    return [Example(prompt, [*response, end]) for prompt, response in zip(prompts, responses, strict=True)]


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Exercise],
    slips: Slips,
    steps: int,
    batch: int,
    rng: np.random.Generator,
    bar: Bar,
) -> None:
    """Train a base model: Muon for the matrices of the blocks, AdamW for the rest, linear decay in the second half."""
    muon, adamw = _optimizers(model)
    model.train()
    for step in range(steps):
        solutions = [
            (problem, write_response(problem, draw_style(rng), slips, rng)) for problem in islice(problems, batch)
        ]
        decay = min(1.0, 2 * (steps - step) / steps)
        loss = update(model, encode(tokenizer, solutions), {muon: MUON_RATE * decay, adamw: ADAMW_RATE * decay})
        bar.advance(note=f"loss {loss:.3f}")


def _optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    blocks = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    chosen = {id(weight) for weight in blocks}
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return (
        torch.optim.Muon(blocks, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )


def update(
    model: PreTrainedModel,
    examples: Sequence[Example],
    rates: Mapping[torch.optim.Optimizer, float],
) -> float:
    """Take one step on the responses' likelihood and return the loss.

    The sum over tokens is divided by a constant: a mean per batch would weight the tokens of short batches more.
    """
    by_length = sorted(examples, key=lambda example: len(example.prompt_ids) + len(example.response_ids))
    loss = 0.0
    for start in range(0, len(by_length), MICRO_BATCH):
        ids, labels = _batch(by_length[start : start + MICRO_BATCH])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        total = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
        part = total / (len(examples) * TYPICAL_TOKENS)
        part.backward()
        loss += float(part.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in rates.items():
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss


def _batch(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Pad on the right, where causal attention does not see it."""
    longest = max(len(example.prompt_ids) + len(example.response_ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        both = torch.tensor(example.prompt_ids + example.response_ids)
        ids[row, : len(both)] = both
        labels[row, len(example.prompt_ids) : len(both)] = both[len(example.prompt_ids) :]
    return ids, labels
