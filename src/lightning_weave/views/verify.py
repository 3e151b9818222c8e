"""`lweave verify`: check every stored byte against the checksums that were written with it."""

from collections.abc import Iterator

from rich.console import Console

from lightning_weave.errors import CorruptData
from lightning_weave.progress import Progress
from lightning_weave.runs.known import neighbours, with_known
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage


def run(steps: Steps, progress: Progress, console: Console) -> None:
    """Verify all finished stages of the run, and say which file is damaged and what to do."""
    known = with_known(steps)
    stages = [known.store.stage(step) for step in known.everything()]
    stages += [other for stage in stages if stage.step.subject for other, _ in neighbours(stage)]
    finished = [stage for stage in stages if stage.manifest_path.exists()]
    of_legs = [(stage, of) for stage, of in _leg_stages(steps) if stage.manifest_path.exists()]
    problems = []
    with progress.bar("verify", len(finished) + len(of_legs), "stage") as bar:
        for stage in finished:
            problems += stage.verify()
            bar.advance()
        for stage, of in of_legs:
            remedy = f"Remove {of.folder} and train it again with: {of.step.command}"
            problems += [f"{path} {what}. {remedy}" for path, what in stage.damaged().items()]
            bar.advance()
    if problems:
        raise CorruptData("\n".join(problems))
    checked = [*finished, *(stage for stage, _ in of_legs)]
    files = sum(len((stage.manifest() or {}).get("shards", [])) for stage in checked)
    console.print(f"{files} files in {len(checked)} finished stages are as they were written.")


def _leg_stages(steps: Steps) -> Iterator[tuple[Stage, Stage]]:
    """The stages of the legs of sequences, each with the composition that it is of."""
    for name, composition in steps.recipe.compositions.items():
        if composition.method == "sequential" and steps.store.stage(steps.prompts).state() == "done":
            from lightning_weave.train.sequential import legs  # imports torch

            of = steps.store.stage(steps.train(name))
            yield from ((leg.steps.store.stage(step), of) for leg in legs(steps, name) for step in leg.made())
