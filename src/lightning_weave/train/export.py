"""final/: a complete Hugging Face directory in the student's own dtype, with a model card."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_weave import __version__
from lightning_weave.cache.budgets import AnchorShare
from lightning_weave.config import Joint, Recipe, Sequential, replicate_of
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.maths import reverse_kl
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import weight_files
from lightning_weave.models.weights import Layout, LowRankUpdate
from lightning_weave.prompts import template_with_levels
from lightning_weave.run import Run
from lightning_weave.store import whole_directory, write_json
from lightning_weave.store.files import TOKENIZER_FILES
from lightning_weave.train.data import Batch, anchor_doses
from lightning_weave.train.parallel import Ranks, full_tensor
from lightning_weave.train.student import Trainee, full_vocabulary, student_weights

TAG = "tags: [lightning-weave]"
# Copied from the student: training changes none of them, and other programs keep reading what they read before.
KEPT_FILES = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "*.safetensors.index.json",
    "*.py",
)
MEASURED = {
    "updates": ("updates", "{:g}"),
    "KL(target, behaviour)": ("target_kl", "{:.4f} nats per token"),
    "KL(behaviour, target), where training begins": ("start_kl", "{:.4f} nats per token"),
    "KL(student, target) at the last update": ("reverse_kl", "{:.4f} nats per token"),
    "KL(student, target) on held-out prompts": ("validation_reverse_kl", "{:.4f} nats per token"),
    "loss at zero shift before training": ("zero_shift_loss", "{:.1e}"),
    "positions kept at the last update": ("kept", "{:.1%}"),
    "KL(student, behaviour) at the last update": ("drift", "{:.4f} nats per token"),
    "KL(exported, trained)": ("export_kl", "{:.1e} nats per token"),
}


def model_card(run: Run, name: str, figures: dict[str, Any], evaluation: str = "", metadata: str = "") -> str:
    """State recipe, anchors, weights, alpha, cache fingerprint, figures and, if known, the evaluation.

    `metadata` is further YAML for the hub: licence, results.
    """
    recipe = run.recipe
    composition = recipe.compositions[name]
    alpha = figures.get("alpha", composition.alpha)  # only the legs of a sequence record one
    assert alpha is not None, "a trained composition has an alpha"
    doses = anchor_doses(composition, float(alpha))
    solved = run.recipe.budgets(name)
    lines = []
    for anchor, weight in composition.used.items():
        dose = f"{doses[anchor]:.4g}" if anchor in doses else "its own distribution"
        dose = "solved" if anchor in solved else dose
        cells = [anchor, "by level", "by level"] if composition.slots else [anchor, f"{weight:g}", dose]
        for model in (run.side(anchor, "post"), run.side(anchor, "pre")):
            context = f" with {model.context}".replace("|", "\\|") if model.context else ""
            cells.append(f"`{public_name(model.checkpoint.name)}`{context}")
        lines.append(f"| {' | '.join(cells)} |")
    anchors = "\n".join(lines)
    method: str = composition.method
    match composition:
        case Sequential():
            method += f", {' then '.join(composition.sequence)}"
        case Joint(parts=parts) if parts > 1:
            again = figures.get("parts", parts) - 1
            method += f", sampled again by the current student {again} time{'s' * (again != 1)}"
    train = recipe.train
    warmup = f", warm-up over {train.warmup} updates" if train.warmup else ""
    decay = f", {train.decay} decay" if train.decay != "constant" else ""
    facts = {
        "method": method,
        "objective": run.objective(name),
        "alpha": "by level" if composition.slots else f"{float(alpha):.4g}",
        "learning rate": f"{train.learning_rate:g}{warmup}{decay}",
        **{what: form.format(figures[key]) for what, (key, form) in MEASURED.items() if key in figures},
        "cache": f"`{run.stage('reference').fingerprint}`",
        "fingerprint": f"`{run.stage('train', name).fingerprint}`",
    }
    rows = "\n".join(f"| {what} | {value} |" for what, value in facts.items())
    student = public_name(recipe.student.model)
    # The hub expects hub names here, not local directories.
    base = f"base_model: {student}\n" if student == recipe.student.model else ""
    by_tag = "".join(f"\nWeights of the tag `{tag}`: {shares}.\n" for tag, shares in composition.by_tag.items())
    by_tag += "".join(f"\nSolved: dose of {AnchorShare(**one)}.\n" for one in figures.get("budgets", ()))
    mark = f"\n**This is a {recipe.mark}.**\n" if recipe.mark else ""
    question = '[{"role": "user", "content": "..."}]' if recipe.prompts.chat else '"..."'
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
{evaluation}{describe_levels(run, name, figures.get("levels", {}))}
## Use

```python
from transformers import pipeline

student = pipeline("text-generation", model="PATH_OR_HUB_NAME")
print(student({question}, max_new_tokens={recipe.eval.max_tokens or 4096})[0]["generated_text"])
```

The recipe, without its defaults (`recipe.toml` has all of it where the student was published):

```toml
{short_recipe(recipe, name).strip()}
```
"""


def files_of_levels(run: Run, name: str) -> dict[str, str]:
    """The files of final/ that differ from the student's where it has effort levels: chat template, sampling defaults.

    A base model has no chat template; its card states the prefix.
    """
    composition = run.recipe.compositions[name]
    if not isinstance(composition, Joint) or composition.control is None:
        return {}
    section, folder = run.recipe.eval, run.student.config_path
    defaults = {"do_sample": section.temperature > 0, "temperature": section.temperature, "top_p": section.top_p}
    file = folder / "generation_config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    given = {key: value for key, value in defaults.items() if section.temperature > 0 or key == "do_sample"}
    files = {file.name: json.dumps({**given, **known}, indent=2) + "\n"}
    if run.recipe.prompts.chat:
        levels = None if composition.is_numeric else list(composition.levels)
        template = template_with_levels(run.student.tokenizer, composition.control, levels)
        files["chat_template.jinja"] = template
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if "chat_template" in settings:  # some programs read only this one
            files[file.name] = json.dumps({**settings, "chat_template": template}, indent=2, ensure_ascii=False) + "\n"
    return files


def describe_levels(run: Run, name: str, alphas: Mapping[str, float]) -> str:
    """State on a card what the effort levels are and how to ask for one with transformers, vLLM and llama.cpp."""
    composition = run.recipe.compositions[name]
    if not isinstance(composition, Joint) or composition.control is None:
        return ""
    rows = "\n".join(
        f"| {slot.level} | {', '.join(f'{anchor} {weight:g}' for anchor, weight in slot.weights.items())} | "
        f"{alphas.get(str(slot.level), slot.alpha or 0):.4g} |"
        for slot in composition.named
    )
    between = " Numbers between them work, too." if composition.is_numeric else ""
    level = next(reversed(composition.levels))
    text = f"""
## Effort levels

| level | weights | alpha |
| --- | --- | --- |
{rows}

A prompt without a level is answered as at `{composition.default}`.{between}
"""
    if not run.recipe.prompts.chat:
        shown = composition.control.text(level)
        return f"{text}\nThis student has no chat template: write the level before the prompt, such as `{shown}`.\n"
    return f"""{text}
```python
tokenizer.apply_chat_template(messages, add_generation_prompt=True, reasoning_effort="{level}")
```

With vLLM, after `vllm serve PATH_OR_HUB_NAME`:

```python
client.chat.completions.create(
    model="PATH_OR_HUB_NAME",
    messages=messages,
    extra_body={{"chat_template_kwargs": {{"reasoning_effort": "{level}"}}}},
)
```

With llama.cpp, after conversion to GGUF:

```
llama-server -m student.gguf --jinja --chat-template-kwargs '{{"reasoning_effort": "{level}"}}'
```
"""


def public_name(model: str) -> str:
    """Name a model or a file on a card: one of this machine by the last part of its path."""
    is_local = len(model) < 1000 and "\0" not in model and os.path.exists(os.path.expanduser(model))
    return Path(model).expanduser().resolve().name if is_local else model


def short_recipe(recipe: Recipe, composition: str) -> str:
    """Write what differs from the defaults, this composition with its seed and anchors, no path of this machine."""
    own, used = recipe.compositions[composition], recipe.compositions[composition].used
    seed = {"seed": recipe.train_section(composition).seed, "seeds": 1}
    changes = {
        "train": recipe.train.model_copy(update=seed),
        "compositions": {replicate_of(composition): own.model_copy(update={"seed": None})},
    }
    recipe = recipe.model_copy(update=changes)
    data = recipe.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    data["anchors"] = {name: anchor for name, anchor in data.get("anchors", {}).items() if name in used}
    for part in ("runs", "policies", "report", "machine", "tracking", "harness"):
        data.pop(part, None)

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_paths(one) for key, one in value.items()}
        if isinstance(value, list):
            return [without_paths(one) for one in value]
        prefix = "file:" if isinstance(value, str) and value.startswith("file:") else ""
        return prefix + public_name(value.removeprefix("file:")) if isinstance(value, str) else value

    return tomli_w.dumps(without_paths(data))


@torch.no_grad()
def round_weights(trainee: Trainee, dtypes: Mapping[str, torch.dtype], batches: Sequence[Batch]) -> float:
    """Merge adapters and round the weights to the dtypes of the export, in place; all ranks together.

    Returns KL(exported || trained) as the trainer computes both: full vocabulary, mean over the batches' decisions.
    """

    def log_probs() -> Tensor:
        return torch.cat([trainee(batch, full_vocabulary, 1.0)[1] for batch in batches])  # a row at a time

    trainee.eval()
    trained_NV = log_probs()
    if hasattr(trainee.model, "merge_adapter"):
        trainee.model.merge_adapter()
    for name, weight in student_weights(trainee, trained=True).items():
        if name in dtypes:
            weight.copy_(weight.to(dtypes[name]))
    return reverse_kl(log_probs(), trained_NV, 1.0).mean().item() if len(trained_NV) else 0.0


def write_model(
    folder: Path,
    trainee: Trainee,
    layout: Layout,
    card: str,
    ranks: Ranks,
    student: Checkpoint | None = None,
    unmerged: bool = False,
    extra: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the student's directory with the trained weights in their places; whole or not at all.

    Untrained weights are copied bit for bit, such as the vision tower of a multimodal student, unless an adapter of the
    `student` itself was merged into them. Adapters that are still `unmerged` are added to the student's weights. With a
    `student`, what was trained as an adapter is also written as peft does, for engines to serve. All ranks gather one
    weight after another, and rank 0 writes.
    """
    weights = student_weights(trainee)
    updates = _adapter_updates(trainee, unmerged)
    changed = {*student_weights(trainee, trained=True), *updates, *(student.updates if student else ())}
    adapter = _gather_adapter(trainee, student) if student else None
    try:
        with whole_directory(folder) if ranks.is_main_process else nullcontext() as unfinished:
            if unfinished:
                files = {file for pattern in KEPT_FILES for file in layout.folder.glob(pattern)}
                for file in sorted(files | set(weight_files(layout.folder))):
                    shutil.copyfile(file, unfinished / file.name)
                for name, text in {"README.md": card, **(extra or {})}.items():
                    (unfinished / name).write_text(text, encoding="utf-8")
            for piece in (piece for piece in layout.pieces if changed & set(piece.names)):
                ranks.barrier()  # for rank 0's disk, without the timeout of a GPU's group
                if not updates:
                    gathered = {name: full_tensor(weights[name], layout.dtypes[name]) for name in piece.names}
                elif unfinished:
                    gathered = dict(layout.read(dict.fromkeys(piece.names, slice(None))))
                    for name in updates.keys() & gathered.keys():
                        gathered[name] = gathered[name].float() + updates[name].rows(slice(None), "cpu")
                    gathered = {name: weight.to(layout.dtypes[name]) for name, weight in gathered.items()}
                if unfinished:
                    layout.write(unfinished, piece, gathered)
            if unfinished and adapter:
                file = unfinished / "adapter" / "adapter_model.safetensors"
                file.parent.mkdir()
                save_file(adapter[0], file, {"format": "pt"})
                file.chmod(0o644)  # safetensors makes it readable for its owner only
                write_json(file.parent / "adapter_config.json", adapter[1])
    except (OSError, SafetensorError) as error:
        raise WeaveError(
            f"{folder}: cannot be written ({error}). The last checkpoint is kept: train again, and only this is done"
        ) from error
    return sorted(path for path in folder.rglob("*") if path.is_file()) if ranks.is_main_process else []


def _gather_adapter(trainee: Trainee, student: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Gather the trained adapter under peft's names, with its settings, if there is one; all ranks together.

    One over a student that is an adapter itself has no base that an engine could load, and is not written.
    """
    if not hasattr(trainee.model, "peft_config") or student.base is not None:
        return None
    weights = {
        name.replace(".default.", "."): full_tensor(tensor, torch.float32).contiguous()
        for name, tensor in trainee.model.state_dict().items()
        if ".lora_" in name
    }
    settings = trainee.model.peft_config["default"].to_dict() | {
        "base_model_name_or_path": student.name,
        "inference_mode": True,
    }
    return weights, {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def _adapter_updates(trainee: Trainee, unmerged: bool) -> dict[str, LowRankUpdate]:
    """Gather the updates of adapters by the weight that they are added to: all, or those that cannot be merged.

    Weights that are quantised never are.
    """
    if not hasattr(trainee.model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    updates = {}
    for place, layer in trainee.model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer) and (unmerged or not layer.get_base_layer().weight.is_floating_point()):
            if "default" not in layer.lora_A:
                raise InputError(
                    f"train.lora.targets: {place} is an embedding, whose adapter cannot be given to vLLM while it is "
                    'trained. Leave it out, or set engine.rollout = "hf"'
                )
            factors = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            a_RI, b_OR = (full_tensor(factor.detach(), torch.float32) for factor in factors)
            updates[f"{place}.weight"] = LowRankUpdate(a_RI, b_OR, layer.scaling["default"], layer.fan_in_fan_out)
    return updates
