"""Heads of real architectures, found and held against the models' own logits."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo3Config,
    PhiConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

import rounding
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.heads import Head, candidate_logprobs, find_head, hidden_states, top_candidates

VOCABULARY, ROWS = 150, 160
SHAPE = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
CONFIGS = {
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "qwen3.5": (Qwen3_5TextConfig, {"head_dim": 8, **LINEAR}),
    "llama": (LlamaConfig, {}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 8}),
    "olmo3": (Olmo3Config, {}),
    "gemma2": (Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 6.0}),
    "phi": (PhiConfig, {}),
    "granite": (GraniteConfig, {"logits_scaling": 2.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.6}),
}
NOT_PLAIN = {"gemma2", "phi", "granite", "cohere"}


def make_model(name: str, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SHAPE, **settings, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))  # biases and norms that are not at rest
        model.get_output_embeddings().weight.normal_(0, 0.4)
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_equal_a_plain_log_softmax_of_the_models_own_logits(name, tied):
    model = make_model(name, tied)
    head = find_head(model, VOCABULARY)
    assert head.plain is (name not in NOT_PLAIN)
    assert (head.weight_VD is model.get_input_embeddings().weight) is tied

    ids = torch.randint(0, VOCABULARY, (3, 11))
    logp_NV = torch.log_softmax(model(input_ids=ids).logits[..., :VOCABULARY].double(), dim=-1).flatten(0, 1)
    hidden_ND = hidden_states(model, ids).flatten(0, 1)
    sampled_N = torch.randint(0, VOCABULARY, (33,))
    ids_NC, logp_NC, other_N, sampled_logp_N = top_candidates(hidden_ND, head, sampled_N, 16, chunk=10)
    wanted_NC = logp_NV.topk(16).values
    assert wanted_NC.std() > 0.3  # not a flat distribution, where everything would be equal
    apart = 2 * rounding.of_logprobs(hidden_ND, head.weight_VD[:VOCABULARY], head.scale)  # the model rounds as well
    assert apart < 3e-4
    assert_close(logp_NC, wanted_NC, apart)
    assert_close(other_N, logp_NV.scatter(1, ids_NC, -torch.inf).logsumexp(1), apart)
    assert_close(sampled_logp_N, logp_NV.gather(1, sampled_N[:, None])[:, 0], apart)
    again_NC, other_again_N = candidate_logprobs(hidden_ND, head, ids_NC)
    assert_close(again_NC, wanted_NC, apart)
    assert_close(other_again_N, other_N.double(), apart)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, apart: float) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=apart)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_bfloat16_model_passes_though_it_rounds_its_own_logits(name):
    model = make_model(name, dtype=torch.bfloat16)
    head = find_head(model, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (1, 9))
    theirs = torch.log_softmax(model(input_ids=ids).logits[0, :, :VOCABULARY].float(), dim=-1)
    _, ours, _, _ = top_candidates(hidden_states(model, ids)[0], head, ids[0], 16)
    torch.testing.assert_close(ours, theirs.topk(16).values, rtol=0, atol=0.1)


def test_a_model_in_training_mode_is_compared_without_dropout_and_left_as_it_was():
    model = make_model("phi")
    model.model.embed_dropout.p = 0.9
    model.train()
    find_head(model, VOCABULARY)
    assert model.training


def test_adapters_are_looked_through():
    model = make_model("llama")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped.eval()
    ids = torch.randint(0, VOCABULARY, (1, 9))
    logits = find_head(wrapped, VOCABULARY).logits(hidden_states(wrapped, ids)[0])
    torch.testing.assert_close(logits, wrapped(input_ids=ids).logits[0, :, :VOCABULARY], rtol=0, atol=1e-5)


def test_hidden_states_never_touch_the_head_and_pass_keywords_on():
    model = make_model("llama")
    model.lm_head.weight.fill_(torch.nan)
    ids = torch.randint(0, VOCABULARY, (2, 6))
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(9) >= 3).long().expand(2, 9)
    shifted = hidden_states(
        model, padded, attention_mask=mask, position_ids=(torch.arange(9) - 3).clamp(0).expand(2, 9)
    )
    torch.testing.assert_close(shifted[:, 3:], hidden_states(model, ids), rtol=0, atol=1e-5)


def test_a_head_that_does_something_else_is_refused():
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + 0.1 * logits.square())
    with pytest.raises(Mismatch, match="LlamaForCausalLM are not scale"):
        find_head(model, VOCABULARY)


def test_a_soft_cap_that_goes_unnoticed_would_be_found_out():
    model = make_model("gemma2")
    model.config.get_text_config = lambda: LlamaConfig()  # a config that says nothing about it
    with pytest.raises(Mismatch, match="cap None"):
        find_head(model, VOCABULARY)


def test_what_a_user_can_get_wrong():
    model = make_model("llama")
    with pytest.raises(InputError, match="161 tokens but the head of LlamaForCausalLM has 160 rows"):
        find_head(model, ROWS + 1)
    with pytest.raises(InputError, match="LlamaModel"):
        hidden_states(model.model, torch.zeros(1, 1, dtype=torch.long))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(InputError, match="without adapters on its head"):
        find_head(adapted, VOCABULARY)


def test_logits_leave_out_rows_of_no_token():
    head = Head(torch.eye(5), 3, bias_V=torch.arange(5.0), scale=2.0, softcap=10.0)
    logits = head.logits(torch.ones(1, 5))
    torch.testing.assert_close(logits, 10 * torch.tanh(torch.tensor([[2.0, 3.0, 4.0]]) / 10))
