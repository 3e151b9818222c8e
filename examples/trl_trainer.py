"""Train on an exported cache inside TRL's SFTTrainer, with LoRA from peft and this project's loss.

    lweave export mine.toml --composition even --out targets
    python examples/trl_trainer.py Qwen/Qwen3-1.7B targets my-adapter

The batches and the loss are those of transformers_trainer.py, in one process as there.
(A file called trl.py would hide the library.)
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_trainer import collate, weave_loss
from trl import SFTConfig, SFTTrainer


class WeaveSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer with another loss."""

    def compute_loss(self, model: Any, inputs: Any, *unused: Any, num_items_in_batch: Any) -> Any:
        decisions = float(num_items_in_batch)  # of the whole update, however many batches make it
        model = self.accelerator.unwrap_model(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # its layers hold the adapters
        return weave_loss(model, inputs, self.alpha, self.vocabulary, decisions)


def main(student: str, targets: str, out: str, rank: int = 16, **settings: Any) -> WeaveSFTTrainer:
    tokenizer = AutoTokenizer.from_pretrained(student)
    usual = {"learning_rate": 1e-4, "num_train_epochs": 2, "max_grad_norm": 1.0, "lr_scheduler_type": "constant"}
    arguments = SFTConfig(
        out,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},  # the rows have their tokens
        report_to=[],
        **{**usual, **settings},
    )
    trainer = WeaveSFTTrainer(
        AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        arguments,
        data_collator=collate,
        train_dataset=datasets.load_dataset("parquet", data_files=f"{targets}/data/*.parquet", split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.alpha = json.loads((Path(targets) / "export.json").read_text())["alpha"]
    trainer.vocabulary = max(tokenizer.get_vocab().values()) + 1
    trainer.train()
    trainer.save_model(out)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
