"""Recognise that memory ran out, whatever the device calls it."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Tell a lack of memory from other errors; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    """Give unused blocks back, so that a smaller attempt does not fail on their fragments."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
