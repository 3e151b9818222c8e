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
    all_steps = with_known(steps)
    stages = [all_steps.store.stage(step) for step in all_steps.everything()]
    stages += [other for stage in stages if stage.step.subject for other, _ in neighbours(stage)]
    finished = [stage for stage in stages if stage.manifest_path.exists()]
    inner = [(stage, of) for stage, of in _inner_stages(steps) if stage.manifest_path.exists()]
    problems = []
    with progress.bar("verify", len(finished) + len(inner), "stage") as bar:
        for stage in finished:
            problems += stage.verify()
            bar.advance()
        for stage, of in inner:
            remedy = f"Remove {of.folder} and train it again with: {of.step.command}"
            problems += [f"{path} {what}. {remedy}" for path, what in stage.damaged().items()]
            bar.advance()
    if problems:
        raise CorruptData("\n".join(problems))
    checked = [*finished, *(stage for stage, _ in inner)]
    if not checked:
        console.print(f"{steps.store.run_dir}: nothing is finished yet, so there is nothing to check.", soft_wrap=True)
        return
    files = sum(len((stage.manifest() or {}).get("shards", [])) for stage in checked)
    console.print(f"{files} files in {len(checked)} finished stages are as they were written.")


def _inner_stages(steps: Steps) -> Iterator[tuple[Stage, Stage]]:
    """The stages of runs below a composition's folder: legs of sequences and later parts; each with its composition."""
    if steps.store.stage(steps.prompts).state() != "done":
        return
    for name, composition in steps.recipe.compositions.items():
        of = steps.store.stage(steps.train(name))
        if composition.method == "sequential":
            from lightning_weave.train.sequential import legs  # imports torch

            yield from ((leg.steps.store.stage(step), of) for leg in legs(steps, name) for step in leg.made())
        if composition.method == "joint" and composition.refresh > 1:
            from lightning_weave.train.refreshed import parts_of  # imports torch

            sampled = [part for part in parts_of(steps, name) if part.sampler.state() == "done"]
            yield from ((part.steps.store.stage(step), of) for part in sampled for step in part.made())
