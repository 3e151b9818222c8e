"""Doubles: what a checkpoint's configuration and tokenizer decide is as in the original; no weight of it is needed."""

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.double import make_double
from lightning_weave.models.hub import INDEX_FILE
from tiny import save_model
from train.layouts import save_layout, stored_tensors

CPU = torch.device("cpu")
QUICK = ("in several files", "OLMo 3", "multimodal Gemma 3", "multimodal Qwen3.5 with experts", "own code")


def kinds(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors, whatever layer or expert they belong to."""
    return {re.sub(r"\.\d+\.", ".N.", name) for name in stored_tensors(folder)}


@pytest.mark.parametrize("name", QUICK)
def test_a_double_is_laid_out_as_its_original_and_needs_no_weights(name: str, tmp_path: Path) -> None:
    whole = save_layout(name, tmp_path / "whole")
    names = kinds(whole)
    dtypes = {tensor.dtype for tensor in stored_tensors(whole).values()}
    for file in whole.glob("*.safetensors"):
        file.unlink()
    original = Checkpoint(str(whole), trust_remote_code=name == "own code")
    make_double([original], tmp_path / "double")
    double = original.at(tmp_path / "double")
    assert double.is_double
    assert not original.is_double
    assert kinds(double.path) == names
    assert {tensor.dtype for tensor in stored_tensors(double.path).values()} <= dtypes
    assert [(one / INDEX_FILE).is_file() for one in (double.path, whole)] == 2 * [name == "in several files"]
    assert double.layout.pieces  # it can be trained and written back
    assert double.config.architectures == original.config.architectures
    assert double.stop_ids == original.stop_ids
    assert double.context_limit == original.context_limit
    assert (double.path / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    assert torch.isfinite(double.load(torch.float32, CPU)(torch.tensor([[1, 2, 3]])).logits).all()


def test_one_layer_of_each_kind_is_kept_and_heads_keep_their_size(tmp_path: Path) -> None:
    whole = save_layout("OLMo 3", tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    pattern = [*["sliding_attention"] * 3, "full_attention"] * 4
    config |= {"num_hidden_layers": 16, "layer_types": pattern, "hidden_size": 4096, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 11008}
    (whole / "config.json").write_text(json.dumps(config))
    make_double([Checkpoint(str(whole))], tmp_path / "double", heads=2)
    small = Checkpoint(str(tmp_path / "double")).config
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 1, 128)
    assert small.vocab_size == config["vocab_size"]


def test_a_post_double_is_a_small_step_from_its_pre_double_and_both_are_the_same_again(tmp_path: Path) -> None:
    pre, post = (Checkpoint(str(save_layout("tied", tmp_path / name))) for name in ("pre", "post"))
    for place in ("one", "two"):
        make_double([pre], tmp_path / place / "pre")
        make_double([pre, post], tmp_path / place / "post")
    for name in ("pre", "post"):
        first, second = ((tmp_path / place / name / "model.safetensors").read_bytes() for place in ("one", "two"))
        assert first == second
    before, after = (stored_tensors(tmp_path / "one" / name) for name in ("pre", "post"))
    for name, weight in before.items():
        if weight.ndim == 2:
            step = (after[name].float() - weight.float())[1:, 1:]
            assert 0.02 < float(step.std() / weight.float()[1:, 1:].std()) < 0.1, name


def test_a_double_writes_letters_and_ends(tmp_path: Path) -> None:
    original = Checkpoint(str(save_model(tmp_path / "whole", "student", "qwen3", 1)))
    make_double([original], tmp_path / "double")
    model = original.at(tmp_path / "double").load(torch.float32, CPU)
    chances = model(torch.arange(3, 35)[None]).logits.softmax(-1)[0].mean(0)
    words = [id for word in ("Question", "Answer") for id in original.tokenizer.encode(word)]
    assert float(chances[list(original.stop_ids)].sum()) > 1e-3
    assert float(chances[words].sum()) < 1e-3  # no tokens of several letters


def test_what_is_there_is_kept_until_the_original_changes(tmp_path: Path) -> None:
    original = Checkpoint(str(save_layout("tied", tmp_path / "whole")))
    make_double([original], tmp_path / "double")
    weights = tmp_path / "double" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    make_double([original], tmp_path / "double")
    assert weights.stat().st_mtime_ns == written
    (tmp_path / "whole" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    make_double([Checkpoint(str(tmp_path / "whole"))], tmp_path / "double")
    assert Checkpoint(str(tmp_path / "double")).stop_ids >= {1, 2}


def test_an_adapter_has_a_double_on_the_double_of_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = Checkpoint(str(save_model(tmp_path / "base", "student", "qwen3", 1)))
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], base_model_name_or_path=base.name)
    settings.save_pretrained(tmp_path / "adapter")
    adapter = Checkpoint(str(tmp_path / "adapter"))
    make_double([base], tmp_path / "doubles" / "base")
    make_double([adapter], tmp_path / "doubles" / "adapter", base=tmp_path / "doubles" / "base")
    double = Checkpoint(str(tmp_path / "doubles" / "adapter"))
    assert double.is_double
    assert double.base is not None
    ids = torch.arange(3, 15)[None]
    with_it, without = (one.load(torch.float32, CPU)(ids).logits for one in (double, double.base))
    assert not torch.equal(with_it, without)
