"""Weights & Biases and TensorBoard: curves of training, results of evaluation, figures of the report.

A policy has one run there, which later commands continue: W&B finds it by its id, TensorBoard by its directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError


@dataclass(frozen=True)
class TrackedRun:
    """The policy that a tracker's run belongs to."""

    policy: str
    folder: Path  # where its files are
    id: str  # the same for every command about it
    start: int | None = None  # the update that training continues from; later ones are purged


def open_trackers(recipe: Recipe, run: TrackedRun) -> "list[TensorBoard | WandB]":
    """Open a run, or continue it, in every tracker that the recipe switches on."""
    opened: list[TensorBoard | WandB] = []
    for name in recipe.train.trackers:
        try:
            opened.append(TensorBoard(recipe, run) if name == "tensorboard" else WandB(recipe, run))
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

        config = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.wandb: Any = wandb
        self.run: Any = wandb.init(id=run.id, resume="allow", config=config, **_arguments(recipe, run))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self.run.starting_step:  # else the server has it, from before the resume
            self.run.log({f"train/{name}": value for name, value in figures.items()}, step=step)

    def results(self, figures: Mapping[str, float]) -> None:
        self.run.summary.update(dict(figures))

    def images(self, files: Mapping[str, Path]) -> None:
        self.run.log({name: self.wandb.Image(str(file)) for name, file in files.items()})

    def close(self) -> None:
        self.run.finish()


def _arguments(recipe: Recipe, run: TrackedRun) -> dict[str, Any]:
    """The name of a tracked run: [tracking] over the defaults."""
    words = {"project": "lightning-weave", "name": "{run}/{policy}", "group": recipe.name, **recipe.tracking}
    return {**words, "name": words["name"].format(run=recipe.name, policy=run.policy)}
