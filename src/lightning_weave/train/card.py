"""The model card of a trained student: what it was made from, and how far training got."""

from pathlib import Path
from typing import Any

from lightning_weave import __version__
from lightning_weave.config import Composition, Joint, Sequential, Train, dump_recipe
from lightning_weave.runs.scored import Role
from lightning_weave.runs.steps import Steps
from lightning_weave.train.dose import anchor_doses

TAG = "tags: [lightning-weave]"


def model_card(steps: Steps, name: str, figures: dict[str, Any], evaluation: str = "", metadata: str = "") -> str:
    """State recipe, anchors, weights, alpha, cache fingerprint, figures and, if known, the evaluation.

    `metadata` is further YAML for the hub: licence, results.
    """
    recipe = steps.recipe
    composition = steps.recipe.compositions[name]
    student = recipe.student.model
    # The hub expects hub names here, not local directories.
    base = "" if Path(student).expanduser().is_dir() else f"base_model: {student}\n"
    doses = anchor_doses(composition, _alpha(composition, figures))
    anchors = "\n".join(
        f"| {anchor} | {weight:g} | {f'{doses[anchor]:.4g}' if anchor in doses else 'its own distribution'} | "
        f"{_side(steps, anchor, 'post')} | {_side(steps, anchor, 'pre')} |"
        for anchor, weight in composition.used.items()
    )
    by_tag = "".join(f"\nWeights of the tag `{tag}`: {shares}.\n" for tag, shares in composition.by_tag.items())
    mark = f"\n**This is a {recipe.mark}.**\n" if recipe.mark else ""
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(steps, name, figures).items())
    return f"""---
{base}library_name: transformers
pipeline_tag: text-generation
{TAG}
{metadata}---
# {recipe.name}: {name}
{mark}
`{student}` trained towards a composition of policy shifts with Lightning Weave {__version__}.

| anchor | weight | dose (weight / alpha) | post-trained | from |
| --- | --- | --- | --- | --- |
{anchors}
{by_tag}
| | |
| --- | --- |
{rows}
{evaluation}
The resolved recipe, defaults included:

```toml
{dump_recipe(recipe).strip()}
```
"""


def _side(steps: Steps, anchor: str, role: Role) -> str:
    side = steps.side(anchor, role)
    return f"`{side.checkpoint.name}`" + (f" with {side.context}".replace("|", "\\|") if side.context else "")


def _alpha(composition: Composition, figures: dict[str, Any]) -> float:
    """The alpha that training recorded; only the legs of a sequence record one."""
    alpha = figures.get("alpha", composition.alpha)
    assert alpha is not None, "what is trained has an alpha"
    return float(alpha)


def _method(composition: Composition) -> str:
    match composition:
        case Sequential():
            return f"{composition.method}, {' then '.join(composition.sequence)}"
        case Joint(refresh=parts) if parts > 1:
            return f"{composition.method}, on states of the current student in {parts} parts"
        case _:
            return composition.method


def _rate(train: Train) -> str:
    warmup = f", warm-up over {train.warmup} updates" if train.warmup else ""
    return f"{train.learning_rate:g}{warmup}" + (f", {train.decay} decay" if train.decay != "constant" else "")


def _facts(steps: Steps, name: str, figures: dict[str, Any]) -> dict[str, str]:
    recipe = steps.recipe
    composition = steps.recipe.compositions[name]
    measured = {
        "updates": ("updates", "{:g}"),
        "KL(target, behaviour)": ("target_kl", "{:.4f} nats per token"),
        "KL(behaviour, target), where training begins": ("start_kl", "{:.4f} nats per token"),
        "KL(student, target) at the last update": ("reverse_kl", "{:.4f} nats per token"),
        "KL(student, target) on held-out prompts": ("validation_reverse_kl", "{:.4f} nats per token"),
        "loss at zero shift before training": ("zero_shift_loss", "{:.1e}"),
        "positions kept at the last update": ("kept", "{:.1%}"),
        "KL(exported, trained)": ("export_kl", "{:.1e} nats per token"),
    }
    return {
        "method": _method(composition),
        "objective": steps.objective(name),
        "alpha": f"{_alpha(composition, figures):.4g}",
        "learning rate": _rate(recipe.train),
        **{what: form.format(figures[key]) for what, (key, form) in measured.items() if key in figures},
        "cache": f"`{steps.reference.fingerprint}`",
        "fingerprint": f"`{steps.train(name).fingerprint}`",
    }
