"""Count where the host waits for the fake device: while it trains, scores and samples with models of full width.

A separate program, because the fake device needs one. `count_waits` starts it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from fake_runs import Setting, ask, load, scorings, trainings, vocabulary
from lightning_weave.types import Request, SamplingSettings

TOKENS = 64  # of a row, or of a prompt


def count_waits(setting: Setting, sizes: list[int]) -> list[list[str]]:
    """Name the waits of updates of so many micro-batches, of so many scored rows, or of responses of so many tokens."""
    return list(ask(__file__, {"setting": asdict(setting), "sizes": sizes}))


# What follows runs in the program.


def main() -> None:
    from torch import Tensor
    from transformers import masking_utils

    from fake_device import fake_device
    from lightning_weave.models import packing
    from lightning_weave.train import loop

    asked = json.load(sys.stdin)
    setting = Setting(**asked["setting"])
    masking_utils.is_tracing = lambda *arguments: False
    loop.supports_async_copy = packing.supports_async_copy = lambda device: True
    kinds: dict[str, Callable[..., AbstractContextManager]] = {
        "train": packed_trainings,
        "sample": samplings,
        "refill": refillings,
    }
    with fake_device() as device:
        Tensor.pin_memory = device.pin  # type: ignore[method-assign, assignment]
        with kinds.get(setting.stage, scorings)(setting, device) as work:
            work(TOKENS, 1)  # what is made once
            for size in asked["sizes"]:
                device.waits.clear()
                work(TOKENS, size)
                print(json.dumps(device.waits), flush=True)


@contextmanager
def packed_trainings(setting: Setting, device: Any) -> Iterator[Callable[[int, int], object]]:
    """Load a student; give what updates it on micro-batches of three rows."""
    with trainings(setting, device) as update:
        yield lambda tokens, micro_batches: update(tokens, micro_batches, rows=3)


@contextmanager
def samplings(setting: Setting, device: Any) -> Iterator[Callable[[int, int], object]]:
    """Load a sampler; give what draws so many tokens after a prompt, twice at once."""
    import torch

    from lightning_weave.models.sampler import HFSampler
    from lightning_weave.types import Response

    class Endless(HFSampler):
        """Responses without their ends, which a device without numbers does not know."""

        def responses(self, tokens: list[list[int]], *rest: Any) -> list[Response]:
            return [Response(ids, "length") for ids in tokens]

    tolist = torch.Tensor.tolist

    def endless(tensor: torch.Tensor) -> Any:
        """Say that all rows are running and none is broken: a device without numbers would say that all have ended."""
        values = tolist(tensor)
        return [[True] * len(values[0]), [False] * len(values[0])] if tensor.dtype == torch.bool else values

    torch.Tensor.tolist = endless
    torch.unique = lambda rows, **_: (rows, torch.arange(len(rows), device=rows.device))  # it needs numbers, once
    sampler = Endless(load(setting, device), frozenset({1}), vocabulary(setting))
    yield lambda tokens, drawn: sampler.sample(*_requests(tokens, drawn, 2))


@contextmanager
def refillings(setting: Setting, device: Any) -> Iterator[Callable[[int, int], object]]:
    """Load a sampler; give what draws so many tokens after eight prompts, four at once."""
    from lightning_weave.models import sampler as hf_refill
    from lightning_weave.types import Response

    class Ending(hf_refill.RunningRows):
        """Rows that end when they are full: a device without numbers never says so."""

        def step(self) -> None:
            super().step()
            self.steps = getattr(self, "steps", 0) + 1

        def synchronize(self) -> list[int]:
            super().synchronize()
            return self.rows if self.steps % self.settings.max_tokens == 0 else []

    class Refilling(hf_refill.RefillingSampler):
        def responses(self, tokens: list[list[int]], *rest: Any) -> list[Response]:
            return [Response(ids, "length") for ids in tokens]

    hf_refill.RunningRows = Ending  # type: ignore[misc]
    sampler = Refilling(load(setting, device), frozenset({1}), vocabulary(setting), batch_size=4)
    yield lambda tokens, drawn: sampler.sample(*_requests(tokens, drawn, 8))


def _requests(tokens: int, drawn: int, rows: int) -> tuple[list[Request], SamplingSettings]:
    requests = [Request([0] * tokens, number, 0) for number in range(rows)]
    return requests, SamplingSettings(1.0, 0.9, drawn, seed=0)


if __name__ == "__main__":
    main()
