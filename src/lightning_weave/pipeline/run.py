"""`lweave run`: bring every missing or stale stage up to date, in order."""

from lightning_weave.pipeline.flow import make_everything
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, do_here


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Make what is missing."""
    make_everything(steps, progress, do)
