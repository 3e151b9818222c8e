"""Train the specialist *right*: a student fine-tuned on its correct answers (one round of expert iteration).

python scripts/real/expert.py MODEL SAMPLES PROBLEMS OUT [EPOCHS [ROWS]]: SAMPLES has verified answers to PROBLEMS, by
`lweave eval` or sample.py; OUT becomes a LoRA adapter. Plain next-token training on the answers, without this package;
with ROWS at a time, which a larger model needs.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH, EPOCHS, LEARNING_RATE = 8, 2, 3e-4
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def right_answers(samples: Path, problems: Path) -> list[tuple[str, str]]:
    """Question and answer of every correct and finished response, without duplicates."""
    questions = {row["id"]: row["problem"] for row in map(json.loads, problems.read_text("utf-8").splitlines())}
    rows = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    kept = [(questions[row["problem"]], row["text"]) for row in rows if row["correct"] and row["finish"] == "stop"]
    return list(dict.fromkeys(kept))


def tokens(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Input ids and labels of one row: only the answer and the end of its turn are learned."""
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    response = tokenizer(f"{answer}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
    return prompt + response, [-100] * len(prompt) + response


def fine_tune(
    model: Any, rows: list[tuple[list[int], list[int]]], pad: int, epochs: int = EPOCHS, at_once: int = BATCH
) -> list[float]:
    """Train on shuffled rows, and return the loss of every update: the mean over the tokens of its batch."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=LEARNING_RATE)
    order, losses = random.Random(0), []
    for _ in range(epochs):
        order.shuffle(rows)
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            learned = sum(label != -100 for _, labels in batch for label in labels[1:])
            losses.append(0.0)
            for place in range(0, len(batch), at_once):
                part = batch[place : place + at_once]
                longest = max(len(ids) for ids, _ in part)
                ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in part])
                labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in part])
                loss = model(ids, labels=labels, num_items_in_batch=torch.tensor(learned)).loss
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {len(losses)}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main(model_name: str, samples: Path, problems: Path, out: Path, epochs: int = EPOCHS, at_once: int = BATCH) -> None:
    """Train, and write the adapter with a note of what it was made of."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    if at_once < BATCH:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=LAYERS, lora_dropout=0.0)
    model = get_peft_model(model, config).train()
    kept = right_answers(samples, problems)
    losses = fine_tune(model, [tokens(tokenizer, *pair) for pair in kept], tokenizer.eos_token_id, epochs, at_once)
    model.save_pretrained(out)
    note = {"answers": len(kept), "updates": len(losses), "first": losses[0], "last": losses[-1]}
    (out / "made.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]), *map(int, sys.argv[5:]))
