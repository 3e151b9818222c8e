"""Train on an exported cache inside transformers' own Trainer, with this project's loss.

lweave export mine.toml --composition even --out targets
python examples/transformers_trainer.py Qwen/Qwen3-1.7B targets my-student

In one process: the loss calls the model's own parts, which a wrapper for several (DDP, FSDP) would not see.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from lightning_weave.heads import find_head, fused_log_residual_loss, hidden_states, outcome_logprobs
from lightning_weave.maths import log_residual_loss


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the tokens; put the decisions that have a target after one another."""
    tokens = [torch.tensor([*row["prompt_ids"], *row["response_ids"]]) for row in rows]
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    labels = torch.full_like(input_ids, -100)  # only for the Trainer, which counts them
    states, candidates, behaviour, target = [], [], [], []
    for number, row in enumerate(rows):
        kept = torch.tensor(row["kept"]).nonzero().flatten()
        place = len(row["prompt_ids"]) + kept
        labels[number, place] = input_ids[number, place]
        states.append(number * input_ids.shape[1] + place - 1)  # a decision is made at the token before it
        candidates.append(torch.tensor(row["candidate_ids"])[kept])
        behaviour.append(outcomes(row, "behaviour")[kept])
        target.append(outcomes(row, "target")[kept])
    named = {"states": states, "candidate_ids": candidates, "log_b": behaviour, "log_q": target}
    return {"input_ids": input_ids, "labels": labels} | {name: torch.cat(parts) for name, parts in named.items()}


def outcomes(row: dict[str, Any], name: str) -> Tensor:
    """Log-probabilities of the candidates and, last, of all other tokens together."""
    return torch.cat([torch.tensor(row[name]), torch.tensor(row[f"{name}_other"])[:, None]], dim=1)


def weave_loss(model: Any, batch: dict[str, Tensor], alpha: float, vocabulary: int, decisions: float) -> Tensor:
    """The paper's finite-candidate loss, in one pass over the head where its form allows it."""
    hidden = hidden_states(model, batch["input_ids"]).flatten(0, 1)[batch["states"]]
    head = find_head(model, vocabulary)
    ids, log_b, log_q = batch["candidate_ids"], batch["log_b"], batch["log_q"]
    if head.plain:
        parts = hidden, head.weight_VD, ids, log_b, log_q
        return fused_log_residual_loss(*parts, alpha, decisions, vocabulary=vocabulary)
    return log_residual_loss(outcome_logprobs(hidden, head, ids), log_b, log_q, alpha).sum() / decisions


class WeaveTrainer(Trainer):
    """The Trainer of transformers with another loss."""

    def compute_loss(self, model: Any, inputs: Any, *unused: Any, num_items_in_batch: Any) -> Any:
        decisions = float(num_items_in_batch)  # of the whole update, however many batches make it
        return weave_loss(self.accelerator.unwrap_model(model), inputs, self.alpha, self.vocabulary, decisions)


def main(student: str, targets: str, out: str, **settings: Any) -> WeaveTrainer:
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)  # master weights
    tokenizer = AutoTokenizer.from_pretrained(student)
    rows = datasets.load_dataset("parquet", data_files=f"{targets}/data/*.parquet", split="train")
    usual = {"learning_rate": 1e-6, "num_train_epochs": 2, "max_grad_norm": 1.0, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(out, remove_unused_columns=False, report_to=[], **{**usual, **settings})
    trainer = WeaveTrainer(model, arguments, data_collator=collate, train_dataset=rows, processing_class=tokenizer)
    trainer.alpha = json.loads((Path(targets) / "export.json").read_text())["alpha"]
    trainer.vocabulary = max(tokenizer.get_vocab().values()) + 1
    trainer.train()
    trainer.save_model(out)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
