"""The same update with TRL, if it is installed."""

import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_weave.cache.block import Cache
from lightning_weave.train.parallel import clip_gradients
from parts.measure import Clock, Variant
from parts.student import make_student


class TimedTeacher(nn.Module):
    """A teacher of the student's size that records its time."""

    def __init__(self, model: Any, clock: Clock) -> None:
        super().__init__()
        self.model, self.config, self.clock, self.seconds = model.eval(), model.config, clock, 0.0

    def forward(self, **inputs: Any) -> Any:
        started = self.clock()
        outputs = self.model(**inputs)
        self.seconds += self.clock() - started
        return outputs


def trl_update(
    cache: Cache, layers: int, rows: list[int], rate: float, clock: Clock
) -> tuple[Variant, TimedTeacher] | None:
    """The same update with TRL's GKDTrainer, on the same student and tokens; None if TRL is not installed."""
    warnings.simplefilter("ignore")
    try:
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError:
        return None
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    settings = GKDConfig(
        tempfile.mkdtemp(), lmbda=0.0, beta=1.0, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False
    )
    teacher = TimedTeacher(make_student(layers), clock)
    trainer = GKDTrainer(
        model=make_student(layers),
        teacher_model=teacher,
        args=settings,
        train_dataset=Dataset.from_list([{"unused": 0}]),
        data_collator=lambda batch: batch,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(trainer.model.parameters(), rate, weight_decay=0.01, fused=True)
    read = cache.block(rows).rollouts
    pairs = zip(read.prompt_ids, read.response_ids, strict=True)
    ids = torch.tensor(np.stack([np.concatenate(pair) for pair in pairs])).long()
    labels = ids.clone()
    labels[:, : len(read.prompt_ids[0])] = -100

    def step() -> None:
        trainer.training_step(
            trainer.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        )
        clip_gradients(trainer.model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, teacher
