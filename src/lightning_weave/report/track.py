"""Results and figures for the trackers that a recipe switches on."""

from pathlib import Path

from lightning_weave.report.results import result_rows, summaries
from lightning_weave.runs.steps import Steps
from lightning_weave.store.identity import fingerprint
from lightning_weave.trackers import Tracked, open_trackers

REPORT = "report"


def track_evaluation(steps: Steps, policy: str) -> None:
    """Log what is known of a policy now, where its training was logged."""
    if not steps.recipe.train.trackers:
        return
    (row,) = [row for row in result_rows(steps, summaries(steps)) if row.policy == policy]
    figures = {f"eval/{score.benchmark}/accuracy": score.accuracy for score in row.scores}
    figures |= {f"eval/{score.benchmark}/tokens": score.tokens for score in row.scores}
    if row.scores:
        figures |= {"eval/accuracy": row.accuracy, "eval/tokens": row.tokens}
    figures |= {"eval/aes": row.aes} if row.aes is not None else {}
    figures |= {f"eval/{task.task}/{task.metric}": task.value for task in row.tasks}
    for tracker in open_trackers(steps.recipe, _tracked(steps, policy)):
        tracker.results({name: value for name, value in figures.items() if value == value})  # NaN: not measured
        tracker.close()


def track_figures(steps: Steps, folder: Path) -> None:
    """Log the figures of a report, in a run of its own."""
    files = sorted((folder / "figures").glob("*.png"))
    for tracker in open_trackers(steps.recipe, _tracked(steps, REPORT)) if files else ():
        tracker.images({file.stem: file for file in files})
        tracker.close()


def _tracked(steps: Steps, policy: str) -> Tracked:
    """The tracker's run of a policy: a composition's is that of its training."""
    if policy in steps.recipe.compositions:
        stage = steps.store.stage(steps.train(policy))
        return Tracked(policy, stage.folder, stage.step.fingerprint)
    folder = steps.store.run_dir / (policy if policy == REPORT else f"eval/{policy}")
    what = {"run": steps.recipe.name, "student": steps.identity_of(steps.student), "policy": policy}
    return Tracked(policy, folder, fingerprint(what))
