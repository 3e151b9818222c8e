"""Count what scoring and training cost per token on the fake device: operations, bytes and kernels, by place.

A separate program, as the fake device needs. `count` starts it. One layer and what is around the layers are counted
apart, from models of one and of two layers, so that a count holds for any depth.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from fake_runs import Setting, ask, config_of, scorings, trainings

TOKENS = 8192  # of the one row
# An H100: 16-bit products at 70 % and float32 products at 80 % of the peak, attention as FlashAttention 2 runs there,
# 85 % of the bandwidth, and the time to launch a kernel.
PRODUCT, PRODUCT_FLOAT32, ATTENTION, BANDWIDTH, LAUNCH = 0.7 * 989e12, 0.8 * 67e12, 350e12, 0.85 * 3.35e12, 4e-6
MEASURES = ("operations", "bytes", "kernels", "microseconds")
FREE = ("empty", "detach", "alias", "new_empty", "_unsafe_view", "as_strided", "lift", "sym_")
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0}  # where the first factor is
Counts = dict[str, dict[str, dict[str, float]]]  # by part ("layer", "rest"), kind of work and measure, per token


def count(settings: Sequence[Setting]) -> Iterator[Counts]:
    """Count in a process of its own; each setting gives its counts per token, in the order of the settings."""
    return iter(ask(__file__, [asdict(setting) for setting in settings]))


def total(counts: Counts, model: str) -> dict[str, float]:
    """Add up the microseconds per token of a whole model, by kind of work."""
    layers = int(config_of(model)["num_hidden_layers"])
    kinds = {kind for part in ("layer", "rest") for kind in counts[part]}
    times = {
        kind: layers * counts["layer"].get(kind, {}).get("microseconds", 0.0)
        + counts["rest"].get(kind, {}).get("microseconds", 0.0)
        for kind in kinds
    }
    return {kind: time for kind, time in sorted(times.items(), key=lambda item: -item[1]) if time > 0.005}


# What follows runs in the program.


def main() -> None:
    from transformers import masking_utils

    masking_utils.is_tracing = lambda *arguments: False
    for asked in json.load(sys.stdin):
        setting = Setting(**asked)
        one, two = (_work(replace(setting, layers=layers)) for layers in (1, 2))
        layer, rest = Counter(two), Counter(one)
        layer.subtract(one)
        rest.subtract(layer)
        answer: Counts = {"layer": {}, "rest": {}}
        for part, found in (("layer", layer), ("rest", rest)):
            for (kind, measure), value in sorted(found.items()):
                answer[part].setdefault(kind, {})[measure] = float(f"{value / TOKENS:.6g}")
        print(json.dumps(answer), flush=True)


def _work(setting: Setting) -> Counter[tuple[str, str]]:
    from fake_device import fake_device

    with fake_device() as device:
        works = trainings if setting.stage == "train" else scorings
        with works(setting, device) as work:
            work(64)
            with _recording(device, int(config_of(setting.model)["vocab_size"])) as found:
                work(TOKENS)
            return found


@contextmanager
def _recording(device: Any, vocabulary: int) -> Iterator[Counter[tuple[str, str]]]:
    found: Counter[tuple[str, str]] = Counter()

    def record(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = str(func).split(".")[1]
        read, written = _read_and_written(func, args, kwargs, result)
        known = {tensor.untyped_storage()._cdata for tensor in read}
        is_view = not func._schema.is_mutable and all(one.untyped_storage()._cdata in known for one in written)
        if is_view or name.startswith(FREE) or name.endswith("set_"):
            return
        kind, operations, rate = _kind_of(name, read, str(func), vocabulary)
        moved = sum(min(one.numel() * one.element_size(), one.untyped_storage().nbytes()) for one in [*read, *written])
        if name in ("scatter_", "index_put_", "index_copy_", "index", "gather", "index_select", "embedding"):
            sizes = sorted(one.numel() * one.element_size() for one in [*read, *written])
            moved = 3 * sum(sizes[:-2])  # only what is picked
        seconds = max(operations / rate, moved / BANDWIDTH, LAUNCH)
        for measure, value in zip(MEASURES, (operations, moved, 1, 1e6 * seconds), strict=True):
            found[kind, measure] += value

    device.recorder = record
    try:
        yield found
    finally:
        device.recorder = None


def _read_and_written(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Any], list[Any]]:
    """List the tensors that a kernel reads and those that it writes, each once; what is only an output is not read."""
    import torch
    from torch.utils._pytree import tree_leaves

    read, written = [], tree_leaves(result)
    for place, argument in enumerate(func._schema.arguments):
        given = tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        read += [] if is_written and argument.is_out else given
        written += given if is_written else []
    tensors = ({id(one): one for one in listed if isinstance(one, torch.Tensor)} for listed in (read, written))
    return tuple(list(each.values()) for each in tensors)


def _kind_of(name: str, read: Sequence[Any], full_name: str, vocabulary: int) -> tuple[str, float, float]:
    """Name the kind of work, count its operations, and give the rate at which an H100 does them."""
    in_head = any(one.numel() % vocabulary == 0 and one.numel() >= 100 * vocabulary for one in read)
    if (product := name.removesuffix("_")) in PRODUCTS:
        a, b = read[PRODUCTS[product]], read[PRODUCTS[product] + 1]
        rate = PRODUCT_FLOAT32 if a.element_size() == 4 else PRODUCT
        return "head products" if in_head else "products", 2.0 * a.numel() * b.shape[-1], rate
    if "attn" in name or "attention" in name:
        is_backward = "backward" in name
        query = read[1] if is_backward else read[0]
        tokens = max(query.shape[0], query.shape[-2])
        operations = (5 if is_backward else 2) * query.numel() * tokens
        return "attention", float(operations), 40e12 if query.element_size() == 4 else ATTENTION
    if "fused_adam" in name:
        return "optimizer", 0.0, 1.0
    if full_name.startswith(("c10d", "fsdp")) or "split_with_sizes_copy" in name or "chunk_cat" in name:
        return "sharding", 0.0, 1.0
    return "head, other" if in_head else "other", 0.0, 1.0


if __name__ == "__main__":
    main()
