"""Training as it was computed, before anything was rounded to be written down."""

from dataclasses import dataclass, field

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.train import loop
from lightning_weave.train.loop import Metrics


@dataclass
class Computed:
    """The figures and gradients of each update, and the weights at the end."""

    figures: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_and_see(run: Run, name: str, progress: Progress) -> Computed:
    """Train the one composition of a run, and keep what the loop computes on its way."""
    seen, add, clip = Computed(), Metrics.add, loop.clip_gradients

    def add_figures(metrics: Metrics, step: int, figures: dict[str, float]) -> None:
        seen.figures.append(dict(figures))
        add(metrics, step, figures)

    def see_gradients(trainee: nn.Module, most: float) -> float:
        named = trainee.named_parameters()
        seen.gradients.append({name.removeprefix("model."): p.grad.clone() for name, p in named if p.grad is not None})
        return clip(trainee, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "add", add_figures)
        patch.setattr(loop, "clip_gradients", see_gradients)
        make_students(run, progress)
    seen.weights = load_file(run.directory / "train" / name / "final" / "model.safetensors")
    return seen
