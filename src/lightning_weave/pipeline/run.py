"""`lweave run`: bring every stale stage up to date, in order."""

import os
import time

from lightning_weave.checks.models import config_at
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline import reference, rollout, score, train
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, do_here
from lightning_weave.store import Step
from lightning_weave.train.export import check_lora


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Do what is missing; what is up to date is not touched. `do` may hand shards out; training happens here."""
    _check_lora(steps)
    if steps.recipe.compositions and steps.needs_cache:
        rollout.run(steps, progress, do)
        _wait_for([steps.rollout], steps)
        reference.run(steps, progress, do)
        _wait_for([steps.reference], steps)
        score.run(steps, progress, do=do)
        _wait_for([steps.score(scored) for scored in steps.score_names], steps)
    if steps.recipe.compositions:
        train.run(steps, progress)
    eval_stage.run(steps, progress, do=do)


def _check_lora(steps: Steps) -> None:
    """Refuse LoRA settings that do not fit the student before anything is sampled."""
    recipe = steps.recipe
    is_trained = all(steps.store.stage(steps.train(name)).state() == "done" for name in recipe.compositions)
    if recipe.train.lora is not None and not is_trained:
        trust = recipe.student.trust_remote_code
        check_lora(config_at(steps.student_path, trust), recipe.train.lora, trust)


def _wait_for(made: list[Step], steps: Steps) -> None:
    """Let the other ranks finish their shards. They need no collectives for it: they meet on disk."""
    while int(os.environ.get("WORLD_SIZE", "1")) > 1 and any(
        steps.store.stage(step).state() != "done" for step in made
    ):
        time.sleep(0.2)
