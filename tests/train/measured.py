"""What one rank reads and holds while it opens, trains and exports a student; run in processes of their own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_weave.models.weights import Layout
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.store import write_json
from lightning_weave.train.data import compose
from lightning_weave.train.export import round_weights, write_model
from lightning_weave.train.loop import make_fit
from lightning_weave.train.parallel import join, local_shard, reshard
from lightning_weave.train.student import open_trainee
from train.cached import context


@dataclass
class Peak:
    """The most bytes that were held on top of what was there before."""

    bytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Follow every allocation of torch on the CPU, also those of collectives and inside of sharded tensors."""
    measured = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield measured
    held = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            measured.bytes = max(measured.bytes, held)


def measure(run: Run, dtype: torch.dtype, out: Path) -> None:
    """Open, train one update, export; write down what this rank read and what each of the three held at most."""
    read: list[int] = []
    plain = Layout.read

    def counted(self: Layout, wanted: Any) -> Any:
        for name, tensor in plain(self, wanted):
            read.append(tensor.nbytes)
            yield name, tensor

    Layout.read = counted  # type: ignore[method-assign]
    rows = open_cache(run, "both")
    with join(torch.device("cpu"), sharded=True) as ranks:
        with peak() as loading:
            trainee = open_trainee(run, context(ranks, dtype))
        with peak() as training:
            fit = make_fit(run, "both", trainee, rows, alpha=2.0, ranks=ranks)
            fit.update(1, [0, 1])
        reshard(trainee)
        kept = sum(local_shard(weight)[0].nbytes for weight in trainee.parameters())
        layout = run.student.layout
        with peak() as exporting:
            round_weights(trainee, layout.dtypes, [compose(rows.block([0]), rows.weights, 2.0)])
            write_model(out / "final", trainee, layout, "a card", ranks)
    figures = {"read": sum(read), "kept": kept, "loading": loading.bytes, "training": training.bytes}
    write_json(out / f"{os.environ.get('RANK', '0')}.json", {**figures, "exporting": exporting.bytes})
