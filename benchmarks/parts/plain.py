"""The same rows with the plain transformers Trainer: padded by its collator, full logits, cross-entropy."""

import tempfile

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from lightning_weave.cache.block import Cache
from lightning_weave.train.parallel import clip_gradients
from parts.measure import Variant
from parts.student import make_student


def trainer_update(cache: Cache, layers: int, rows: list[int], per_batch: int, rate: float) -> Variant:
    """One update in micro-batches of `per_batch` rows, in the order of the rows."""
    settings = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
    trainer = Trainer(model=make_student(layers), args=settings)
    trainer.current_gradient_accumulation_steps = -(-len(rows) // per_batch)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), rate, weight_decay=0.01, fused=True)
    read = cache.block(rows).rollouts
    pairs = list(zip(read.prompt_ids, read.response_ids, strict=True))
    batches = [_pad(pairs[start : start + per_batch]) for start in range(0, len(pairs), per_batch)]

    def update() -> None:
        for batch in batches:
            trainer.training_step(trainer.model, dict(batch))
        clip_gradients(trainer.model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _pad(pairs: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    ids, mask, labels = (torch.full((len(pairs), longest), fill) for fill in (0, 0, -100))
    for row, (prompt, response) in enumerate(pairs):
        tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
