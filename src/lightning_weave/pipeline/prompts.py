"""prompts/: what the student is asked, from data of any kind or from the user's own trajectories."""

from dataclasses import asdict
from typing import Any

from lightning_weave.progress import Progress
from lightning_weave.prompts import build_prompts
from lightning_weave.runs.prompts import keep_prompts, own_trajectories
from lightning_weave.runs.steps import Steps


def run(steps: Steps, progress: Progress) -> None:
    """Build the prompts of this run unless they are up to date. Any rank may; all write the same."""
    stage = steps.store.stage(steps.prompts)
    if stage.state() == "done":
        stage.settle()  # of a run that was killed as it ended
        return
    if steps.recipe.rollout.from_ is not None:
        prompts = [group.as_prompt(steps.student.tokenizer) for group in own_trajectories(steps)]
        counts: dict[str, Any] = {"read": len(prompts) * steps.recipe.rollout.responses, "kept": len(prompts)}
    else:
        prompts, report = build_prompts(steps.student.tokenizer, **steps.recipe.prompts.model_dump())
        counts = asdict(report)
        progress.say(str(report))
    keep_prompts(steps, prompts, {"report": counts})
