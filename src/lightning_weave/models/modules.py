"""What all transformers models have in common: the parts of their text decoder, and the memory that they need."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_weave.devices import empty_pool
from lightning_weave.errors import WeaveError


def is_out_of_memory(error: Exception) -> bool:
    """Tell a lack of memory from other errors; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    """Collect reference cycles, and return unused blocks to the device."""
    gc.collect()
    empty_pool()


@contextmanager
def explain_out_of_memory(path: Path, device: torch.device) -> Iterator[None]:
    """Name the checkpoint whose weights do not fit on a device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise WeaveError(
            f"{path}: its weights do not fit on {device}. Use a smaller dtype or a larger device"
        ) from error


def context_limit(config: Any) -> int | None:
    """Return the longest context that a configuration allows, or None if it sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def freeze_all_but_text(model: Any) -> None:
    """Enable gradients for the weights that compute the next token of a text, and disable them for all others."""
    text = [model.get_decoder() or model, model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {weight for part in text if part is not None for weight in part.parameters()}
    for weight in model.parameters():
        weight.requires_grad_(weight in trained)


def find_blocks(model: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers of the text decoder (its longest list of modules), and the layers outside of it."""
    decoder = model.get_decoder() or model
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    within = set(decoder.modules())
    outside = [each for each in model.modules() if isinstance(each, nn.ModuleList) and each not in within]
    inner = {each for one in outside for each in one.modules() if each is not one}
    return list(max(lists, key=len, default=[])), [block for one in outside if one not in inner for block in one]
