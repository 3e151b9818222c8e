"""Scoring through vLLM: its hidden states and our head give what transformers gives."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config, Qwen3MoeConfig

import tiny
from lightning_weave.errors import InputError
from lightning_weave.heads import find_head, hidden_states
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Context, Scorer, ScoreRow
from lightning_weave.models.vllm import VLLMBody, load_head
from lightning_weave.stages.engines import check_version

CPU = torch.device("cpu")
STAND_IN = Path(__file__).parents[1] / "stand_in"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
KINDS = {
    "tied": lambda shape: Qwen3Config(**shape, tie_word_embeddings=True),
    "soft cap": lambda shape: Gemma2Config(**shape, sliding_window=8, query_pre_attn_scalar=32),
    "experts": lambda shape: Qwen3MoeConfig(**shape, **EXPERTS, tie_word_embeddings=False),
}


def save(folder: Path, kind: str) -> Checkpoint:
    """Save a small checkpoint whose output matrix has rows that belong to no token, and win."""
    tokenizer = tiny.make_tokenizer("student")
    padded = -(-len(tokenizer) // 16) * 16 + 16
    torch.manual_seed(5)
    config = KINDS[kind](SHAPE | {"vocab_size": padded, "eos_token_id": tokenizer.eos_token_id})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
        model.get_output_embeddings().weight[len(tokenizer) :] *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Checkpoint(str(folder))


def some_rows(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, vocabulary, size=prompt).tolist(), rng.integers(0, vocabulary, size=response).tolist())
        for prompt, response in ((1, 5), (7, 1), (12, 30), (40, 60), (3, 90))
    ]


def engine_of(checkpoint: Checkpoint, python: str, options: dict[str, int]) -> Scorer:
    """Start an engine; two processes of one have no memory nodes of their own here."""
    body = VLLMBody(
        checkpoint,
        CPU,
        dtype="float32",
        max_length=128,
        python=python,
        options={"enforce_eager": True, **options},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if options else {},
    )
    return Scorer(body)


def hf_of(checkpoint: Checkpoint) -> Scorer:
    return Scorer.from_model(checkpoint.load(torch.float32, CPU), checkpoint.vocabulary)


TWO_WAYS = {"tensor_parallel_size": 2}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "options"),
    [("tied", {}), ("soft cap", {}), ("experts", {}), ("soft cap", TWO_WAYS), ("experts", TWO_WAYS)],
)
def test_an_engine_scores_as_transformers_does(
    kind: str, options: dict[str, int], tmp_path: Path, vllm_python: str
) -> None:
    checkpoint = save(tmp_path / "model", kind)
    rows = some_rows(checkpoint.vocabulary)
    engine = engine_of(checkpoint, vllm_python, options)
    try:
        assert engine.limit == 128
        found = engine.candidates(rows, 8)
        asked = [
            ScoreRow(
                np.array([*prompt, *response], np.int32),
                np.arange(len(prompt) - 1, len(prompt) + len(response) - 1),
                ids_TC,
                np.arange(ids_TC.size).reshape(ids_TC.shape) % 5 > 0,
            )
            for (prompt, response), (ids_TC, *_) in zip(rows, found, strict=True)
        ]
        scores = engine.score(asked)
    finally:
        engine.close()
    ours = hf_of(checkpoint)
    for theirs, expected in zip(found, ours.candidates(rows, 8, given=[ids_TC for ids_TC, *_ in found]), strict=True):
        for array, right in zip(theirs[1:], expected[1:], strict=True):
            np.testing.assert_allclose(array, right, atol=2e-4)
    for theirs, expected in zip(scores, ours.score(asked), strict=True):
        for array, right in zip(theirs, expected, strict=True):
            np.testing.assert_allclose(array, right, atol=2e-4)


@pytest.mark.parametrize(
    ("engine", "stored", "wide", "expected"),
    [
        ("bfloat16", "bfloat16", False, torch.bfloat16),
        ("float16", "float16", False, torch.float16),
        ("float32", "float32", False, torch.float32),
        ("bfloat16", "float32", False, torch.float32),  # the matrix is not rounded to the dtype of the states
        ("bfloat16", "bfloat16", True, torch.float32),  # nor are states that the engine has wider
    ],
)
def test_states_arrive_in_the_dtype_that_the_engine_computed_in(
    engine: str, stored: str, wide: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as they were: the engine hands them out in float32, and the file has them in 16 bits without a loss."""
    checkpoint = save(tmp_path / "model", "tied")
    model = checkpoint.load(torch.float32, CPU).to(getattr(torch, stored))
    model.save_pretrained(tmp_path / "model")
    said = {"PYTHONPATH": os.pathsep.join([str(STAND_IN), *filter(None, sys.path)]), "STAND_IN_COMPUTES": "1"}
    for name, value in {**said, "STAND_IN_RECORDS": str(tmp_path), **({"STAND_IN_WIDE": "1"} if wide else {})}.items():
        monkeypatch.setenv(name, value)
    body = VLLMBody(Checkpoint(checkpoint.name), CPU, dtype=engine)
    ids, positions = torch.arange(9), torch.tensor([2, 5, 8])
    try:
        found_ND = body.hidden(
            [Context(0, "a row", ids, positions, 9), Context(1, "a row", ids[:4], positions[:1], 4)], []
        )
    finally:
        body.close()
    assert found_ND.dtype == expected
    model = model.to(getattr(torch, engine))  # read at the same lengths: products of other shapes round otherwise
    whole_TD, start_TD = (hidden_states(model, part[None])[0].float() for part in (ids, ids[:4]))
    states_ND = torch.cat([whole_TD[[2, 5, 8]], start_TD[[2]]]) + (1e-6 if wide else 0)
    assert torch.equal(found_ND.float(), states_ND)


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 8 bits by row: integers, and the scale of each row."""
    scale = weight.abs().amax(dim=-1, keepdim=True) / 127
    return (weight / scale).round().clamp(-128, 127), scale


@pytest.mark.vllm
def test_a_quantised_checkpoint_is_scored(tmp_path: Path, vllm_python: str) -> None:
    checkpoint = save(tmp_path / "model", "tied")
    model = checkpoint.load(torch.float32, CPU)
    file = tmp_path / "model" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            integers, scale = rounded(module.weight)
            tensors |= {f"{name}.weight": integers.to(torch.int8), f"{name}.weight_scale": scale}
            module.weight.copy_(integers * scale)
            # As the kernel does: what goes into a layer is rounded too, token by token.
            module.register_forward_pre_hook(lambda _, args: (torch.mul(*rounded(args[0])),))
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    rows = some_rows(checkpoint.vocabulary)
    engine = engine_of(Checkpoint(checkpoint.name), vllm_python, {})
    try:
        found = engine.candidates(rows, 8)
    finally:
        engine.close()
    expected = Scorer.from_model(model, checkpoint.vocabulary).candidates(
        rows, 8, given=[ids_TC for ids_TC, *_ in found]
    )
    gaps = np.concatenate([np.abs(own[1] - other[1]).ravel() for own, other in zip(found, expected, strict=True)])
    print(f"int8: mean {gaps.mean():.1e}, largest {gaps.max():.1e} nats")
    whole = hf_of(save(tmp_path / "whole", "tied")).candidates(rows, 8, given=[ids_TC for ids_TC, *_ in found])
    lost = np.concatenate([np.abs(own[1] - other[1]).ravel() for own, other in zip(found, whole, strict=True)])
    assert gaps.mean() < 0.1 * lost.mean()  # its own rounding, not that of the checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_read_without_the_model(kind: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model", kind)
    model = checkpoint.load(torch.float32, CPU)
    head, embedded = load_head(checkpoint, CPU)
    expected = find_head(model, checkpoint.vocabulary)
    assert torch.equal(head.weight_VD, expected.weight_VD)
    assert (head.vocabulary, head.scale, head.softcap) == (expected.vocabulary, expected.scale, expected.softcap)
    assert embedded == model.config.vocab_size


def test_a_multimodal_checkpoint_has_its_head_behind_a_prefix(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model", "tied")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, file)
    assert torch.equal(load_head(checkpoint, CPU)[0].weight_VD, tensors["model.embed_tokens.weight"])


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model", "experts")
    file = tmp_path / "model" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, file)
    with pytest.raises(InputError, match=r'no unquantised output matrix \(lm_head\.weight\).*engine = "hf"'):
        load_head(checkpoint, CPU)


def test_an_engine_that_is_too_old_to_score_is_refused() -> None:
    check_version("0.32.0", "score", "[score]")
    check_version("1.2.3+cpu", "score", "[score]")
    check_version("unknown", "score", "[score]")
    with pytest.raises(InputError, match=r'vLLM 0\.31\.2 cannot score.*0\.32 or later.*"hf"'):
        check_version("0.31.2", "score", "[score]")
