"""Sizes of models from their config.json, without weights: parameters, FLOPs, bytes of the cache. And of GPUs.

Only matrices are counted; norms and biases are less than a thousandth of any model here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from lightning_weave.errors import InputError, first_line
from lightning_weave.models.hub import adapter_config, checkpoint_json, resolve_model

MatmulDtype = Literal["bfloat16", "tf32", "float32"]
TENSOR_CORES, FLOAT32_UTILISATION = 0.7, 0.8  # of the peak, reached by a large matrix product


@dataclass(frozen=True)
class GPU:
    """One type of GPU."""

    name: str
    peak: float  # FLOPs per second in 16 bits
    tf32: float
    float32: float
    memory: float  # bytes
    bandwidth: float  # bytes per second

    def flops_per_second(self, dtype: MatmulDtype, utilisation: float) -> float:
        """Speed of a program that reaches this utilisation of the 16-bit peak, limited by the peak of the dtype."""
        limit = {"bfloat16": self.peak, "tf32": self.tf32, "float32": FLOAT32_UTILISATION * self.float32}[dtype]
        return min(utilisation * self.peak, limit)

    def product_rate(self, dtype: MatmulDtype) -> float:
        """FLOPs per second of a large matrix product."""
        return {"bfloat16": TENSOR_CORES * self.peak, "tf32": TENSOR_CORES * self.tf32}.get(
            dtype, FLOAT32_UTILISATION * self.float32
        )


# The paper measured on H100; costs are scaled to the others by peak (scoring, training) and bandwidth (sampling).
GPUS = {
    name: GPU(name, bf16 * 1e12, tf32 * 1e12, float32 * 1e12, memory=gigabytes * 1e9, bandwidth=terabytes * 1e12)
    for name, bf16, tf32, float32, gigabytes, terabytes in (
        ("H100", 989, 494, 67, 80, 3.35),
        ("H200", 989, 494, 67, 141, 4.8),
        ("B200", 2250, 1120, 75, 180, 8.0),
        ("A100", 312, 156, 19.5, 80, 2.04),
        ("A100-40GB", 312, 156, 19.5, 40, 1.56),
        ("L40S", 362, 183, 91.6, 48, 0.864),
        ("A6000", 155, 77, 38.7, 48, 0.768),
        ("RTX4090", 165, 82.6, 82.6, 24, 1.01),
        ("L4", 121, 60, 30.3, 24, 0.3),
    )
}
CALIBRATED = GPUS["H100"]
BASE = "base_model_name_or_path"  # in the configuration of an adapter
MEMORY_TOLERANCE = 0.2  # relative difference between the memory of a device and that of its type


def find_gpu(name: str) -> GPU:
    """Look up a GPU by name."""
    for gpu in GPUS.values():
        if gpu.name.lower() == name.lower():
            return gpu
    raise InputError(f"--gpu {name}: unknown; choose from {', '.join(GPUS)}")


def recognise(device: str, memory: float) -> GPU | None:
    """Find the GPU that a driver names, with the memory of the device; None for one that is not in the table.

    >>> gpu = recognise("NVIDIA A100-SXM4-40GB", 42e9)
    >>> gpu.name, gpu.memory
    ('A100-40GB', 42000000000.0)
    >>> recognise("NVIDIA GeForce RTX 4090", 25.3e9).name, recognise("AMD EPYC", 64e9)
    ('RTX4090', None)
    """
    words = device.replace(" ", "").replace("-", "").upper()
    for gpu in GPUS.values():
        model = gpu.name.partition("-")[0].upper()
        # "L4" is part of "L40S".
        longer = any(model in other.upper() and model != other.upper() and other.upper() in words for other in GPUS)
        if model in words and not longer and abs(memory / gpu.memory - 1) < MEMORY_TOLERANCE:
            return replace(gpu, memory=memory)
    return None


@dataclass(frozen=True)
class Layer:
    """One layer: its parameters, its widths, the cost of its attention, and what it caches per token and sequence."""

    parameters: int
    active: int  # parameters used for one token: without the experts that it is not routed to
    adapted: int  # inputs and outputs of the matrices that LoRA adapts
    query: int  # width of the queries of all heads
    key: int  # width of the keys, and of the values
    intermediate: int  # width between the matrices of the feed-forward part, of one expert
    experts: int  # per token; 0 for a dense feed-forward part
    qk_norm: bool
    recurrent_flops: int  # per token, outside the matrices
    attention_flops: int  # per token and per token of context
    window: int | None  # longest context that it attends to
    cached_per_token: int  # numbers
    state: int  # numbers per sequence, independent of its length


@dataclass(frozen=True)
class Shape:
    """A decoder: its layers, its embedding and its output matrix (the same matrix if they are tied)."""

    width: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    bytes_per_weight: int  # of the stored checkpoint

    @property
    def parameters(self) -> int:
        """Count the stored parameters."""
        return sum(layer.parameters for layer in self.layers) + (1 if self.tied else 2) * self.width * self.vocabulary

    @property
    def active(self) -> int:
        """Count the parameters that a token is multiplied with: its own experts, and no embedding lookup."""
        return sum(layer.active for layer in self.layers) + self.width * self.vocabulary

    def flops(self, prompt: float, response: float) -> tuple[float, float, float]:
        """Count the FLOPs of a forward pass over one row: matrices, attention, and the head at response positions."""
        tokens = prompt + response
        matrices = tokens * sum(2 * layer.active + layer.recurrent_flops for layer in self.layers)
        attention = 0.0
        for layer in self.layers:
            if layer.window is None or tokens <= layer.window:
                context = tokens * tokens / 2  # summed over the tokens of the row
            else:
                context = layer.window * layer.window / 2 + (tokens - layer.window) * layer.window
            attention += layer.attention_flops * context
        return matrices, attention, 2 * response * self.width * self.vocabulary

    def cache_bytes(self, tokens: int, bytes_per_number: int = 2) -> int:
        """Count the bytes cached while generating one sequence of this length."""
        cached = [layer.cached_per_token * min(tokens, layer.window or tokens) + layer.state for layer in self.layers]
        return sum(cached) * bytes_per_number


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Read a config.json: decoders (Llama, Qwen, OLMo, Gemma, MiMo), hybrids (Qwen3.5), mixtures of experts (Qwen3)."""
    inner = {**config, **(config.get("text_config") or {})}
    supported = "plan supports decoders with softmax attention, Qwen3.5's hybrids, and mixtures of experts like Qwen3's"
    if "kv_lora_rank" in inner:
        raise InputError(f"{where}: attention with a low-rank cache (kv_lora_rank) is not supported; {supported}")
    try:
        kinds = inner.get("layer_types") or ["full_attention"] * int(inner["num_hidden_layers"])
        layers = tuple(_read_layer(inner, kind, number) for number, kind in enumerate(kinds))
        width = int(inner["hidden_size"])
        vocabulary = int(inner["vocab_size"])
    except KeyError as error:
        raise InputError(f"{where}: {error} is missing; {supported}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{where}: not the sizes of a model ({first_line(error)}); {supported}") from None
    stored = str(inner.get("dtype") or inner.get("torch_dtype") or "bfloat16")
    tied = bool(inner.get("tie_word_embeddings", False))
    return Shape(width, vocabulary, tied, layers, 4 if "float32" in stored else 2)


def _read_layer(config: Mapping[str, Any], kind: str, number: int) -> Layer:
    """Count one layer: softmax attention or Qwen3.5's linear attention, then a feed-forward part or experts."""
    width = int(config["hidden_size"])
    family = str(config.get("model_type", ""))
    if kind == "linear_attention":
        key_size = int(config["linear_key_head_dim"])
        value_heads = int(config["linear_num_value_heads"])
        kernel = int(config["linear_conv_kernel_dim"])
        query = value_heads * int(config["linear_value_head_dim"])
        key = 2 * int(config["linear_num_key_heads"]) * key_size + query  # convolved
        projected = key + query + 2 * value_heads
        convolution = key * kernel
        recurrent_state = query * key_size
    else:
        heads = int(config["num_attention_heads"])
        head_size = int(config.get("head_dim") or width // heads)
        query = heads * head_size
        key = int(config.get("num_key_value_heads") or heads) * head_size
        # Qwen3.5 gates the output of attention with a second half of the query projection.
        projected = (2 * query if family.startswith(("qwen3_5", "qwen3_next")) else query) + 2 * key
        convolution = 0
        recurrent_state = 0
    attention = width * (projected + query) + convolution

    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    sparse_step = int(config.get("decoder_sparse_step") or 1)
    if not experts or number in (config.get("mlp_only_layers") or ()) or (number + 1) % sparse_step:
        intermediate = int(config["intermediate_size"])
        routed = 0
        feed_forward = active = 3 * width * intermediate
    else:
        intermediate = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        routed = int(config["num_experts_per_tok"])
        shared = width * experts + 3 * width * int(config.get("shared_expert_intermediate_size") or 0)
        feed_forward = shared + experts * 3 * width * intermediate
        active = shared + routed * 3 * width * intermediate
    linear = kind == "linear_attention"
    return Layer(
        parameters=attention + feed_forward,
        active=attention + active,
        adapted=projected + query + 4 * width + (0 if routed else 3 * (intermediate + width)),
        query=query,
        key=key,
        intermediate=intermediate,
        experts=routed,
        qk_norm=linear or family.startswith(("qwen3", "olmo2", "olmo3", "olmoe", "gemma3")),
        recurrent_flops=6 * recurrent_state,  # decay, update, read
        attention_flops=0 if linear else 4 * query,
        window=int(config["sliding_window"]) if kind == "sliding_attention" else None,
        cached_per_token=0 if linear else 2 * key,
        state=recurrent_state + convolution,
    )


def find_shape(model: str, revision: str | None = None, known: bool = True) -> Shape:
    """Read the sizes of a model without its weights; with `known`, a name from the paper means the paper's model."""
    config = _read_config(model, revision, known)
    # The update of a LoRA adapter is small: count its base.
    return find_shape(base) if (base := config.get(BASE)) is not None else read_shape(config, model)


def find_base(adapter: str, revision: str | None = None) -> str:
    """Read the name of the model that an adapter was trained from."""
    return str(_read_config(adapter, revision, known=False).get(BASE, f"base of {adapter}"))


def _read_config(model: str, revision: str | None, known: bool) -> Mapping[str, Any]:
    """Read config.json, or the base of an adapter from its adapter_config.json."""
    if known and not Path(model).expanduser().is_dir() and (shipped := shipped_config(model)) is not None:
        return shipped
    folder = resolve_model(model, revision, weights=False)
    if (adapter := adapter_config(folder)) is not None:
        return {BASE: str(adapter.get(BASE))}
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: not a checkpoint, it has no config.json. Give the directory that has it")
    return checkpoint_json(folder / "config.json")


def shipped_config(model: str) -> dict[str, Any] | None:
    """Read the config.json of one of the paper's models; None for any other."""
    file = files("lightning_weave.plan") / "configs" / f"{model.replace('/', '--')}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
