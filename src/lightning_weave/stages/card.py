"""The model card of a trained student: what it was made from, and how far training got."""

from pathlib import Path
from typing import Any

from lightning_weave import __version__
from lightning_weave.config import dump_recipe
from lightning_weave.stages.steps import Steps


def model_card(steps: Steps, name: str, figures: dict[str, Any]) -> str:
    """State recipe, anchors, weights, alpha, cache fingerprint and figures."""
    recipe, composition = steps.recipe, steps.recipe.compositions[name]
    student = recipe.student.model
    # The hub wants names of its own here, not directories of somebody's disk.
    base = "" if Path(student).expanduser().is_dir() else f"base_model: {student}\n"
    anchors = "\n".join(
        f"| {anchor} | {weight:g} | {weight / composition.alpha:g} | `{recipe.anchors[anchor].post}` | "
        f"`{recipe.anchors[anchor].pre}` |"
        for anchor, weight in composition.weights.items()
    )
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(steps, name, figures).items())
    return f"""---
{base}library_name: transformers
pipeline_tag: text-generation
tags: [lightning-weave]
---
# {recipe.name}: {name}

`{student}` trained towards a composition of policy shifts with Lightning Weave {__version__}.

| anchor | weight | dose (weight / alpha) | post-trained | from |
| --- | --- | --- | --- | --- |
{anchors}

| | |
| --- | --- |
{rows}

The recipe, with everything that it left unsaid:

```toml
{dump_recipe(recipe).strip()}
```
"""


def _facts(steps: Steps, name: str, figures: dict[str, Any]) -> dict[str, str]:
    recipe, composition = steps.recipe, steps.recipe.compositions[name]
    facts = {
        "objective": composition.objective or recipe.train.objective,
        "alpha": f"{composition.alpha:g}",
        "updates": f"{figures['updates']:g}",
        "learning rate": f"{recipe.train.learning_rate:g}",
        "loss at zero shift before training": f"{figures['zero_shift_loss']:.1e}",
        "reverse KL to the target at the last update": f"{figures['reverse_kl']:.4f} nats per token",
        "positions kept at the last update": f"{100 * figures['kept']:.1f} %",
        "KL(exported, trained)": f"{figures['export_kl']:.1e} nats per token",
        "cache": f"`{steps.reference.fingerprint}`",
        "fingerprint": f"`{steps.train(name).fingerprint}`",
    }
    if "validation_reverse_kl" in figures:
        facts["reverse KL to the target on held-out prompts"] = f"{figures['validation_reverse_kl']:.4f} nats per token"
    return facts
