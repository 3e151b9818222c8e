"""Recognise that memory ran out, whatever the device calls it, and give back what is not used."""

import gc

import torch

from lightning_weave.devices import empty_pool


def is_out_of_memory(error: Exception) -> bool:
    """Tell a lack of memory from other errors; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    """Collect what only cycles keep alive, and give unused blocks back to the device."""
    gc.collect()
    empty_pool()
