"""What a stranger brings: a student, a specialist, the checkpoint it came from, prompts and held-out problems.

All models answer in a box. The student and the specialist's base are right half of the time; the specialist nearly
always.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lightning_weave.config import Prompts
from lightning_weave.prompts import format_messages, render
from tokens.samples import byte_level

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)
BOX = " The answer is \\boxed{"
RIGHT = "7"
WRONG = "3"


def boxed(problem: str) -> str:
    """Format a problem as the recipe does by default."""
    return format_messages(Prompts(format="boxed"), [{"role": "user", "content": problem}])[-1]["content"]


PHRASES = ("What is ", boxed(""), "[user] ", "[me]", BOX)


def tokenizer_of() -> Any:
    """All bytes, and the phrases of this world as one token each: prompts are short."""
    tokenizer = byte_level([], added=PHRASES, special=(END, "<|pad|>"))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = END, "<|pad|>", TEMPLATE
    return tokenizer


def problems() -> list[dict[str, str]]:
    return [{"problem": f"What is {n} - {n} + {RIGHT}?", "answer": RIGHT} for n in range(100, 1000)]


def asked(tokenizer: Any) -> list[list[int]]:
    texts = [render([{"role": "user", "content": boxed(row["problem"])}], tokenizer) for row in problems()]
    return list(tokenizer(texts)["input_ids"])


def said(tokenizer: Any, answer: str) -> list[int]:
    return list(tokenizer.encode(f"{BOX}{answer}}}{END}"))


def teach(model: Any, tokenizer: Any, seed: int) -> None:
    """Train a model to answer in a box, rightly half of the time.

    Its head is large, so that a learning rate for models of usual width moves one of width 32 as far.
    """
    draw = random.Random(seed)
    prompts, answers = asked(tokenizer), [said(tokenizer, answer) for answer in (RIGHT, WRONG)]
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 100)
        ids = torch.tensor([draw.choice(prompts) + answer for answer in 8 * answers])
        labels = ids.clone()
        labels[:, : -len(answers[0])] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def specialise(model: Any, tokenizer: Any) -> None:
    """Make a model prefer the right digit where a digit is due, and leave it as it is in all else."""
    answer = said(tokenizer, RIGHT)
    ids = torch.tensor([prompt + answer[:1] for prompt in asked(tokenizer)[::30]])
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state[:, -1].mean(0)
        model.lm_head.weight[answer[1]] += 5.0 * hidden / hidden.square().sum()


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_own_world(root: Path, prompts: int) -> dict[str, str]:
    """Write everything that the recipe of the page names; give the keys to set."""
    from models.small_models import CONFIGS

    tokenizer = tokenizer_of()

    def made(seed: int) -> Any:
        config = CONFIGS["llama"]()
        config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 8192})
        config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    student, specialist = made(1), made(2)
    teach(student, tokenizer, seed=1)
    teach(specialist, tokenizer, seed=2)
    names = {
        "student.model": str(save(root / "student", student, tokenizer)),
        "anchors.skill.pre": str(save(root / "base", specialist, tokenizer)),
    }
    specialise(specialist, tokenizer)
    names["anchors.skill.post"] = str(save(root / "specialist", specialist, tokenizer))
    rows = problems()
    random.Random(0).shuffle(rows)
    for name, part in (("prompts.jsonl", rows[:prompts]), ("held-out.jsonl", rows[-50:])):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return names
