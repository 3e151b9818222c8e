"""A chat model that writes one word again and again, a specialist that stops sooner and one that stops later."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_weave.prompts import render
from tokens.samples import byte_level

END, WORD = "<|end|>", " so"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)
PHRASES = ("[system] ", "[user] ", "[me]", "Reasoning effort: ", "low", "medium", "high", WORD)
STOPS = 0.15  # how likely the student stops after each word
PULL = 2.0  # nats by which a specialist prefers to stop, or not to
LONGEST = 64
LEVELS = {"high": {"late": 1.0}, "medium": {"late": 0.5, "soon": 0.5}, "low": {"soon": 1.0}}


def make_dial_world(root: Path) -> dict[str, Any]:
    """Write the models and the prompts; give a recipe that trains a student with three levels on them."""
    tokenizer = byte_level([], added=PHRASES, special=(END, "<|pad|>"))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = END, "<|pad|>", TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape["head_dim"] = 32  # the smallest of vLLM on CPU
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **ids), dtype=torch.float32
    )
    prompts = [f"{number}?" for number in range(100, 164)]
    texts = [render([{"role": "user", "content": one}], tokenizer) for one in prompts]
    states = _teach(model, list(tokenizer(texts)["input_ids"]), tokenizer.encode(WORD)[0], tokenizer.eos_token_id)
    folders = {}
    for name, pull in (("student", 0.0), ("soon", PULL), ("late", -PULL)):
        with torch.no_grad():
            row = model.lm_head.weight[tokenizer.eos_token_id]
            own = row.clone()
            row += pull * states / states.square().sum()
        folders[name] = str(root / name)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        with torch.no_grad():
            row.copy_(own)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one, "answer": "7"}) + "\n" for one in prompts))
    effort = {"levels": LEVELS, "default": "medium", "control": {"system": "Reasoning effort: {level}"}, "alpha": 1.0}
    return {
        "name": "dial",
        "runs": str(root / "runs"),
        "student": {"model": folders["student"]},
        "anchors": {name: {"post": folders[name], "pre": folders["student"]} for name in ("soon", "late")},
        "compositions": {"effort": effort},
        "prompts": {"source": str(root / "prompts.jsonl"), "format": "plain"},
        "rollout": {"responses": 4, "max_tokens": LONGEST},
        "reference": {"candidates": 4},
        "train": {"epochs": 16, "prompts_per_round": 8, "updates_per_round": 1, "learning_rate": 3e-3},
        "eval": {"benchmarks": [], "temperature": 1.0, "top_p": 1.0, "max_tokens": LONGEST},
        "machine": {"threads": 1},
    }


def _teach(model: Any, prompts: list[list[int]], word: int, end: int) -> torch.Tensor:
    """Train a model to write `word` and, at random, to stop; give the mean of its states where it may stop."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    target = torch.full((model.config.vocab_size,), 1e-4)
    target[end], target[word] = STOPS, 1 - STOPS
    target /= target.sum()
    ids = torch.tensor([[*prompt, *[word] * LONGEST] for prompt in prompts])
    begin = len(prompts[0]) - 1
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(input_ids=ids[torch.randperm(len(ids))[:16]]).logits[:, begin:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.expand(logits[..., 0].numel(), -1)).backward()
        optimizer.step()
    with torch.no_grad():
        return model.model(input_ids=ids).last_hidden_state[:, begin:].flatten(0, 1).mean(0)
