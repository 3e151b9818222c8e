"""Weights & Biases, trackio and TensorBoard: curves of training, results of evaluation, figures of the report.

A policy has one run there, which later commands continue: W&B finds it by its id, trackio by its name, TensorBoard by
its directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError
from lightning_weave.run import DUMP


@dataclass(frozen=True)
class TrackedRun:
    """The policy that a tracker's run belongs to."""

    policy: str
    folder: Path  # where its files are
    id: str  # the same for every command about it
    start: int | None = None  # the update that training continues from; later ones are purged


def open_trackers(recipe: Recipe, run: TrackedRun) -> "list[TensorBoard | WandB]":
    """Open a run, or continue it, in every tracker that the recipe switches on."""
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
    opened: list[TensorBoard | WandB] = []
    for name in recipe.train.trackers:
        try:
            opened.append(kinds[name](recipe, run))
        except ImportError as error:
            raise InputError(f"train.trackers: {name} is not installed ({error}). pip install {name}") from None
    return opened


class TensorBoard:
    """Curves and figures in the policy's folder."""

    def __init__(self, recipe: Recipe, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.start is None else run.start + 1
        self.writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        for key, value in _arguments(recipe, run).items():
            self.writer.add_text(key, ", ".join(value) if isinstance(value, list) else str(value))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"train/{name}", value, step)
        self.writer.flush()

    def results(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value)

    def images(self, files: Mapping[str, Path]) -> None:
        from matplotlib.image import imread

        for name, file in files.items():
            self.writer.add_image(name, imread(file), dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Curves and figures on a server, or in ./wandb with WANDB_MODE=offline."""

    def __init__(self, recipe: Recipe, run: TrackedRun) -> None:
        import wandb

        self.library: Any = wandb
        config = recipe.model_dump(**DUMP)
        self.run: Any = wandb.init(id=run.id, resume="allow", config=config, **_arguments(recipe, run))
        self.start: int = self.run.starting_step

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self.start:  # else the server has it, from before the resume
            self.run.log({f"train/{name}": value for name, value in figures.items()}, step=step)

    def results(self, figures: Mapping[str, float]) -> None:
        self.run.summary.update(dict(figures))

    def images(self, files: Mapping[str, Path]) -> None:
        self.run.log({name: self.library.Image(str(file)) for name, file in files.items()})

    def close(self) -> None:
        self.run.finish()


class Trackio(WandB):
    """Curves and figures in trackio's folder, or on a Space of the hub (private unless [tracking] says otherwise)."""

    def __init__(self, recipe: Recipe, run: TrackedRun) -> None:
        import trackio

        words = {"private": True, **_arguments(recipe, run)}
        known = {key: words[key] for key in ("project", "name", "group", "space_id", "private") if key in words}
        known["name"] += f"@{run.id[:8]}"  # trackio continues a run by its name alone
        self.library = trackio
        self.run = trackio.init(config=recipe.model_dump(**DUMP), resume="allow", embed=False, **known)
        self.start = getattr(self.run, "_next_step", 0)

    def results(self, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures))


def _arguments(recipe: Recipe, run: TrackedRun) -> dict[str, Any]:
    """The name of a tracked run: [tracking] over the defaults."""
    words = {"project": "lightning-weave", "name": "{run}/{policy}", "group": recipe.name, **recipe.tracking}
    return {**words, "name": words["name"].format(run=recipe.name, policy=run.policy)}
