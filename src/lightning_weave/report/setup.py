"""What a run was made of: models, compositions, hyperparameters, dates, versions and commands."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lightning_weave.config import PromptContext, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import duration
from lightning_weave.report.tables import MISSING
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.settings import TRAIN_EXECUTION
from lightning_weave.runs.steps import Steps

SECTIONS = ("prompts", "rollout", "reference", "score", "train", "eval")
EXECUTION = {"token_budget", "batch_size", "prompts_per_shard", "block", "python", "options", "parity", "unsafe_local"}
ELSEWHERE = {"objective", "benchmarks", "sources"}  # by composition, and in the table of results


@dataclass(frozen=True)
class Model:
    """One checkpoint and what it is for."""

    role: str
    name: str
    revision: str
    identity: str  # the beginning of its content's
    reads: str = ""  # what it is told, beside or in place of the prompt


@dataclass(frozen=True)
class Trained:
    """One composition."""

    name: str
    method: str
    weights: str
    alpha: str
    objective: str
    epochs: int


@dataclass(frozen=True)
class KeyValue:
    """A key of the recipe; `own` if it is not the default."""

    key: str
    value: str
    own: bool


@dataclass(frozen=True)
class StageRun:
    """When and on what a stage was made."""

    stage: str
    when: str
    device_time: str
    device: str
    versions: str


@dataclass(frozen=True)
class Setup:
    """Everything that someone needs to make the run again."""

    models: list[Model]
    compositions: list[Trained]
    settings: dict[str, list[KeyValue]]
    stages: list[StageRun]
    commands: list[tuple[str, str]]  # time, command
    recipe: str


def setup(steps: Steps, ledger: list[dict[str, Any]]) -> Setup:
    """Gather it from the recipe, the ledger and the log."""
    return Setup(
        models=_models(steps),
        compositions=[_trained(steps, name) for name in steps.recipe.compositions],
        settings={section: _settings(steps, section) for section in SECTIONS},
        stages=_stages(ledger),
        commands=_commands(steps),
        recipe=re.sub(r"^runs = .*\n", "", dump_recipe(steps.recipe), flags=re.MULTILINE),  # where, not what
    )


def hyperparameters(steps: Steps) -> dict[str, str]:
    """Name them as the paper does (tab. appendix-training-hyperparameters); where compositions differ, every value."""
    recipe = steps.recipe
    train = recipe.train
    rollout = recipe.rollout
    round_size = train.prompts_per_round * rollout.responses
    manifests = [steps.store.stage(steps.train(name)).manifest() or {} for name in recipe.compositions]
    updates = [manifest["updates"] for manifest in manifests if "updates" in manifest]
    alphas = [steps.alpha(name) for name in recipe.compositions]
    return {
        "Replay rounds": _each(str(-(-count // train.updates_per_round)) for count in updates) or MISSING,
        "Cached trajectories per round": f"{round_size:,}",
        "Training epochs": _each(str(steps.train_section(name).epochs) for name in recipe.compositions),
        "Maximum response length": f"{rollout.max_tokens:,}",
        "Rollout temperature": f"{rollout.temperature:g}",
        "Rollout top-p": f"{rollout.top_p:g}",
        "alpha": _each(f"{alpha:.4g}" for alpha in alphas if alpha is not None) or MISSING,
        "Global batch size": str(round_size // train.updates_per_round),
        "Learning rate": f"{train.learning_rate:g}",
        "LR schedule": train.decay + (f", {train.warmup} updates of warm-up" if train.warmup else ""),
        "Optimizer": "AdamW",
        "Adam betas": ", ".join(f"{beta:g}" for beta in train.betas),
        "Weight decay": f"{train.weight_decay:g}",
        "Gradient clipping": f"{train.clip:g}",
    }


def hyperparameter_lines(runs: Mapping[str, Steps], mark: str = "") -> list[list[str]]:
    """Write them as a table of texts, its header first: one column where all runs are alike, else one for each."""
    columns = {name: hyperparameters(steps) for name, steps in runs.items()}
    values = list(columns.values())
    if all(one == values[0] for one in values):
        columns = {"Value": values[0]}
    head = f"Hyperparameter ({mark})" if mark else "Hyperparameter"
    return [[head, *columns], *([key, *(column[key] for column in columns.values())] for key in values[0])]


def _models(steps: Steps) -> list[Model]:
    recipe = steps.recipe
    named = [("student", steps.student, PromptContext())]
    for anchor in recipe.anchors:
        for role in ROLES:
            named.append((f"{anchor}, {role}", steps.anchor(anchor, role), recipe.side(anchor, role).context))
    for policy, section in recipe.policies.items():
        named.append((policy, Checkpoint.of(section), PromptContext(system=section.system)))
    return [
        Model(role, one.name, one.revision or "", _identity(steps, one), _reads(context))
        for role, one, context in named
    ]


def _reads(context: PromptContext) -> str:
    """Say in what a model is asked otherwise than the student."""
    return "; ".join(f"{part}: {text}" for part, text in context.model_dump(exclude_none=True).items())


def _identity(steps: Steps, checkpoint: Checkpoint) -> str:
    try:
        return steps.identity_of(checkpoint)[:12]
    except InputError:  # it was never scored here, and is not here now
        return ""


def _trained(steps: Steps, name: str) -> Trained:
    composition = steps.recipe.compositions[name]
    alpha = steps.alpha(name)
    budget = getattr(composition, "kl_budget", None)
    words = ("" if alpha is None else f"{alpha:.4g}", "" if budget is None else f"for {budget:g} nats")
    return Trained(
        name=name,
        method=composition.method,
        weights="; ".join(f"{tag}: {_shares(shares)}" for tag, shares in composition.by_tag.items())
        or _shares(composition.used),
        alpha=" ".join(words).strip(),
        objective=steps.objective(name),
        epochs=steps.train_section(name).epochs,
    )


def _shares(weights: Mapping[str, float]) -> str:
    """Name the weights of anchors.

    >>> _shares({"acc": 2 / 3, "brief": 1 / 3})
    'acc 0.667, brief 0.333'
    """
    return ", ".join(f"{anchor} {weight:.3g}" for anchor, weight in weights.items())


def _settings(steps: Steps, section: str) -> list[KeyValue]:
    """List the keys that decide what a stage makes."""
    part = getattr(steps.recipe, section)
    left_out = EXECUTION | ELSEWHERE | (TRAIN_EXECUTION if section == "train" else set())
    defaults = {key: field.get_default(call_default_factory=True) for key, field in type(part).model_fields.items()}
    return [
        KeyValue(f"{section}.{key.rstrip('_')}", _shown(value), value != defaults[key])
        for key, value in part
        if key not in left_out and value not in (None, [], {})
    ]


def _shown(value: Any) -> str:
    """Write a value as people read it.

    >>> _shown(0.0005), _shown(True), _shown([0.9, 0.999]), _shown("hf")
    ('0.0005', 'true', '0.9, 0.999', 'hf')
    """
    match value:
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(_shown, value))
        case dict():
            return ", ".join(f"{key} = {_shown(item)}" for key, item in value.items())
        case float():
            return f"{value:g}"
        case _ if hasattr(value, "model_dump"):
            return _shown(value.model_dump(exclude_none=True))
        case _:
            return str(value)


def _stages(ledger: list[dict[str, Any]]) -> list[StageRun]:
    stages: dict[str, list[dict[str, Any]]] = {}
    for row in ledger:
        stages.setdefault(row["stage"], []).append(row)
    return [
        StageRun(
            stage=stage,
            when=_period([row["time"] - row["device_seconds"] for row in rows], [row["time"] for row in rows]),
            device_time=duration(sum(row["device_seconds"] for row in rows)),
            device=_each(row["device"] for row in rows),
            versions=_each(", ".join(f"{name} {version}" for name, version in row["versions"].items()) for row in rows),
        )
        for stage, rows in stages.items()
    ]


def _period(starts: Iterable[float], ends: Iterable[float]) -> str:
    """Say from when to when, in UTC.

    >>> _period([0.0], [60.0]), _period([0.0], [86400.0])
    ('1970-01-01 00:00 to 00:01', '1970-01-01 00:00 to 1970-01-02 00:00')
    """
    first, last = (datetime.fromtimestamp(time, UTC) for time in (min(starts), max(ends)))
    return f"{first:%Y-%m-%d %H:%M} to {last:{'%H:%M' if first.date() == last.date() else '%Y-%m-%d %H:%M'}}"


def _each(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def _commands(steps: Steps) -> list[tuple[str, str]]:
    """The commands that wrote to this run, from its log."""
    path = steps.store.run_dir / "log.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return re.findall(r"^(\S+ \S+) \$ (.*)$", text, flags=re.MULTILINE)
