"""A small table of GPUs: vendors' figures for dense products in bfloat16, TF32 and float32, memory and bandwidth."""

from dataclasses import dataclass, replace
from typing import Literal

from lightning_weave.errors import InputError

Products = Literal["bfloat16", "tf32", "float32"]
FLOAT32_SHARE = 0.8  # of its peak that a large product in float32 reaches, outside the units for matrices


@dataclass(frozen=True)
class GPU:
    """One type of GPU."""

    name: str
    peak: float  # operations per second in 16 bits
    tf32: float
    float32: float
    memory: float  # bytes
    bandwidth: float  # bytes per second

    def rate(self, products: Products, utilisation: float) -> float:
        """Operations per second, of a program that reaches this share of the peak in 16 bits, if its dtype lets it."""
        limit = {"bfloat16": self.peak, "tf32": self.tf32, "float32": FLOAT32_SHARE * self.float32}[products]
        return min(utilisation * self.peak, limit)


def _gpu(name: str, teraflops: tuple[float, float, float], gigabytes: float, terabytes_per_second: float) -> GPU:
    peak, tf32, float32 = (each * 1e12 for each in teraflops)
    return GPU(name, peak, tf32, float32, memory=gigabytes * 1e9, bandwidth=terabytes_per_second * 1e12)


# The paper measured on H100; costs are scaled to the others by peak (scoring, training) and bandwidth (sampling).
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", (989, 494, 67), 80, 3.35),
        _gpu("H200", (989, 494, 67), 141, 4.8),
        _gpu("B200", (2250, 1120, 75), 180, 8.0),
        _gpu("A100", (312, 156, 19.5), 80, 2.04),
        _gpu("A100-40GB", (312, 156, 19.5), 40, 1.56),
        _gpu("L40S", (362, 183, 91.6), 48, 0.864),
        _gpu("A6000", (155, 77, 38.7), 48, 0.768),
        _gpu("RTX4090", (165, 82.6, 82.6), 24, 1.01),
        _gpu("L4", (121, 60, 30.3), 24, 0.3),
    )
}
CALIBRATED = GPUS["H100"]
SPREAD = 0.2  # by which the memory of one type of GPU may differ from its name's


def find_gpu(name: str) -> GPU:
    """Look a GPU up by name."""
    gpus = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in gpus:
        raise InputError(f"--gpu {name}: unknown; choose from {', '.join(GPUS)}")
    return gpus[name.lower()]


def recognise(device: str, memory: float) -> GPU | None:
    """Find the GPU that a driver names, with its own memory; None for one that is not in the table.

    >>> gpu = recognise("NVIDIA A100-SXM4-40GB", 42e9)
    >>> gpu.name, gpu.memory
    ('A100-40GB', 42000000000.0)
    >>> recognise("NVIDIA GeForce RTX 4090", 25.3e9).name, recognise("AMD EPYC", 64e9)
    ('RTX4090', None)
    """
    words = device.replace(" ", "").replace("-", "").upper()
    for gpu in GPUS.values():
        model = gpu.name.partition("-")[0].upper()
        longer = any(model in other.upper() and model != other.upper() and other.upper() in words for other in GPUS)
        if model in words and not longer and abs(memory / gpu.memory - 1) < SPREAD:
            return replace(gpu, memory=memory)
    return None
