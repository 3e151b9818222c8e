"""`lweave run`: bring every stale stage up to date, in order."""

from lightning_weave.progress import Progress
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import reference, rollout, score, train
from lightning_weave.stages.steps import Steps


def run(steps: Steps, progress: Progress) -> None:
    """Do what is missing; what is up to date is not touched."""
    if steps.recipe.compositions:
        rollout.run(steps, progress)
        reference.run(steps, progress)
        score.run(steps, progress)
        train.run(steps, progress)
    eval_stage.run(steps, progress)
