"""How a recipe enters fingerprints: engines as chosen, methods, later settings, users' own functions, data by content.

`engine = "auto"` is decided once per run: from what the run has, else from what this machine has.
"""

import hashlib
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, assert_never

from lightning_weave.config import (
    Composition,
    Distilled,
    Eval,
    Joint,
    Mixture,
    Objective,
    Online,
    Recipe,
    Reference,
    Rollout,
    Score,
    SelfDistilled,
    Sequential,
)
from lightning_weave.devices import sees_gpu
from lightning_weave.errors import InputError
from lightning_weave.store import file_identities, file_identity

# Keys of [train] that came later than the first runs, with the values that change nothing.
LATER = {"warmup": 0, "decay": "constant", "lora.stabilised": False, "lora.base": "own"}
LATER_ASKED = ("template", "system", "problems")  # keys of [prompts] and [eval] that came later, unset where unused
UNWEIGHTED = {"direct-opd", "reverse-kl", "reverse-kl-full"}  # objectives without weights from the behaviour policy
SHIFT_RULES = {"shift_clip", "only_above", "mass_floor", "temperature"}
ENGINES = ("rollout", "reference", "score", "eval")  # sections that name one
TRAIN_EXECUTION = {
    "shard_ranks",
    "token_budget",
    "checkpoint_every",
    "keep",
    "gradient_checkpointing",
    "compile",
    "validate_every",
    "eval_every",
    "eval_problems",
    "agreement",
    "allow_disagreement",
    "trackers",
    "keep_anchors",
    "objective",  # the composition's own, resolved
}


def with_engines(recipe: Recipe) -> Recipe:
    """Put the name of an engine in every section that leaves it open."""
    chosen = {name: engine for name, (engine, _) in choose_engines(recipe).items()}
    sections = {name: getattr(recipe, name).model_copy(update={"engine": engine}) for name, engine in chosen.items()}
    return recipe.model_copy(update=sections) if sections else recipe


def choose_engines(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Choose the engine of every section that leaves it open, each with the reason."""
    open_ = [name for name in ENGINES if getattr(recipe, name).engine == "auto"]
    if not open_:
        return {}
    sections = _kept(Path(recipe.runs) / recipe.name / "recipe.toml")
    return {name: _choose(recipe, name, sections.get(name, {}).get("engine")) for name in open_}


def _choose(recipe: Recipe, name: str, before: str | None) -> tuple[str, str]:
    if before in ("hf", "vllm"):
        return before, "as the run has it"
    python = getattr(recipe, name).python
    if not sees_gpu(recipe.machine.device):
        return "hf", "no GPU for vLLM"
    if python is None and find_spec("vllm") is None:
        return "hf", "vLLM is not installed"
    if _has_adapter(recipe, name):
        return "hf", "vLLM reads no LoRA adapter"
    return "vllm", "it is installed and there is a GPU"


def _has_adapter(recipe: Recipe, name: str) -> bool:
    """Whether a section reads a model that is a LoRA adapter in a directory."""
    models: list[str | None] = [recipe.student.model]
    if name == "score":
        models += [model for anchor in recipe.anchors.values() for model in (anchor.post, anchor.pre, anchor.model)]
    if name == "eval":
        models += [policy.model for policy in recipe.policies.values()]
    return any((Path(model).expanduser() / "adapter_config.json").exists() for model in models if model)


def _kept(file: Path) -> dict[str, Any]:
    """Read the recipe that the last command resolved, if there was one."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def engine_settings(section: Reference | Score) -> dict[str, Any]:
    """What an engine other than transformers changes in the numbers; steps of earlier versions stay the same."""
    if section.engine == "hf":
        return {}
    return {"engine": section.engine, "quantization": section.options.get("quantization")}


def quantization(section: Rollout | Eval) -> dict[str, Any]:
    """The option of a sampling engine that changes its numbers; without it, steps of earlier versions stay the same."""
    chosen = section.options.get("quantization") if section.engine != "hf" else None
    return {} if chosen is None else {"quantization": chosen}


def without_unset(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what came later where the recipe does not say it: steps of earlier versions stay the same."""
    return {key: value for key, value in settings.items() if key not in LATER_ASKED or value is not None}


def without_defaults(train: dict[str, Any]) -> dict[str, Any]:
    """Leave out what came later than the first runs, where it is not used: they stay done."""
    lora = train["lora"]
    rest = lora and {key: value for key, value in lora.items() if LATER.get(f"lora.{key}", ...) != value}
    return {key: value for key, value in train.items() if LATER.get(key, ...) != value} | {"lora": rest}


def method_settings(recipe: Recipe, composition: Composition) -> dict[str, Any]:
    """What decides the outcome of the ways of training that are not the paper's own."""
    rollout = recipe.rollout.model_dump(mode="json", include={"temperature", "top_p", "max_tokens", "seed"})
    match composition:
        case Joint():
            refreshed = {"refresh": composition.refresh, "rollout": rollout} if composition.refresh > 1 else {}
            return refreshed | ({} if composition.kl_budget is None else {"kl_budget": composition.kl_budget})
        case Mixture():
            return {"method": "mixture", "kl_budget": composition.kl_budget}
        case Distilled():
            return {"method": "teacher"}
        case SelfDistilled():
            return {"method": "self", "sharpen": composition.sharpen}
        case Online():
            rollout["responses"] = recipe.rollout.responses  # of the others the cache itself says it
            if recipe.rollout.engine != "hf":
                engine = recipe.rollout.model_dump(mode="json", include={"engine", "dtype"})
                rollout |= {**engine, **quantization(recipe.rollout)}
            return {"method": "online", "rollout": rollout, "candidates": recipe.reference.candidates}
        case Sequential():
            order = {"sequence": composition.sequence, "dose": composition.dose, "resample": composition.resample}
            return {"method": "sequential", **order, "rollout": rollout}
        case _:
            assert_never(composition)


def loss_settings(composition: Composition, objective: Objective) -> dict[str, Any]:
    """Whose probabilities weigh the outcomes of a loss, where a student samples that is not the one of the target."""
    is_moving = composition.samples and composition.method != "sequential"  # a leg has its own student for both
    return {"loss_weights": "sampler"} if is_moving and objective not in UNWEIGHTED else {}


def own_content(function: str, where: str) -> dict[str, str]:
    """Name a user's own function by its name and by what is in its file."""
    path, _, name = function.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"{where} = {function!r}: no such file. Give FILE.py:NAME")
    return {"function": name, "content": file_identity(file)}


def template_identity(model: Path) -> str:
    """Name a checkpoint's chat template by the files that can hold it."""
    files = sorted({*model.glob("chat_template*"), *model.glob("tokenizer_config.json")})
    return hashlib.sha256("".join(file_identities(files)).encode()).hexdigest()[:16]


def data_identity(source: str, key: str) -> str:
    """Name data by content where it is a file, by name where it lives on a hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return file_identity(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return hashlib.sha256("".join(file_identities(files)).encode()).hexdigest()
    if path.suffix in {".jsonl", ".json", ".parquet"} or source.startswith((".", "/", "~")):
        raise InputError(f"{key} = {source!r}: no such file. Give a JSONL or Parquet file, a directory or a hub name")
    return source
