"""Sizes of a model from its config.json: parameters, operations per token, bytes of its cache. Needs no weights.

Only matrices are counted; norms and biases are less than a thousandth of any model here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_weave.errors import InputError


@dataclass(frozen=True)
class Layer:
    """One layer: its parameters, the cost of its attention, and what it caches per token and per sequence."""

    parameters: int
    widest: int  # activations per token while it computes
    recurrence: int  # operations per token outside the matrices
    attention_per_context: int  # operations per token and per token of context
    window: int | None  # longest context that it attends to
    cached_per_token: int  # numbers
    state: int  # numbers per sequence, whatever its length


@dataclass(frozen=True)
class Shape:
    """A decoder: its layers, its embedding and its output matrix (the same matrix if they are tied)."""

    width: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    bytes_per_weight: int  # as the checkpoint is stored

    @property
    def parameters(self) -> int:
        """Count the stored parameters."""
        return self.multiplied + (0 if self.tied else self.width * self.vocabulary)

    @property
    def multiplied(self) -> int:
        """Count the parameters that every token is multiplied with: all but an embedding that is only looked up."""
        return sum(layer.parameters for layer in self.layers) + self.width * self.vocabulary

    def work(self, prompt: float, response: float) -> float:
        """Count the operations of one forward pass over one row; only response positions go through the head."""
        tokens = prompt + response
        matrices = tokens * sum(2 * layer.parameters + layer.recurrence for layer in self.layers)
        attention = sum(layer.attention_per_context * _seen(tokens, layer.window) for layer in self.layers)
        return matrices + attention + 2 * response * self.width * self.vocabulary

    def cache_bytes(self, tokens: int, bytes_per_number: int = 2) -> int:
        """Count the bytes cached while generating one sequence of this length."""
        cached = [layer.cached_per_token * min(tokens, layer.window or tokens) + layer.state for layer in self.layers]
        return sum(cached) * bytes_per_number


def _seen(tokens: float, window: int | None) -> float:
    """Sum the context lengths over the tokens of a row."""
    if window is None or tokens <= window:
        return tokens * tokens / 2
    return window * window / 2 + (tokens - window) * window


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Read a config.json: dense decoders (Llama, Qwen, OLMo, MiMo) and hybrids with linear attention (Qwen3.5)."""
    inner = {**config, **(config.get("text_config") or {})}
    try:
        kinds = inner.get("layer_types") or ["full_attention"] * int(inner["num_hidden_layers"])
        layers = tuple(_linear(inner) if kind == "linear_attention" else _softmax(inner, kind) for kind in kinds)
        width = int(inner["hidden_size"])
        vocabulary = int(inner["vocab_size"])
    except KeyError as error:
        raise InputError(f"{where}: {error} is missing; plan supports dense decoders and Qwen3.5's hybrids") from None
    if inner.get("num_experts") or inner.get("num_local_experts"):
        raise InputError(f"{where}: a mixture of experts; plan supports dense decoders and Qwen3.5's hybrids")
    stored = str(inner.get("dtype") or inner.get("torch_dtype") or "bfloat16")
    tied = bool(inner.get("tie_word_embeddings", False))
    return Shape(width, vocabulary, tied, layers, 4 if "float32" in stored else 2)


def _feed_forward(config: Mapping[str, Any]) -> int:
    return 3 * int(config["hidden_size"]) * int(config["intermediate_size"])


def _softmax(config: Mapping[str, Any], kind: str) -> Layer:
    width = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or width // heads)
    query = heads * size
    key = int(config.get("num_key_value_heads") or heads) * size
    # Qwen3.5 gates the output of attention with a second half of the query projection.
    queries = 2 * query if str(config.get("model_type", "")).startswith(("qwen3_5", "qwen3_next")) else query
    window = int(config["sliding_window"]) if kind == "sliding_attention" else None
    return Layer(
        parameters=width * (queries + 2 * key + query) + _feed_forward(config),
        widest=queries + 2 * key + query + 3 * int(config["intermediate_size"]) + 4 * width,
        recurrence=0,
        attention_per_context=4 * query,
        window=window,
        cached_per_token=2 * key,
        state=0,
    )


def _linear(config: Mapping[str, Any]) -> Layer:
    width = int(config["hidden_size"])
    key_size = int(config["linear_key_head_dim"])
    value_size = int(config["linear_value_head_dim"])
    value_heads = int(config["linear_num_value_heads"])
    values = value_heads * value_size
    convolved = 2 * int(config["linear_num_key_heads"]) * key_size + values
    kernel = int(config["linear_conv_kernel_dim"])
    projected = convolved + values + 2 * value_heads
    return Layer(
        parameters=width * (projected + values) + convolved * kernel + _feed_forward(config),
        widest=projected + values + 3 * int(config["intermediate_size"]) + 4 * width,
        recurrence=6 * value_heads * key_size * value_size,  # decay, update, read
        attention_per_context=0,
        window=None,
        cached_per_token=0,
        state=value_heads * key_size * value_size + convolved * kernel,
    )
