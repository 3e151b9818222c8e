"""`lweave verify`: check every stored byte against the checksums that were written with it."""

from rich.console import Console

from lightning_weave.errors import CorruptData
from lightning_weave.progress import Progress
from lightning_weave.stages.steps import Steps


def run(steps: Steps, progress: Progress, console: Console) -> None:
    """Verify all finished stages, and say which file is damaged and what to do."""
    stages = [steps.store.stage(step) for step in steps.everything()]
    finished = [stage for stage in stages if stage.manifest_path.exists()]
    problems = []
    with progress.bar("verify", len(finished), "stage") as bar:
        for stage in finished:
            problems += stage.verify()
            bar.advance()
    if problems:
        raise CorruptData("\n".join(problems))
    files = sum(len((stage.manifest() or {}).get("shards", [])) for stage in finished)
    console.print(f"{files} files in {len(finished)} finished stages are as they were written.")
