"""The paper's table of training hyperparameters (tab. appendix-training-hyperparameters), with the values of a run."""

from collections.abc import Iterable, Mapping

from lightning_weave.report.tables import MISSING
from lightning_weave.runs.steps import Steps


def hyperparameters(steps: Steps) -> dict[str, str]:
    """Name them as the paper does; where compositions differ, every value."""
    recipe, train, rollout = steps.recipe, steps.recipe.train, steps.recipe.rollout
    round_size = train.prompts_per_round * rollout.responses
    manifests = [steps.store.stage(steps.train(name)).manifest() or {} for name in recipe.compositions]
    updates = [made["updates"] for made in manifests if "updates" in made]
    alphas = [steps.alpha(name) for name in recipe.compositions]
    return {
        "Replay rounds": _each(-(-count // train.updates_per_round) for count in updates),
        "Cached trajectories per round": f"{round_size:,}",
        "Training epochs": _each(steps.train_section(name).epochs for name in recipe.compositions),
        "Maximum response length": f"{rollout.max_tokens:,}",
        "Rollout temperature": f"{rollout.temperature:g}",
        "Rollout top-p": f"{rollout.top_p:g}",
        "alpha": _each(f"{alpha:.4g}" for alpha in alphas if alpha is not None),
        "Global batch size": str(round_size // train.updates_per_round),
        "Learning rate": f"{train.learning_rate:g}",
        "LR schedule": train.decay + (f", {train.warmup} updates of warm-up" if train.warmup else ""),
        "Optimizer": "AdamW",
        "Adam betas": ", ".join(f"{beta:g}" for beta in train.betas),
        "Weight decay": f"{train.weight_decay:g}",
        "Gradient clipping": f"{train.clip:g}",
    }


def table_lines(runs: Mapping[str, Steps], mark: str = "") -> list[list[str]]:
    """Write the table as texts, its header first: one column where all runs are alike, else one for each."""
    columns = {name: hyperparameters(steps) for name, steps in runs.items()}
    values = list(columns.values())
    if all(one == values[0] for one in values):
        columns = {"Value": values[0]}
    head = f"Hyperparameter ({mark})" if mark else "Hyperparameter"
    return [[head, *columns], *([key, *(column[key] for column in columns.values())] for key in values[0])]


def _each(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values))) or MISSING
