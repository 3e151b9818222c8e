"""A double of a checkpoint: the same configuration and tokenizer, but few and narrow layers of random weights.

It keeps the architecture, one layer of each kind, the size of a head, the vocabulary, the tokenizer, the stop tokens,
the dtype and the names of the tensors in the files. It writes random letters and stops now and then. No weight of the
original is read.
"""

import hashlib
import json
import shutil
import string
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lightning_weave.errors import InputError, first_line
from lightning_weave.models.checkpoint import REHEARSAL_KEY, Checkpoint, configured_dtype
from lightning_weave.models.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX_FILE, adapter_config, checkpoint_json
from lightning_weave.models.weights import PEFT_PREFIX
from lightning_weave.store import whole_directory

KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
ADAPTER_MARK = "rehearsal.json"  # a file, since peft warns of keys that it does not know
WIDTH = 32
HEADS = 2
STEP = 0.05  # of post-training, as a share of the weights
# The first coordinate of every embedding is constant and no layer changes it, so that an output row's entry there acts
# as a bias: the tokens that are written get one, those that end a response a slightly larger one.
CONSTANT = 8.0
WRITTEN_BIAS = 6.0
STOP_BIAS = 6.3
SMALL_SIZES = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mtp_num_hidden_layers": 0,
    "num_nextn_predict_layers": 0,
}
SMALL_TOWER: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "deepstack_visual_indexes": [],
}


def has_double(lineage: Sequence[Checkpoint], folder: Path) -> bool:
    """Check whether a folder holds the double of the last of these checkpoints, as their files are now."""
    mark = checkpoint_json(folder / ADAPTER_MARK) or checkpoint_json(folder / "config.json").get(REHEARSAL_KEY)
    return bool(mark == _mark(lineage))


def make_double(lineage: Sequence[Checkpoint], folder: Path, heads: int = 1, base: Path | None = None) -> None:
    """Make the double of the last of a sequence of checkpoints, each post-trained from the one before.

    The number of heads is a multiple of `heads`; `base` is the double of an adapter's base. An existing double of the
    same files is kept.
    """
    if has_double(lineage, folder):
        return
    checkpoint = lineage[-1]
    source = checkpoint.source_path
    mark = _mark(lineage)
    names = [str(one) for one in lineage]
    with whole_directory(folder) as unfinished:
        for file in _small_files(source):
            shutil.copyfile(file, unfinished / file.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(names[0].encode()))
            if base is not None:
                _write_adapter(checkpoint, unfinished, base, mark)
                return
            config = {**narrow_config(checkpoint, heads), REHEARSAL_KEY: mark}
            (unfinished / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            model = _build(checkpoint, unfinished)
        _fill(model, names, checkpoint)
        dtype = configured_dtype(unfinished) or torch.float32
        size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
        shards = 2 if (source / INDEX_FILE).is_file() else 1  # the original may have more
        model.to(dtype).save_pretrained(unfinished, max_shard_size=size // shards + 4096)
        # Transformers has written its own versions of the other files.
        for file in _small_files(source):
            if file.name != "config.json":
                shutil.copyfile(file, unfinished / file.name)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _small_files(folder: Path) -> list[Path]:
    files = {file for pattern in KEPT for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in files if not file.name.endswith(".index.json"))


def _mark(lineage: Sequence[Checkpoint]) -> dict[str, str]:
    digest = hashlib.sha256("\n".join(map(str, lineage)).encode())
    for file in _small_files(lineage[-1].source_path):
        digest.update(file.name.encode() + file.read_bytes())
    return {"double_of": str(lineage[-1]), "files": digest.hexdigest()[:16]}


def narrow_config(checkpoint: Checkpoint, multiple: int = 1) -> dict[str, Any]:
    """Shrink the configuration of a checkpoint; what decides how it computes stays."""
    config = checkpoint_json(checkpoint.config_path / "config.json")
    config.pop("quantization_config", None)  # the weights of a double are not quantised
    parsed = checkpoint.config.get_text_config()
    renamed = parsed.attribute_map  # from the usual names to the architecture's own
    settings = parsed.to_dict()
    heads = int(parsed.num_attention_heads)
    few = HEADS * multiple
    explicit = getattr(parsed, "head_dim", None)
    size = int(explicit or parsed.hidden_size // heads)
    width = WIDTH if explicit else few * size
    nested = isinstance(config.get("text_config"), dict)
    text = dict(config["text_config"] if nested else config)
    text |= {key: min(value, settings[key]) for key, value in SMALL_SIZES.items() if settings.get(key)}
    text[renamed.get("hidden_size", "hidden_size")] = width
    text[renamed.get("num_attention_heads", "num_attention_heads")] = few
    if explicit:
        text["head_dim"] = size
    if settings.get("num_key_value_heads"):
        text["num_key_value_heads"] = few if parsed.num_key_value_heads == heads else 1
    if settings.get("linear_num_key_heads"):
        text["linear_num_key_heads"] = 1
        text["linear_num_value_heads"] = parsed.linear_num_value_heads // parsed.linear_num_key_heads
    chosen = choose_layers(settings, int(parsed.num_hidden_layers))
    text[renamed.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == parsed.num_hidden_layers:
            text[key] = [value[layer] for layer in chosen]
    if settings.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = sum(layer < settings["first_k_dense_replace"] for layer in chosen)
    if not nested:
        config = text
    else:
        config["text_config"] = text
    for tower in ("vision_config", "audio_config"):  # never run here, but its weights are in the files
        if isinstance(part := config.get(tower), dict):
            small = dict(part)
            heads_key = next((key for key in ("num_heads", "num_attention_heads") if key in part), None)
            if heads_key and "hidden_size" in part:
                small |= {heads_key: HEADS, "hidden_size": HEADS * (part["hidden_size"] // part[heads_key])}
            fixed = {**SMALL_TOWER, "out_hidden_size": width}
            config[tower] = small | {key: value for key, value in fixed.items() if key in part}
    return config


def choose_layers(config: Mapping[str, Any], count: int) -> list[int]:
    """Choose one layer of each kind, and at least two; lists with an entry per layer tell the kinds.

    >>> choose_layers({"layer_types": ["linear", "linear", "linear", "full"] * 2, "first_k_dense_replace": 1}, 8)
    [0, 1, 3]
    >>> choose_layers({}, 36), choose_layers({}, 1)
    ([0, 1], [0])
    """
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == count]
    dense = config.get("first_k_dense_replace") or 0
    kinds = [(layer < dense, *(str(value[layer]) for value in lists)) for layer in range(count)]
    chosen = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    return chosen if len(chosen) > 1 else list(range(min(2, count)))


def _build(checkpoint: Checkpoint, folder: Path) -> Any:
    """Build the class that the checkpoint names, so that the tensors in its files have the original names."""
    small = checkpoint.at(folder)
    named = (getattr(small.config, "architectures", None) or [""])[0]
    own = getattr(transformers, named, None)
    try:
        if own is not None and not getattr(small.config, "auto_map", None):
            return own._from_config(small.config, dtype=torch.float32)
        return transformers.AutoModelForCausalLM.from_config(
            small.config, dtype=torch.float32, trust_remote_code=checkpoint.trust_remote_code
        )
    except Exception as error:  # an architecture checks its numbers in its own way
        raise InputError(
            f"{checkpoint}: no small double of {named or 'this architecture'} can be built ({first_line(error)}). "
            "Rehearse with another checkpoint of the family, or start with few prompts: --set prompts.take=8"
        ) from error


@torch.no_grad()
def _fill(model: Any, names: Sequence[str], checkpoint: Checkpoint) -> None:
    """Draw the weights by name, so that the models of a lineage share their initial weights.

    The double writes single characters, which any tokenizer can express, and ends of a response.
    """
    tokenizer = checkpoint.tokenizer
    spelled = [tokenizer.encode(letter, add_special_tokens=False) for letter in string.printable[:95] + "\n"]
    biases = dict.fromkeys((ids[-1] for ids in spelled if ids), WRITTEN_BIAS)
    biases |= dict.fromkeys(checkpoint.stop_ids, STOP_BIAS)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    width = embedding.shape[1]
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        scale = 1.5 * width**-0.5 if weight is head else 1.0 if weight is embedding else weight.shape[-1] ** -0.5
        weight.copy_(scale * _noise(weight, names[0], name))
        for later in names[1:]:
            weight.add_(STEP * scale * _noise(weight, later, name))
        if weight is embedding:
            weight[:, 0] = CONSTANT
        elif weight is head:
            weight[:, 0] = 0.0
        elif weight.shape[-2] == width:  # what a layer adds does not change the first coordinate
            weight[..., 0, :] = 0.0
    for id, bias in biases.items():
        if id < len(head):
            head[id, 0] += bias


def _noise(weight: Tensor, model: str, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model} {name}".encode()))
    return torch.randn(weight.shape, generator=generator)


def _write_adapter(checkpoint: Checkpoint, folder: Path, base: Path, mark: Mapping[str, str]) -> None:
    """Write small random updates for the double of an adapter's base."""
    try:
        from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    except ImportError:
        raise InputError(f"{checkpoint}: a LoRA adapter needs the package peft: pip install peft") from None
    from safetensors.torch import save_file

    model = Checkpoint(str(base), None, checkpoint.trust_remote_code).load(torch.float32, torch.device("cpu"))
    settings = LoraConfig.from_pretrained(str(folder))
    settings.init_lora_weights = False
    inject_adapter_in_model(settings, model, adapter_name="default")
    tensors = {
        f"{PEFT_PREFIX}{name}": STEP * _noise(value, str(checkpoint), name)
        for name, value in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config = {**(adapter_config(folder) or {}), "base_model_name_or_path": str(base.absolute()), "revision": None}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / ADAPTER_MARK).write_text(json.dumps(mark), encoding="utf-8")
