"""What changed between a stage on disk and the recipe: said in the recipe's keys, or found not to matter."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_weave.config import HARNESS
from lightning_weave.store import Stage


def why_stale(stage: Stage) -> str:
    """Say which keys of the recipe made a stage stale."""
    changed = [say_change(stage.step.path, key, what) for key, what in stage.changes().items()]
    inputs = ", ".join(stage.changed_inputs())
    reasons = [*changed, *([f"made from an earlier {inputs}"] if inputs else [])]
    return "; ".join(dict.fromkeys(reasons)) or "an earlier recipe made it"


def cause(stage: Stage) -> str:
    """Say what made a stage stale, at its root: its own settings, or those of what it was made from."""
    if not stage.changes():
        for inner in stage.inputs():
            if inner.state() == "stale":
                return cause(inner)
    return why_stale(stage)


def say_change(path: str, setting: str, what: str) -> str:
    """Name the recipe's key of a setting that changed, and how.

    >>> say_change("rollout", "max_tokens", "12 -> 10")
    'rollout.max_tokens: 12 -> 10'
    >>> say_change("train/even", "weights.acc", "0.5 -> 0.7")
    'compositions.even.weights.acc: 0.5 -> 0.7'
    >>> say_change("train/even", "anchors.acc.post.model", "has changed")
    'anchors.acc.post has changed'
    """
    stage, _, name = path.partition("/")
    first = setting.split(".")[0]
    if first == "student" or (stage == "eval" and name.startswith("base/") and first == "model"):
        key = "student.model"
    elif stage == "train" and first == "anchors":
        key = re.sub(r"\.(post|pre)\.(aliases|untrained|bos|prompt)\b", r".\2", setting).removesuffix(".model")
    elif stage == "train" and first not in ("train", "rollout"):
        key = f"compositions.{name}.{setting}"
    elif stage == "train" or (stage == "score" and first != "dtype"):
        key = setting
    elif stage == "eval" and first in ("model", "benchmark"):
        key = f"policies.{name.split('/')[0]}.model" if first == "model" else "the benchmark's file"
    elif stage == "eval" and f"/{HARNESS}" in name:
        key = f"harness.{setting}"
    else:
        key = f"{stage}.{setting}"
    return f"{key}: {what}" if "->" in what else f"{key} {what}"


def as_made(settings: Mapping[str, Any], made: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a step, or those of its manifest where the difference does not matter: the fingerprint stays.

    A `take` that takes all there is means no more than another; an anchor's name means nothing.
    """
    old_settings = (made or {}).get("settings", {})
    if made is not None and (_takes_all(settings, made) or _renamed(old_settings, settings) == settings):
        return dict(old_settings)
    return dict(settings)


def _takes_all(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    take = settings.get("take")
    same = {**manifest["settings"], "take": take} == settings
    none_left = manifest.get("report", {}).get("not_taken") == 0
    return same and "take" in settings and none_left and (take is None or take >= manifest["rows"])


def _renamed(old_settings: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings on disk with the names that the same anchors have now; None where they are not the same anchors."""
    now = settings.get("anchors", {})
    names: dict[str, str] = {}
    for old, anchor in old_settings.get("anchors", {}).items():
        free = [name for name in now if now[name] == anchor and name not in names.values()]
        names[old] = old if old in free else next(iter(free), "")
    if "" in names.values() or len(names) != len(now):
        return None
    renamed: dict[str, Any] = {}
    for key in ("weights", "anchors") if names else ():
        renamed[key] = {names[old]: value for old, value in old_settings[key].items()}
    if "sequence" in old_settings:
        renamed["sequence"] = [names[old] for old in old_settings["sequence"]]
    return {**old_settings, **renamed}
