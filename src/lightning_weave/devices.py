"""The device that this process computes on: chosen, set and queried here, and in no other file.

Torch is imported only where a device is chosen, so that reading a run stays quick.
"""

import gc
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.ranks import local_rank, local_world_size

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_chosen: "torch.device | None" = None


def choose_device(setting: str) -> "torch.device":
    """Choose the device that the setting names ("auto": CUDA if available, else the CPU), and make it current."""
    global _chosen
    import torch

    if setting == "cuda" and not torch.cuda.is_available():
        raise InputError('machine.device = "cuda": no CUDA device is visible here. Use "auto" or "cpu"')
    if setting == "mps" and not torch.backends.mps.is_available():
        raise InputError('machine.device = "mps": Apple\'s GPU is not available here. Use "auto" or "cpu"')
    if setting == "mps":
        _chosen = torch.device("mps")
    elif setting == "cpu" or not torch.cuda.is_available():
        _chosen = torch.device("cpu")
    else:
        _chosen = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(_chosen)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan per length of a row, up to a second each
    return _chosen


def set_device(device: "torch.device") -> None:
    """Make a device current in this thread, in which torch would otherwise use the first GPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def supports_async_copy(device: "torch.device") -> bool:
    """Whether a device copies from pinned memory while it computes."""
    return device.type == "cuda"


@cache
def has_flash_attention(device: "torch.device") -> bool:
    """Whether torch's flash attention runs there, in 16 bits."""
    import torch

    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_compiler(device: "torch.device") -> bool:
    """Whether torch.compile makes kernels for it, by Triton, which needs a C compiler and Python's headers."""
    compilers = filter(shutil.which, (os.environ.get("CC", "gcc"), "clang"))
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return has_flash_attention(device) and find_spec("triton") is not None and any(compilers) and headers.is_file()


def collective_backend(device: "torch.device") -> str:
    """Name the backend of collectives on such a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def can_shard(device: "torch.device") -> bool:
    """Whether torch can shard models there; no backend of its collectives supports Apple's GPU."""
    return device.type != "mps"


def allow_tf32(allowed: bool) -> None:
    """Let CUDA round the factors of float32 products to 10 bits of mantissa, or not."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed


def sees_gpu(setting: str) -> bool:
    """Whether the setting leads to a GPU that vLLM computes on; asked without torch, which takes seconds to import."""
    if setting in ("cpu", "mps") or os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return False
    return any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd"))


def own_gpus(device: "torch.device", count: int) -> dict[str, str]:
    """Give the environment in which a program of this rank sees `count` GPUs, and no other rank's program the same."""
    if device.type != "cuda":
        return {}
    visible, first = _own_block(count)
    return {VISIBLE: ",".join(visible[first : first + count])}


def use_engine_gpu(device: "torch.device", count: int) -> "torch.device":
    """Move this process to the first GPU of its engine: with several GPUs to an engine, its own is another rank's."""
    global _chosen
    if device.type != "cuda":
        return device
    import torch

    _, first = _own_block(count)
    _chosen = torch.device("cuda", first)
    set_device(_chosen)
    return _chosen


def most_processes(device: "torch.device", count: int) -> int:
    """Count the processes with `count` GPUs each that this machine has room for; without GPUs it is one."""
    return max(1, len(_visible_gpus()) // count) if device.type == "cuda" else 1


def _own_block(count: int) -> tuple[list[str], int]:
    """List the visible GPUs, and find where this rank's block of `count` begins."""
    visible = _visible_gpus()
    blocks = len(visible) // count
    # Slurm and Ray show each process its own GPUs only; torchrun shows all of them to every rank.
    shared = len(visible) > count or VISIBLE not in os.environ
    if blocks == 0 or (shared and local_world_size() > blocks):
        ranks = local_world_size()
        advice = f"Start {blocks} processes" if blocks else "Lower tensor_parallel_size"
        raise InputError(
            f"an engine of each of {ranks} processes on this machine, with {count} GPUs each (tensor_parallel_size in "
            f"engine.options), needs {ranks * count} GPUs, and {len(visible)} are visible. {advice}"
        )
    return visible, local_rank() % blocks * count


def _visible_gpus() -> list[str]:
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def empty_pool() -> None:
    """Empty the cache of the device's allocator."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def free_memory() -> None:
    """Collect reference cycles, and return unused blocks to the device."""
    gc.collect()
    empty_pool()


def is_out_of_memory(error: Exception) -> bool:
    """Tell a lack of memory from other errors; the CPU allocator raises a plain RuntimeError."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def explain_out_of_memory(path: Path, device: "torch.device") -> Iterator[None]:
    """Name the checkpoint whose weights do not fit on a device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise WeaveError(
            f"{path}: its weights do not fit on {device}. Use a smaller dtype or a larger device"
        ) from error


def device_name() -> str | None:
    """Name the accelerator in use; None on a CPU."""
    if _chosen is None or _chosen.type == "cpu":
        return None
    import torch

    return torch.cuda.get_device_name(_chosen) if _chosen.type == "cuda" else "Apple GPU"


def memory_of(device: "torch.device") -> int:
    """Give the bytes of memory of a device; a CPU and Apple's GPU have the machine's, or the container's."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total


def memory_left(device: "torch.device") -> tuple[int, int] | None:
    """Give the free and total bytes of a GPU; None for devices that share the machine's memory."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info(device)


def matmul_flops(device: "torch.device") -> float:
    """Measure the floating-point operations per second of a matrix product: the best of a few."""
    import torch

    size = 4096 if device.type == "cuda" else 1024
    factor = torch.ones(size, size, device=device, dtype=torch.bfloat16 if has_bfloat16(device) else torch.float32)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        (factor @ factor)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def peak_bytes() -> int | None:
    """Give the most memory that tensors took on the accelerator in use; None if that is not counted."""
    if _chosen is None or _chosen.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(_chosen))


def has_bfloat16(device: "torch.device") -> bool:
    """Whether the hardware itself computes in bfloat16."""
    import torch

    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def has_float64(device: "torch.device") -> bool:
    """Whether tensors there can be float64."""
    return device.type != "mps"


def has_wide_products(device: "torch.device") -> bool:
    """Whether bfloat16 factors are multiplied fast, and into float32: not on a CPU, and not on Apple's GPU."""
    return device.type not in ("cpu", "mps")
