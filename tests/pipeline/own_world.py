"""What a stranger brings: a student, a specialist, the checkpoint it came from, prompts and held-out problems.

All models answer in a box. The student and the specialist's base are right half of the time, the specialist always.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lightning_weave.prompts import render
from lightning_weave.prompts.formats import boxed
from tokens.samples import byte_level

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)
BOX = " The answer is \\boxed{"
RIGHT = "7"
WRONG = "3"
PHRASES = ("What is ", boxed(""), "[user] ", "[me]", BOX)


def tokenizer_of() -> Any:
    """All bytes, and the phrases of this world as one token each: prompts are short."""
    tokenizer = byte_level([], added=PHRASES, special=(END, "<|pad|>"))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = END, "<|pad|>", TEMPLATE
    return tokenizer


def problems() -> list[dict[str, str]]:
    return [{"problem": f"What is {n} - {n} + {RIGHT}?", "answer": RIGHT} for n in range(100, 1000)]


def teach(model: Any, tokenizer: Any, right: float, steps: int, seed: int) -> None:
    """Train a model to answer in a box, and rightly this often."""
    draw = random.Random(seed)
    texts = [render([{"role": "user", "content": boxed(row["problem"])}], tokenizer) for row in problems()]
    asked = tokenizer(texts)["input_ids"]
    answers = {is_right: tokenizer.encode(f"{BOX}{RIGHT if is_right else WRONG}}}{END}") for is_right in (True, False)}
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(steps):
        ids = torch.tensor([draw.choice(asked) + answers[draw.random() < right] for _ in range(16)])
        labels = ids.clone()
        labels[:, : -len(answers[True])] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_own_world(root: Path, prompts: int) -> dict[str, str]:
    """Write everything that the recipe of the page names; give the keys to set."""
    from models.small_models import CONFIGS

    tokenizer = tokenizer_of()

    def made(seed: int) -> Any:
        config = CONFIGS["qwen3"]()
        config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 8192})
        config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    student, specialist = made(1), made(2)
    teach(student, tokenizer, right=0.5, steps=60, seed=1)
    teach(specialist, tokenizer, right=0.5, steps=60, seed=2)
    names = {
        "student.model": str(save(root / "student", student, tokenizer)),
        "anchors.skill.pre": str(save(root / "base", specialist, tokenizer)),
    }
    teach(specialist, tokenizer, right=1.0, steps=20, seed=3)
    names["anchors.skill.post"] = str(save(root / "specialist", specialist, tokenizer))
    rows = problems()
    random.Random(0).shuffle(rows)
    for name, part in (("prompts.jsonl", rows[:prompts]), ("held-out.jsonl", rows[-50:])):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return names
