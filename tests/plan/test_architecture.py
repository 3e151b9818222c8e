"""Sizes read from a config, against the models themselves."""

import json
from importlib.resources import files

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_weave.config import Lora
from lightning_weave.errors import InputError
from lightning_weave.heads.tiles import CHUNK_BYTES_GPU
from lightning_weave.plan.architecture import find_shape, read_shape
from lightning_weave.plan.memory import LOGITS, lora_parameters, training_memory
from lightning_weave.train.student import with_lora

CONFIGS = sorted((files("lightning_weave.plan") / "configs").iterdir(), key=lambda path: path.name)
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {
    "llama": LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, **HEADS, head_dim=32, tie_word_embeddings=False),
    "olmo3": Olmo3Config(**SMALL, **HEADS, sliding_window=8, pad_token_id=None, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL,
        **HEADS,
        head_dim=32,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **SMALL,
        **HEADS,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_papers_models_have_as_many_parameters_as_counted(path) -> None:
    config = json.loads(path.read_text())
    config = config.get("text_config", config)
    kind = config.pop("model_type")
    with torch.device("meta"):
        # MiMo is a Qwen2 with custom code for speculative layers, which scoring never runs.
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen2" if kind == "mimo" else kind](**config))
    shape = find_shape(path.name.removesuffix(".json").replace("--", "/"))
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=1e-3)
    embedding = model.get_input_embeddings().weight.numel()
    looked_up = 0 if config["tie_word_embeddings"] else embedding
    assert shape.active == pytest.approx(shape.parameters - looked_up, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_work_is_what_torch_counts(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[family], attn_implementation="eager")
    shape, tokens = read_shape(TINY[family].to_dict(), family), 48
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long))
    # The eager model multiplies the whole square of attention; half of it is masked and not counted here.
    masked = sum(layer.attention_flops for layer in shape.layers) * tokens * tokens / 2
    assert counter.get_total_flops() == pytest.approx(sum(shape.flops(0, tokens)) + masked, rel=0.01)


def test_only_response_positions_pay_for_the_head() -> None:
    shape = read_shape(TINY["qwen3"].to_dict(), "")
    assert sum(shape.flops(0, 10)) - sum(shape.flops(6, 4)) == 2 * 6 * 64 * 512


def test_a_window_limits_what_a_layer_sees() -> None:
    shape = read_shape(TINY["olmo3"].to_dict(), "")
    assert [layer.window for layer in shape.layers] == [8, 8, 8, None]
    seen = [min(position, 8) for position in range(1, 41)]  # position 1 sees itself
    full = list(range(1, 41))
    counted = sum(shape.flops(0, 40)) - 40 * 2 * (shape.active)
    per_context = shape.layers[0].attention_flops
    assert counted == pytest.approx(per_context * (3 * sum(seen) + sum(full)), rel=0.05)


@pytest.mark.parametrize("family", TINY)
def test_generating_keeps_as_many_bytes_as_counted(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[family], dtype=torch.float32)
    shape, tokens = read_shape(TINY[family].to_dict(), family), 24
    with torch.no_grad():
        cache = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        kept = (
            [layer.keys, layer.values] if hasattr(layer, "keys") else [layer.conv_states[0], layer.recurrent_states[0]]
        )
        held += sum(4 * part.numel() for part in kept)
    assert shape.cache_bytes(tokens, 4) == pytest.approx(held, rel=0.1)  # a window may keep one token less


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_lora_is_as_large_as_counted(family: str) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    wrapped = with_lora(AutoModelForCausalLM.from_config(TINY[family]), Lora(rank=3), 0)
    added = sum(weight.numel() for name, weight in wrapped.named_parameters() if "lora" in name)
    assert lora_parameters(read_shape(TINY[family].to_dict(), ""), 3) == added


def test_training_memory_shrinks_with_gpus_checkpoints_and_lora() -> None:
    shape = find_shape("Qwen/Qwen3-4B")
    alone = training_memory(shape, 16384, 1, True, None)
    assert alone.weights == 12 * shape.parameters  # masters and two moments; gradients come and go
    assert alone.total > 16 * shape.parameters
    assert training_memory(shape, 16384, 8, True, None).weights == alone.weights / 8
    assert training_memory(shape, 16384, 1, False, None).working > 3 * alone.working
    assert training_memory(shape, 16384, 1, True, lora_parameters(shape, 16)).weights < 0.4 * alone.weights


def test_a_mixture_of_experts_is_as_large_and_multiplies_as_much_as_counted() -> None:
    config = TINY["qwen3_moe"]
    model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(config.to_dict(), "")
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.01)
    idle = 3 * (8 - 2) * 3 * 64 * 24  # three layers of experts, of which a token goes to two
    embedding = 64 * 512
    assert shape.active == shape.parameters - idle - embedding


def test_the_chunk_of_logits_is_the_heads_own() -> None:
    assert LOGITS == CHUNK_BYTES_GPU


def test_strange_configs_are_refused() -> None:
    with pytest.raises(InputError, match="mixtures of experts like Qwen3's"):
        read_shape({**TINY["qwen3"].to_dict(), "kv_lora_rank": 8}, "there")
    with pytest.raises(InputError, match=r"there: 'num_hidden_layers' is missing"):
        read_shape({"model_type": "bert"}, "there")
    with pytest.raises(InputError, match="no such directory"):
        find_shape("./nowhere")


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_14B = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40}
QWEN3_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}


@pytest.mark.parametrize(
    ("size", "tokens", "gpus", "base", "card"),
    [
        pytest.param(QWEN3_32B, 32768, 64, None, 80e9, id="32B, all weights, 64 x 80 GB, 32k tokens"),
        pytest.param(QWEN3_8B, 8192, 1, "own", 24e9, id="8B, LoRA, one card of 24 GB, 8k tokens"),
        pytest.param(QWEN3_14B, 8192, 1, "nf4", 24e9, id="14B, LoRA on 4 bits, one card of 24 GB, 8k tokens"),
    ],
)
def test_the_largest_students_that_fit(size: dict, tokens: int, gpus: int, base: str | None, card: float) -> None:
    """With checkpointing. The arithmetic is held to the fake device elsewhere; 4 bits to bitsandbytes' own sizes."""
    shape = read_shape({**QWEN3, **size}, "")
    trained = None if base is None else lora_parameters(shape, 16)
    needed = training_memory(shape, tokens, gpus, True, trained, base=base or "own")
    assert max(needed.total, needed.loading) < 0.95 * card
