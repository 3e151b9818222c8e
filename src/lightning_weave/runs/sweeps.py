"""The settings of a sweep: named, matched with those of the recipe, and remembered in the run directory."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from lightning_weave.config import ALPHA, DEFAULT_TAG, Composition, Joint, Recipe, anchors_of, check_recipe
from lightning_weave.errors import InputError
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic

FILE = "sweep.toml"  # a recipe of compositions only: it can be given to any command after the recipe itself


@dataclass(frozen=True)
class Planned:
    """One setting of a sweep; `known` if the recipe has it already, under this name."""

    name: str
    composition: Composition
    known: bool


def plan_sweep(
    recipe: Recipe,
    shares: Sequence[float],
    anchor: str | None = None,
    alphas: Sequence[float] | None = None,
    tag: str | None = None,
) -> list[Planned]:
    """Name every setting: a share of one anchor, the rest of the weight in equal parts to the others, and an alpha.

    With a tag, only its weights vary, in the first composition that has weights by tag.
    """
    if not shares:
        raise InputError("--shares is empty; give numbers from 0 to 1, for example --shares 0.25,0.5,0.75")
    if wrong := [share for share in shares if not 0 <= share <= 1]:
        raise InputError(f"--shares {wrong[0]:g}: a share is a number from 0 to 1")
    if wrong := [alpha for alpha in alphas or () if not 0 < alpha < float("inf")]:
        raise InputError(f"--alphas {wrong[0]:g}: alpha must be greater than 0")
    if len(recipe.anchors) < 2:
        raise InputError(
            f"a sweep needs two anchors or more to divide the weight; this recipe has {len(recipe.anchors)}"
        )
    chosen = anchor if anchor is not None else list(recipe.anchors)[-1]
    if chosen not in recipe.anchors:
        raise InputError(f"--anchor {chosen}: no such anchor; this recipe has {', '.join(recipe.anchors)}")
    routed = _routed(recipe, tag) if tag is not None else None
    planned: dict[str, Planned] = {}
    for alpha in alphas or (_usual_alpha(recipe),):
        for share in shares:
            one = _plan_one(recipe, chosen, share, alpha, name_alpha=bool(alphas), tag=tag, routed=routed)
            planned.setdefault(one.name, one)
    return list(planned.values())


def _usual_alpha(recipe: Recipe) -> float:
    """The alpha that all compositions of the recipe share, else the paper's."""
    used = {one.alpha for one in recipe.compositions.values() if one.method == "joint" and one.alpha is not None}
    return used.pop() if len(used) == 1 else ALPHA


def _routed(recipe: Recipe, tag: str) -> Joint:
    """Find the composition whose weights of one tag are to vary."""
    compositions = [one for one in recipe.compositions.values() if isinstance(one, Joint) and one.routes]
    if not compositions:
        raise InputError(f"--tag {tag}: no composition of this recipe has weights by tag")
    if tag not in compositions[0].by_tag:
        raise InputError(f"--tag {tag}: no such tag in its weights; there are {', '.join(compositions[0].by_tag)}")
    return compositions[0]


def _plan_one(
    recipe: Recipe,
    anchor: str,
    share: float,
    alpha: float,
    *,
    name_alpha: bool,
    tag: str | None,
    routed: Joint | None,
) -> Planned:
    others = [name for name in recipe.anchors if name != anchor]
    weights = {**dict.fromkeys(others, (1 - share) / len(others)), anchor: share}
    ordered = {one: weights[one] for one in recipe.anchors}
    name = f"{anchor}-{_share_text(share)}" + f"-alpha-{alpha:g}" * name_alpha
    composition = Joint(weights=ordered, alpha=float(alpha))
    if routed is not None and tag is not None:
        by_tag = {**routed.by_tag, tag: ordered}
        plain = by_tag.pop(DEFAULT_TAG, {})
        composition = Joint(weights=plain, routes=by_tag, alpha=float(alpha))
        name = f"{tag}-{name}"
    for old_name, existing in recipe.compositions.items():
        if _same(existing, composition):
            return Planned(old_name, existing, True)
    if name in recipe.compositions or name in recipe.policies:
        raise InputError(f"{name} is the name of something else in this recipe; rename that")
    return Planned(name, composition, False)


def _share_text(share: float) -> str:
    """Three digits, or as many as it takes to tell shares apart.

    >>> _share_text(0.25), _share_text(0.0625)
    ('0.250', '0.0625')
    """
    return f"{share:.3f}" if round(share, 3) == share else repr(share)


def _same(one: Composition, two: Composition) -> bool:
    names = {*one.weights, *two.weights}
    if one.routes or two.routes:
        return one.model_dump() == two.model_dump()
    near = all(abs(one.weights.get(name, 0.0) - two.weights.get(name, 0.0)) < 1e-9 for name in names)
    return near and one.model_dump(exclude={"weights"}) == two.model_dump(exclude={"weights"})


def remember(steps: Steps, plan: Sequence[Planned]) -> None:
    """Write the new settings beside the run, so that a later report or sweep knows them."""
    write_atomic(steps.store.run_dir / FILE, tomli_w.dumps({"compositions": _with(steps, plan)}).encode())


def extend(steps: Steps, plan: Sequence[Planned]) -> Steps:
    """Add the settings of a sweep to the recipe."""
    return _extend(steps, _with(steps, plan))


def _with(steps: Steps, plan: Sequence[Planned]) -> dict[str, Any]:
    new = {one.name: one.composition.model_dump(mode="json", exclude_defaults=True) for one in plan if not one.known}
    return {**_kept(steps), **new}


def with_sweep(steps: Steps) -> Steps:
    """Add what earlier sweeps of this run have made."""
    return _extend(steps, _kept(steps))


def _kept(steps: Steps) -> dict[str, Any]:
    path: Path = steps.store.run_dir / FILE
    if not path.exists():
        return {}
    try:
        compositions: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("compositions", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: broken TOML ({error}). Remove it and sweep again: what was trained is kept"
        ) from None
    return {name: one for name, one in compositions.items() if anchors_of(one) <= set(steps.recipe.anchors)}


def _extend(steps: Steps, compositions: dict[str, Any]) -> Steps:
    new = {name: one for name, one in compositions.items() if name not in steps.recipe.compositions}
    if not new:
        return steps
    data = steps.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["compositions"] = {**data.get("compositions", {}), **new}
    return replace(steps, recipe=check_recipe(data, FILE))
