"""A double of a checkpoint: what its configuration and tokenizer decide, in a few narrow layers of random weights.

It has the architecture, one layer of each kind, the size of a head, the vocabulary, the tokenizer, the stop tokens, the
dtype and the names of the files' tensors. It writes random letters and ends now and then, and no weight of the original
is read for it.
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
from lightning_weave.models.adapters import CONFIG, WEIGHTS, adapter_config
from lightning_weave.models.checkpoint import MARK, Checkpoint
from lightning_weave.models.files import checkpoint_json
from lightning_weave.models.load import configured_dtype
from lightning_weave.store import whole_directory

KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
ADAPTER_MARK = "rehearsal.json"  # peft warns of keys that it does not know
INDEX = "model.safetensors.index.json"
WIDTH = 32
HEADS = 2
STEP = 0.05  # of post-training, as a share of the weights
LEVEL = 8.0  # of the first coordinate of every embedding, which no layer changes ...
PULL = 6.0  # ... so that what an output row has there is a bias: of the tokens that are written this,
END = 6.3  # and of those that end a response a little more
_SMALL = {
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


def is_made(lineage: Sequence[Checkpoint], folder: Path) -> bool:
    """Whether a folder holds the double of the last of these checkpoints, as their files are now."""
    mark = checkpoint_json(folder / ADAPTER_MARK) or checkpoint_json(folder / "config.json").get(MARK)
    return bool(mark == _mark(lineage))


def make_double(lineage: Sequence[Checkpoint], folder: Path, heads: int = 1, base: Path | None = None) -> None:
    """Make the double of the last of a line of checkpoints, each post-trained from the one before.

    `heads` is what the number of heads must be a multiple of, `base` the double of an adapter's base. What is there
    already is kept if it is of the same files.
    """
    if is_made(lineage, folder):
        return
    checkpoint = lineage[-1]
    own = checkpoint.own_path
    mark = _mark(lineage)
    names = [str(one) for one in lineage]
    with whole_directory(folder) as unfinished:
        for file in _small_files(own):
            shutil.copyfile(file, unfinished / file.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(names[0].encode()))
            if base is not None:
                _write_adapter(checkpoint, unfinished, base, mark)
                return
            config = {**narrowed(checkpoint, heads), MARK: mark}
            (unfinished / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            model = _build(checkpoint, unfinished)
        _fill(model, names, _written(checkpoint))
        dtype = configured_dtype(unfinished) or torch.float32
        size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
        shards = 2 if (own / INDEX).is_file() else 1  # the original may have more
        model.to(dtype).save_pretrained(unfinished, max_shard_size=size // shards + 4096)
        # What transformers writes beside the weights is its own idea of them.
        for file in _small_files(own):
            if file.name != "config.json":
                shutil.copyfile(file, unfinished / file.name)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _small_files(folder: Path) -> list[Path]:
    files = {file for pattern in KEPT for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in files if not file.name.endswith(".index.json"))


def _mark(lineage: Sequence[Checkpoint]) -> dict[str, str]:
    digest = hashlib.sha256("\n".join(map(str, lineage)).encode())
    for file in _small_files(lineage[-1].own_path):
        digest.update(file.name.encode() + file.read_bytes())
    return {"double_of": str(lineage[-1]), "files": digest.hexdigest()[:16]}


def narrowed(checkpoint: Checkpoint, multiple: int = 1) -> dict[str, Any]:
    """Make the configuration of a checkpoint small; what decides how it computes stays."""
    config = checkpoint_json(checkpoint.light_path / "config.json")
    config.pop("quantization_config", None)  # a double's weights are plain numbers
    parsed = checkpoint.config.get_text_config()
    nested = config.get("text_config")
    text = _narrowed_text(nested if isinstance(nested, dict) else config, parsed, HEADS * multiple)
    small_config = {**config, "text_config": text} if isinstance(nested, dict) else text
    for part in ("vision_config", "audio_config"):
        if isinstance(config.get(part), dict):
            small_config[part] = _narrowed_tower(
                config[part], text[parsed.attribute_map.get("hidden_size", "hidden_size")]
            )
    return small_config


def _narrowed_text(config: dict[str, Any], parsed: Any, few: int) -> dict[str, Any]:
    def named(key: str) -> str:
        return str(parsed.attribute_map.get(key, key))

    settings = parsed.to_dict()
    heads = int(parsed.num_attention_heads)
    explicit = getattr(parsed, "head_dim", None)
    size = int(explicit or parsed.hidden_size // heads)
    small_config = {**config, **{key: min(value, settings[key]) for key, value in _SMALL.items() if settings.get(key)}}
    small_config[named("hidden_size")] = WIDTH if explicit else few * size
    small_config[named("num_attention_heads")] = few
    if explicit:
        small_config["head_dim"] = size
    if settings.get("num_key_value_heads"):
        small_config["num_key_value_heads"] = few if parsed.num_key_value_heads == heads else 1
    if settings.get("linear_num_key_heads"):
        small_config["linear_num_key_heads"] = 1
        small_config["linear_num_value_heads"] = parsed.linear_num_value_heads // parsed.linear_num_key_heads
    chosen = chosen_layers(settings, int(parsed.num_hidden_layers))
    small_config[named("num_hidden_layers")] = len(chosen)
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == parsed.num_hidden_layers:
            small_config[key] = [value[layer] for layer in chosen]
    if settings.get("first_k_dense_replace"):
        small_config["first_k_dense_replace"] = sum(layer < settings["first_k_dense_replace"] for layer in chosen)
    return small_config


def chosen_layers(config: Mapping[str, Any], count: int) -> list[int]:
    """Choose one layer of each kind, and at least two: a list with an entry per layer says of which kind each is.

    >>> chosen_layers({"layer_types": ["linear", "linear", "linear", "full"] * 2, "first_k_dense_replace": 1}, 8)
    [0, 1, 3]
    >>> chosen_layers({}, 36), chosen_layers({}, 1)
    ([0, 1], [0])
    """
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == count]
    dense = config.get("first_k_dense_replace") or 0
    kinds = [(layer < dense, *(str(value[layer]) for value in lists)) for layer in range(count)]
    chosen = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    return chosen if len(chosen) > 1 else list(range(min(2, count)))


def _narrowed_tower(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Make the part that sees or hears small: nothing here uses it, but its weights are in the files."""
    small_config = dict(config)
    heads = next((key for key in ("num_heads", "num_attention_heads") if key in config), None)
    if heads and "hidden_size" in config:
        small_config |= {heads: HEADS, "hidden_size": HEADS * (config["hidden_size"] // config[heads])}
    small_config |= {key: 1 for key in ("depth", "num_hidden_layers") if key in config}
    small_config |= {"intermediate_size": 64} if "intermediate_size" in config else {}
    small_config |= {"out_hidden_size": width} if "out_hidden_size" in config else {}
    return small_config | ({"deepstack_visual_indexes": []} if "deepstack_visual_indexes" in config else {})


def _build(checkpoint: Checkpoint, folder: Path) -> Any:
    """Build the class that the checkpoint names, so that its files have the names of the original's."""
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


def _written(checkpoint: Checkpoint) -> dict[int, float]:
    """The bias of what a double writes: single characters, which any tokenizer can express, and ends of a response."""
    tokenizer = checkpoint.tokenizer
    spelled = [tokenizer.encode(letter, add_special_tokens=False) for letter in string.printable[:95] + "\n"]
    return dict.fromkeys((ids[-1] for ids in spelled if ids), PULL) | dict.fromkeys(checkpoint.stop_ids, END)


@torch.no_grad()
def _fill(model: Any, names: Sequence[str], biases: Mapping[int, float]) -> None:
    """Draw the weights by name, so that models of one line share what they began with."""
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
            weight[:, 0] = LEVEL
        elif weight is head:
            weight[:, 0] = 0.0
        elif weight.shape[-2] == width:  # what a layer adds leaves the first coordinate as it is
            weight[..., 0, :] = 0.0
    for id, bias in biases.items():
        if id < len(head):
            head[id, 0] += bias


def _noise(weight: Tensor, model: str, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model} {name}".encode()))
    return torch.randn(weight.shape, generator=generator)


def _write_adapter(checkpoint: Checkpoint, folder: Path, base: Path, mark: Mapping[str, str]) -> None:
    """Put small random updates on the double of an adapter's base."""
    try:
        from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
    except ImportError:
        raise InputError(f"{checkpoint}: a LoRA adapter needs the package peft: pip install peft") from None
    from safetensors.torch import save_file

    config = adapter_config(folder) or {}
    model = Checkpoint(str(base), None, checkpoint.trust_remote_code).load(torch.float32, torch.device("cpu"))
    settings = LoraConfig.from_pretrained(str(folder))
    settings.init_lora_weights = False
    inject_adapter_in_model(settings, model, adapter_name="default")
    tensors = {
        f"base_model.model.{name}": STEP * _noise(value, str(checkpoint), name)
        for name, value in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    new_config = {**config, "base_model_name_or_path": str(base.absolute()), "revision": None}
    (folder / CONFIG).write_text(json.dumps(new_config, indent=2), encoding="utf-8")
    (folder / ADAPTER_MARK).write_text(json.dumps(mark), encoding="utf-8")
