"""The models of a tiny world: tokenizers, pretraining on the corpus, and post-training by expert iteration.

Models are tiny configurations of real architectures. Their tokenizers are real byte-level BPE files over the few
characters of the world that encode the same text differently: other ids, other end-of-sequence strings, other merges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, assert_never

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from lightning_weave.grading.math import grade
from lightning_weave.models.sampler import HFSampler
from lightning_weave.progress import Bar
from lightning_weave.types import Request, SamplingSettings
from tiny_world.task import Errors, Exercise, draw_style, write_response

Family = Literal["qwen3", "llama"]
ALPHABET = "0123456789+-*=.:{}\\ \n" + "".join(sorted(set("QuestionAnswerhmmsowaitboxed")))
RESPONSE_WORDS = (" hmm", " so", " wait", " \\boxed{")
# Prompts are already complete, so the chat template adds nothing.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_POSITIONS = 256
MUON_RATE = 0.02
ADAMW_RATE = 4e-3
TYPICAL_TOKENS = 40  # of one response: losses are divided by this constant
IGNORED = -100
MICRO_BATCH = 24  # rows of similar length, to limit padding
MAX_TOKENS = 128
SAMPLES = 8  # per prompt and round of expert iteration


@dataclass(frozen=True)
class TokenizerSpec:
    """The specifics of one tokenizer. Words are merged letter by letter from the start."""

    eos: str
    pad: str
    words: tuple[str, ...]


TOKENIZERS = {
    # Only the student has the token `}.`: its anchors need two tokens there.
    "student": TokenizerSpec("<|end|>", "<|pad|>", ("Question", "Answer", *RESPONSE_WORDS, "}.")),
    "accuracy": TokenizerSpec("</s>", "<pad>", ("Question", "Answer", *RESPONSE_WORDS)),
    # Splits the words of the prompt into pieces that the student does not have.
    "brevity": TokenizerSpec("<|eot|>", "<|fill|>", ("Quest", "ion", "Ans", "wer", *RESPONSE_WORDS)),
    # Has no words for the prompt at all.
    "thorough": TokenizerSpec("[EOS]", "[PAD]", RESPONSE_WORDS),
}


def make_tokenizer(spec: TokenizerSpec, rng: np.random.Generator) -> PreTrainedTokenizerFast:
    """Build a tokenizer with ids in random order."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def escape(letter: str) -> str:
        """Write one character as byte-level BPE files do (a space as `Ġ`)."""
        return "".join(piece for piece, _ in byte_level.pre_tokenize_str(letter))

    merges: dict[tuple[str, str], None] = {}  # in order, each once: words may share a prefix
    for word in spec.words:
        pieces = [escape(letter) for letter in word]
        for length in range(1, len(pieces)):
            merges["".join(pieces[:length]), pieces[length]] = None
    tokens = sorted({*map(escape, ALPHABET), *("".join(pair) for pair in merges)})
    order = rng.permutation(len(tokens))
    vocabulary = {tokens[int(place)]: number for number, place in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=spec.eos, pad_token=spec.pad)
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True)
class Dimensions:
    """The size of a model."""

    layers: int
    width: int
    heads: int
    feed_forward: int


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


@dataclass(frozen=True)
class Example:
    """One tokenized prompt and its response; only the response is trained on."""

    prompt_ids: list[int]
    response_ids: list[int]


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Exercise],
    errors: Errors,
    steps: int,
    batch: int,
    rng: np.random.Generator,
    bar: Bar,
) -> None:
    """Train a base model: Muon for the matrices of the blocks, AdamW for the rest, linear decay in the second half."""
    blocks = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    block_ids = {id(weight) for weight in blocks}
    rest = [weight for weight in model.parameters() if id(weight) not in block_ids]
    muon = torch.optim.Muon(blocks, lr=MUON_RATE, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        examples = []
        for problem in islice(problems, batch):
            response = tokenizer.encode(write_response(problem, draw_style(rng), errors, rng))
            examples.append(Example(tokenizer.encode(problem.prompt), [*response, tokenizer.eos_token_id]))
        decay = min(1.0, 2 * (steps - step) / steps)
        loss = update(model, examples, {muon: MUON_RATE * decay, adamw: ADAMW_RATE * decay})
        bar.advance(note=f"loss {loss:.3f}")


def update(
    model: PreTrainedModel, examples: Sequence[Example], learning_rates: Mapping[torch.optim.Optimizer, float]
) -> float:
    """Take one optimizer step on the likelihood of the responses and return the loss.

    The sum over tokens is divided by a constant: a mean per batch would weight the tokens of short batches more.
    """
    by_length = sorted(examples, key=lambda example: len(example.prompt_ids) + len(example.response_ids))
    loss = 0.0
    for start in range(0, len(by_length), MICRO_BATCH):
        batch = by_length[start : start + MICRO_BATCH]
        longest = len(batch[-1].prompt_ids) + len(batch[-1].response_ids)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)  # padded on the right, where attention is masked
        labels = torch.full_like(ids, IGNORED)
        for row, example in enumerate(batch):
            tokens = torch.tensor(example.prompt_ids + example.response_ids)
            ids[row, : len(tokens)] = tokens
            labels[row, len(example.prompt_ids) : len(tokens)] = tokens[len(example.prompt_ids) :]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        total = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
        part = total / (len(examples) * TYPICAL_TOKENS)
        part.backward()
        loss += float(part.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in learning_rates.items():
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Attempt:
    """One sampled response and the verifier's verdict."""

    ids: list[int]  # including the end of sequence
    finished: bool
    correct: bool


Select = Callable[[Sequence[Attempt]], list[Attempt]]


def select_correct(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Select correct answers."""
    return [attempt for attempt in attempts if attempt.correct and attempt.finished]


def select_shortest(attempts: Sequence[Attempt], mastered: float = 0.75) -> list[Attempt]:
    """Select the two shortest correct answers, on prompts that are already mastered (6 of 8).

    Without that condition the specialist would improve at everything, with nothing left to compose.
    """
    correct = select_correct(attempts)
    if len(correct) < mastered * len(attempts):
        return []
    return sorted(correct, key=lambda attempt: len(attempt.ids))[:2]


def select_longest(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Select the four longest correct answers."""
    return sorted(select_correct(attempts), key=lambda attempt: -len(attempt.ids))[:4]


def sample_attempts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Exercise],
    samples: int,
    settings: SamplingSettings,
) -> list[list[Attempt]]:
    """Sample several answers to every problem and verify them."""
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    sampler = HFSampler(model.eval(), frozenset({tokenizer.eos_token_id}), vocabulary, batch_size=256)
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    requests = [Request(ids, row, number) for row, ids in enumerate(prompts) for number in range(samples)]
    responses = sampler.sample(requests, settings)
    texts = tokenizer.batch_decode([response.ids for response in responses], skip_special_tokens=True)
    attempts = [
        Attempt(response.ids, response.finish == "stop", grade(text, problems[request.prompt].answer))
        for request, response, text in zip(requests, responses, texts, strict=True)
    ]
    return [attempts[start : start + samples] for start in range(0, len(attempts), samples)]


@dataclass(frozen=True)
class PostTraining:
    """The settings of expert iteration."""

    rounds: int
    prompts: int  # new ones in each round
    learning_rate: float
    temperature: float = 1.0
    batch: int = 64


def post_train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    select: Select,
    problems: Iterator[Exercise],
    settings: PostTraining,
    rng: np.random.Generator,
    bar: Bar,
) -> None:
    """Turn a base model into a specialist by expert iteration: sample, verify, select, imitate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(settings.rounds):
        exercises = list(islice(problems, settings.prompts))
        seed = int(rng.integers(2**31))
        sampling = SamplingSettings(settings.temperature, top_p=1.0, max_tokens=MAX_TOKENS, seed=seed)
        answered = sample_attempts(model, tokenizer, exercises, SAMPLES, sampling)
        selected = [
            Example(tokenizer.encode(problem.prompt), attempt.ids)
            for problem, attempts in zip(exercises, answered, strict=True)
            for attempt in select(attempts)
        ]
        order = rng.permutation(len(selected))
        model.train()
        for start in range(0, len(order), settings.batch):
            examples = [selected[place] for place in order[start : start + settings.batch]]
            update(model, examples, {optimizer: settings.learning_rate})
        correct = sum(attempt.correct for attempts in answered for attempt in attempts)
        bar.advance(note=f"{correct / (SAMPLES * len(exercises)):.0%} correct, {len(selected)} selected")
