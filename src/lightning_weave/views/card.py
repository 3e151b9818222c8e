"""`lweave card`: a trained student as a directory that is ready for the hub, its evaluation on the card."""

import shutil
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData, metadata_load

from lightning_weave.bench.definitions import KNOWN
from lightning_weave.config import dump_recipe, slug
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.results import policy_rows, summaries
from lightning_weave.report.tables import legend, markdown
from lightning_weave.runs.known import with_known
from lightning_weave.runs.steps import Steps
from lightning_weave.store import make_directory, whole_directory
from lightning_weave.train.card import TAG, model_card


def run(steps: Steps, composition: str, out: Path | None, progress: Progress) -> Path:
    """Copy final/ with a card that has the evaluation, and the recipe; whole or not at all."""
    steps = with_known(steps)
    if composition not in steps.recipe.compositions:
        names = ", ".join(steps.recipe.compositions) or "none"
        raise InputError(f"--composition {composition}: no such composition; this run has {names}")
    stage = steps.store.stage(steps.train(composition))
    figures = stage.require()
    target = out or steps.store.run_dir / "publish" / composition
    _check_target(target)
    make_directory(target.parent, f"--out {target}")
    card = model_card(steps, composition, figures, evaluation(steps, composition), metadata(steps, composition))
    with whole_directory(target) as unfinished:
        shutil.copytree(stage.folder / "final", unfinished, dirs_exist_ok=True)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        (unfinished / "recipe.toml").write_text(dump_recipe(steps.recipe), encoding="utf-8")
    mark = steps.recipe.mark
    progress.say(f"{target}: " + (f"a {mark}" if mark else f"ready. Publish it with: hf upload OWNER/NAME {target}"))
    return target


def evaluation(steps: Steps, composition: str) -> str:
    """Write the table of this student and its base, and how both were sampled."""
    results = summaries(steps)
    if composition not in results:
        return f"\nNot evaluated yet (`lweave eval RECIPE --only {composition}`).\n"
    shown = {name: results[name] for name in ("base", composition) if name in results}
    protocol = "; ".join(
        f"{result.label}: {len(result.problems)} problems, "
        + ", ".join(f"{key} {value}" for key, value in result.settings.items())
        for result in results[composition]
    )
    rows = policy_rows(shown, group=steps.recipe.mark)
    return f"\n## Evaluation\n\n{markdown(rows).strip()}\n\n{legend(rows)}\n\n{protocol}.\n"


def metadata(steps: Steps, composition: str) -> str:
    """Write what the hub reads: the student's licence, which its descendants inherit, and the results."""
    readme = steps.student.light_path / "README.md"
    try:
        header = (metadata_load(readme) if readme.is_file() else None) or {}
    except ValueError:  # not the YAML of a card
        header = {}
    licence = {key: header[key] for key in ("license", "license_name", "license_link") if key in header}
    results = [] if steps.recipe.mark else summaries(steps).get(composition, [])
    measured = [
        EvalResult(
            task_type="text-generation",
            dataset_type=KNOWN[result.benchmark].repo if result.benchmark in KNOWN else slug(result.label),
            dataset_name=result.label,
            metric_type="accuracy",
            metric_value=round(result.accuracy, 2),
            metric_name=f"accuracy in %, mean of {result.samples} samples per problem",
        )
        for result in results
    ]
    if measured:
        data = ModelCardData(**licence, model_name=f"{steps.recipe.name}-{composition}", eval_results=measured)
    else:
        data = ModelCardData(**licence)
    return f"{data.to_yaml()}\n" if licence or measured else ""


def _check_target(target: Path) -> None:
    """Replace only what an earlier call has made: a checkpoint and its recipe under our card, no folder but LoRA's."""
    if not target.exists():
        return
    card = target / "README.md"
    ours = all((target / name).is_file() for name in ("config.json", "recipe.toml")) and card.is_file()
    if (
        not ours
        or TAG not in card.read_text(encoding="utf-8", errors="replace")
        or any(path.is_dir() and path.name != "adapter" for path in target.iterdir())
    ):
        raise InputError(f"--out {target}: exists and was not made by this command. Name another directory")
