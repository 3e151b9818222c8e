"""`lweave run`: bring every missing or stale stage up to date, in order."""

from lightning_weave.pipeline.flow import make_everything
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, do_here
from lightning_weave.train.export import check_lora


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Make what is missing."""
    _check_lora(steps)
    make_everything(steps, progress, do)


def _check_lora(steps: Steps) -> None:
    """Refuse LoRA settings that do not fit the student before anything is sampled."""
    recipe = steps.recipe
    is_trained = all(steps.store.stage(steps.train(name)).state() == "done" for name in recipe.compositions)
    if recipe.train.lora is not None and not is_trained:
        check_lora(steps.student, recipe.train.lora)
