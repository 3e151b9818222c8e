"""Weights & Biases and TensorBoard: curves of training, results of evaluation, figures of the report.

A policy has one run there, which later commands continue: W&B finds it by its id, TensorBoard by its directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError


class Tracker(Protocol):
    """Something that draws curves and shows figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def results(self, figures: Mapping[str, float]) -> None: ...

    def images(self, files: Mapping[str, Path]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tracked:
    """What one run of a tracker is of."""

    policy: str
    folder: Path  # where its files are
    id: str  # the same for every command about it
    start: int | None = None  # of training: updates that stay, whatever was logged after them


def open_trackers(recipe: Recipe, what: Tracked) -> list[Tracker]:
    """Open a run, or continue it, in every tracker that the recipe switches on."""
    opened: list[Tracker] = []
    for name in recipe.train.trackers:
        try:
            opened.append(TensorBoard(recipe, what) if name == "tensorboard" else WandB(recipe, what))
        except ImportError as error:
            raise InputError(f"train.trackers: {name} is not installed ({error}). pip install {name}") from None
    return opened


class TensorBoard:
    """Curves and figures in the policy's own folder."""

    def __init__(self, recipe: Recipe, what: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if what.start is None else what.start + 1
        self.writer: Any = SummaryWriter(str(what.folder / "tensorboard"), purge_step=purge)
        section = recipe.tracking
        words = {"name": _name(recipe, what), "project": section.project, "tags": ", ".join(section.tags)}
        for key, text in words.items():
            self.writer.add_text(key, text)

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

    def __init__(self, recipe: Recipe, what: Tracked) -> None:
        import wandb

        section = recipe.tracking
        self.wandb: Any = wandb
        self.run: Any = wandb.init(
            project=section.project,
            entity=section.entity,
            name=_name(recipe, what),
            group=recipe.name,
            tags=section.tags,
            id=what.id,
            resume="allow",
            config=recipe.model_dump(mode="json", by_alias=True, exclude_none=True),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self.run.starting_step:  # else the server has it, from before the resume
            self.run.log({f"train/{name}": value for name, value in figures.items()}, step=step)

    def results(self, figures: Mapping[str, float]) -> None:
        self.run.summary.update(dict(figures))

    def images(self, files: Mapping[str, Path]) -> None:
        self.run.log({name: self.wandb.Image(str(file)) for name, file in files.items()})

    def close(self) -> None:
        self.run.finish()


def _name(recipe: Recipe, what: Tracked) -> str:
    return recipe.tracking.name.format(run=recipe.name, policy=what.policy)
