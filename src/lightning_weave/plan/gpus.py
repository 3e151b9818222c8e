"""A small table of GPUs: vendors' figures for dense bfloat16, memory and bandwidth."""

from dataclasses import dataclass

from lightning_weave.errors import InputError


@dataclass(frozen=True)
class GPU:
    """One type of GPU."""

    name: str
    peak: float  # operations per second
    memory: float  # bytes
    bandwidth: float  # bytes per second


def _gpu(name: str, teraflops: float, gigabytes: float, terabytes_per_second: float) -> GPU:
    return GPU(name, teraflops * 1e12, gigabytes * 1e9, terabytes_per_second * 1e12)


# The paper measured on H100; costs are scaled to the others by peak (scoring, training) and bandwidth (sampling).
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", 989, 80, 3.35),
        _gpu("H200", 989, 141, 4.8),
        _gpu("B200", 2250, 180, 8.0),
        _gpu("A100", 312, 80, 2.04),
        _gpu("A100-40GB", 312, 40, 1.56),
        _gpu("L40S", 362, 48, 0.864),
        _gpu("A6000", 155, 48, 0.768),
        _gpu("RTX4090", 165, 24, 1.01),
        _gpu("L4", 121, 24, 0.3),
    )
}
CALIBRATED = GPUS["H100"]


def find_gpu(name: str) -> GPU:
    """Look a GPU up by name."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in known:
        raise InputError(f"--gpu {name}: unknown; choose from {', '.join(GPUS)}")
    return known[name.lower()]
