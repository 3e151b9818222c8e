"""Sizes of a model from its config.json: parameters, operations per token, bytes of its cache. Needs no weights.

Only matrices are counted; norms and biases are less than a thousandth of any model here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_weave.errors import InputError


@dataclass(frozen=True)
class Layer:
    """One layer: its parameters, its widths, the cost of its attention, and what it caches per token and sequence."""

    parameters: int
    multiplied: int  # of these, with one token: all but the experts that it does not go to
    adapted: int  # inputs and outputs of the matrices that LoRA adapts
    query: int  # numbers per token in the queries of all heads ...
    key: int  # ... in the keys, and in the values ...
    inner: int  # ... and between the matrices of the feed-forward part, for one expert
    routed: int  # experts that a token goes to; 0 where there is one for all
    normed: bool  # whether queries and keys go through norms of their own
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
        return sum(layer.parameters for layer in self.layers) + (1 if self.tied else 2) * self.width * self.vocabulary

    @property
    def multiplied(self) -> int:
        """Count the parameters that a token is multiplied with: no other experts, no embedding that is looked up."""
        return sum(layer.multiplied for layer in self.layers) + self.width * self.vocabulary

    def work(self, prompt: float, response: float) -> float:
        """Count the operations of one forward pass over one row; only response positions go through the head."""
        tokens = prompt + response
        matrices = tokens * sum(2 * layer.multiplied + layer.recurrence for layer in self.layers)
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
    """Read a config.json: decoders (Llama, Qwen, OLMo, Gemma, MiMo), hybrids (Qwen3.5), mixtures of experts (Qwen3)."""
    inner = {**config, **(config.get("text_config") or {})}
    try:
        if "kv_lora_rank" in inner:
            raise KeyError("num_key_value_heads: attention through a low-rank cache")
        kinds = inner.get("layer_types") or ["full_attention"] * int(inner["num_hidden_layers"])
        layers = tuple(
            _linear(inner, number) if kind == "linear_attention" else _softmax(inner, kind, number)
            for number, kind in enumerate(kinds)
        )
        width = int(inner["hidden_size"])
        vocabulary = int(inner["vocab_size"])
    except KeyError as error:
        raise InputError(
            f"{where}: {error} is missing; plan supports decoders with softmax attention, Qwen3.5's hybrids, and "
            "mixtures of experts like Qwen3's"
        ) from None
    stored = str(inner.get("dtype") or inner.get("torch_dtype") or "bfloat16")
    tied = bool(inner.get("tie_word_embeddings", False))
    return Shape(width, vocabulary, tied, layers, 4 if "float32" in stored else 2)


@dataclass(frozen=True)
class _FeedForward:
    parameters: int
    multiplied: int
    inner: int
    routed: int


def _feed_forward(config: Mapping[str, Any], number: int) -> _FeedForward:
    """Count the three matrices of a feed-forward part, or of each of its experts, and the router."""
    width = int(config["hidden_size"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    every = int(config.get("decoder_sparse_step") or 1)
    if not experts or number in (config.get("mlp_only_layers") or ()) or (number + 1) % every:
        inner = int(config["intermediate_size"])
        return _FeedForward(3 * width * inner, 3 * width * inner, inner, 0)
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    routed = int(config["num_experts_per_tok"])
    shared = width * experts + 3 * width * int(config.get("shared_expert_intermediate_size") or 0)
    return _FeedForward(shared + experts * 3 * width * inner, shared + routed * 3 * width * inner, inner, routed)


def _softmax(config: Mapping[str, Any], kind: str, number: int) -> Layer:
    width = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or width // heads)
    query = heads * size
    key = int(config.get("num_key_value_heads") or heads) * size
    family = str(config.get("model_type", ""))
    # Qwen3.5 gates the output of attention with a second half of the query projection.
    queries = 2 * query if family.startswith(("qwen3_5", "qwen3_next")) else query
    window = int(config["sliding_window"]) if kind == "sliding_attention" else None
    fed = _feed_forward(config, number)
    attention = width * (queries + 2 * key + query)
    return Layer(
        parameters=attention + fed.parameters,
        multiplied=attention + fed.multiplied,
        adapted=queries + 2 * key + query + 4 * width + (0 if fed.routed else 3 * (fed.inner + width)),
        query=query,
        key=key,
        inner=fed.inner,
        routed=fed.routed,
        normed=family.startswith(("qwen3", "olmo2", "olmo3", "olmoe", "gemma3")),
        recurrence=0,
        attention_per_context=4 * query,
        window=window,
        cached_per_token=2 * key,
        state=0,
    )


def _linear(config: Mapping[str, Any], number: int) -> Layer:
    width = int(config["hidden_size"])
    key_size = int(config["linear_key_head_dim"])
    value_size = int(config["linear_value_head_dim"])
    value_heads = int(config["linear_num_value_heads"])
    values = value_heads * value_size
    convolved = 2 * int(config["linear_num_key_heads"]) * key_size + values
    kernel = int(config["linear_conv_kernel_dim"])
    projected = convolved + values + 2 * value_heads
    fed = _feed_forward(config, number)
    attention = width * (projected + values) + convolved * kernel
    return Layer(
        parameters=attention + fed.parameters,
        multiplied=attention + fed.multiplied,
        adapted=projected + values + 4 * width + (0 if fed.routed else 3 * (fed.inner + width)),
        query=values,
        key=convolved,
        inner=fed.inner,
        routed=fed.routed,
        normed=True,
        recurrence=6 * value_heads * key_size * value_size,  # decay, update, read
        attention_per_context=0,
        window=None,
        cached_per_token=0,
        state=value_heads * key_size * value_size + convolved * kernel,
    )
