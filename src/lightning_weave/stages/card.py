"""The model card of a trained student: what it was made from, and how far training got."""

from typing import Any

from lightning_weave import __version__
from lightning_weave.stages.steps import Steps


def model_card(steps: Steps, name: str, figures: dict[str, Any]) -> str:
    """State recipe, anchors, weights, alpha, cache fingerprint and figures."""
    recipe, composition, step = steps.recipe, steps.recipe.compositions[name], steps.train(name)
    anchors = "\n".join(
        f"| {anchor} | {weight:g} | {weight / composition.alpha:g} | `{recipe.anchors[anchor].post}` | "
        f"`{recipe.anchors[anchor].pre}` |"
        for anchor, weight in composition.weights.items()
    )
    return f"""---
base_model: {recipe.student.model}
library_name: transformers
pipeline_tag: text-generation
tags: [lightning-weave]
---
# {recipe.name}: {name}

`{recipe.student.model}` trained towards a composition of policy shifts with Lightning Weave {__version__}.

| anchor | weight | dose (weight / alpha) | post-trained | from |
| --- | --- | --- | --- | --- |
{anchors}

| | |
| --- | --- |
| objective | {composition.objective or recipe.train.objective} |
| alpha | {composition.alpha:g} |
| updates | {figures["updates"]} |
| learning rate | {recipe.train.learning_rate:g} |
| reverse KL to the target at the last update | {figures.get("reverse_kl", float("nan")):.4f} nats per token |
| positions kept | {100 * figures.get("kept", float("nan")):.1f} % |
| KL(exported, trained) | {figures["export_kl"]:.1e} nats per token |
| cache | `{steps.reference.fingerprint}` |
| fingerprint | `{step.fingerprint}` |

The resolved recipe is `recipe.toml` of the run.
"""
