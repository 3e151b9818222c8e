"""Count the attention kernels of an update on the fake device, on rows of different lengths.

A separate program, because the fake device needs one. `attention_kernels` starts it.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import fake_runs
from fake_runs import Setting, ask, trainings


def attention_kernels(setting: Setting, lengths: list[list[int]]) -> list[list[str]]:
    """Name the attention kernels of an update on rows of these lengths, packed; for each list of lengths."""
    return list(ask(__file__, {"setting": asdict(setting), "lengths": lengths}))


# What follows runs in the program.


def main() -> None:
    from transformers import masking_utils

    from fake_device import fake_device

    asked = json.load(sys.stdin)
    setting = Setting(**asked["setting"])
    masking_utils.is_tracing = lambda *arguments: False
    found: list[str] = []

    def record(func: Any, *rest: Any) -> None:
        if "attention" in str(func) or "varlen" in str(func):
            found.append(str(func))

    with fake_device() as device, trainings(setting, device) as update:
        device.recorder = record
        for lengths in asked["lengths"]:
            fake_runs.LENGTHS[:] = lengths
            found.clear()
            update(max(lengths), 1, len(lengths))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
