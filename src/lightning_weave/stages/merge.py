"""Merged policies: the student's weights plus weighted differences of anchors, made once per run directory."""

from lightning_weave.errors import InputError
from lightning_weave.models.merge import Difference, check_merge, merge
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_main_process
from lightning_weave.run import Run
from lightning_weave.store import whole_directory
from lightning_weave.store.ledger import measure


def differences_of(run: Run, policy: str, trained: bool = True) -> list[Difference]:
    """The differences that a merged policy adds; without `trained`, students that are not there yet are left out."""
    section = run.recipe.policies[policy]
    found = []
    for name in run.recipe.merged(policy):
        if name in run.recipe.compositions and not (trained or run.stage("train", name).complete):
            continue
        if name in run.recipe.anchors:
            post = run.anchor(name, "post")
            pre = run.student if section.merge == "linear" else run.anchor(name, "pre")
        else:
            post, pre = run.policy(name), run.student
        found.append(Difference(f"policies.{policy}.weights.{name}", section.weights[name], post, pre))
    return found


def check_policy(run: Run, policy: str) -> None:
    """Refuse a merge of models whose shapes or vocabularies differ, before anything is made."""
    section = run.recipe.policies[policy]
    assert section.merge is not None, policy
    check_merge(run.student, differences_of(run, policy, trained=False), section.merge)


def make_merge(run: Run, policy: str, progress: Progress) -> None:
    """Write the merged weights of a policy if they are not there. Atomic: a killed merge starts again."""
    section = run.recipe.policies[policy]
    stage = run.stage("merge", policy)
    if stage.complete or not is_main_process():
        stage.require()  # other ranks wait
        stage.settle()
        return
    assert section.merge is not None, policy
    differences = differences_of(run, policy)
    try:
        with measure(run.directory, "merge", policy, fingerprint=stage.fingerprint):
            with whole_directory(stage.folder / "final") as out:
                merge(run.student, differences, section.merge, section.density or 0.5, out)
            stage.record([path for path in sorted((stage.folder / "final").iterdir()) if path.is_file()])
    except InputError:
        if stage.folder.is_dir() and not any(stage.folder.iterdir()):
            stage.folder.rmdir()
        raise
    progress.say(f"{stage.path}: {section.merge}, {len(differences)} differences")
