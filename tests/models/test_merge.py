"""Merging: every method against a slow reference, streamed, in the student's dtype; what differs is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.merge import Difference, MergeMethod, check_merge, merge
from tiny import make_tokenizer, save_model


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """The student, and two pairs of its architecture that were not trained from it."""
    student = save_model(tmp_path / "student", "student", "qwen3", 1)
    pres = [save_model(tmp_path / f"pre-{n}", "student", "qwen3", 10 + n) for n in range(2)]
    posts = [save_model(tmp_path / f"post-{n}", "student", "qwen3", 20 + n, pre) for n, pre in enumerate(pres)]
    return [student, posts[0], pres[0], posts[1], pres[1]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def merged(models: list[Path], out: Path, method: MergeMethod, shares: tuple[float, float] = (0.7, -0.4)) -> dict:
    checkpoints = [Checkpoint(str(path)) for path in models]
    pairs = [Difference("a", shares[0], *checkpoints[1:3]), Difference("b", shares[1], *checkpoints[3:5])]
    if method == "linear":
        pairs = [Difference(one.name, one.weight, one.post, checkpoints[0]) for one in pairs]
    out.mkdir()
    merge(checkpoints[0], pairs, method, 0.3, out)
    return weights(out)


def reference(method: str, tensors: list[np.ndarray], shares: tuple[float, float]) -> np.ndarray:
    """One number after the other: the papers' equations, with TIES' magnitudes as peft has them."""
    student, post_a, pre_a, post_b, pre_b = tensors
    if method == "linear":
        return (1 - sum(shares)) * student + shares[0] * post_a + shares[1] * post_b
    differences = [post_a - pre_a, post_b - pre_b]
    if method == "ties":
        for each in differences:
            keep = np.argsort(-np.abs(each.ravel()), kind="stable")[: int(0.3 * each.size)]
            each.ravel()[np.setdiff1d(np.arange(each.size), keep)] = 0
    out = student.copy()
    for place in np.ndindex(student.shape):
        one = [each[place] for each in differences]
        if method == "ties":
            sign = 1 if sum(one) >= 0 else -1
            agree = [np.sign(value) == sign for value in one]
            kept = [share * value for share, value, same in zip(shares, one, agree, strict=True) if same]
            out[place] += sum(kept) / max(len(kept), 1)
        else:
            out[place] += shares[0] * one[0] + shares[1] * one[1]
    return out


@pytest.mark.parametrize("method", ["linear", "task-arithmetic", "ties"])
def test_merged_weights_are_the_equations(models: list[Path], tmp_path: Path, method: MergeMethod) -> None:
    shares = (0.7, 0.4 if method == "ties" else -0.4)
    found = merged(models, tmp_path / "out", method, shares)
    inputs = [weights(path) for path in models]
    assert found.keys() == inputs[0].keys()
    for name, tensor in found.items():
        expected = reference(method, [each[name].double().numpy() for each in inputs], shares)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_dare_drops_at_random_and_rescales(models: list[Path], tmp_path: Path) -> None:
    """With one difference: every weight is the student's, or has moved by difference / density. Twice the same."""
    found, again = (merged(models, tmp_path / name, "dare", (1.0, 0.0)) for name in ("one", "two"))
    student, post, pre = (weights(path) for path in models[:3])
    kept = total = 0
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name])
        moved = tensor - student[name]
        scaled = (post[name] - pre[name]) / 0.3
        is_kept = moved.abs() > 1e-6
        torch.testing.assert_close(moved[is_kept], scaled[is_kept], rtol=1e-3, atol=1e-5)
        kept, total = kept + int(is_kept.sum()), total + moved.numel()
    assert 0.25 < kept / total < 0.35


def test_low_precision_is_rounded_once_and_files_may_be_split(models: list[Path], tmp_path: Path) -> None:
    for folder in models:
        whole = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        names = sorted(whole)
        where = {name: f"{'a' if name in names[:5] else 'b'}.safetensors" for name in names}
        for file in set(where.values()):
            save_file({name: whole[name] for name in names if where[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = merged(models, tmp_path / "out", "task-arithmetic")
    inputs = [weights(path) for path in models]
    for name, tensor in found.items():
        one, *four = (each[name].float() for each in inputs)
        assert torch.equal(tensor, (one + (0.7 * (four[0] - four[1]) - 0.4 * (four[2] - four[3]))).bfloat16())


def test_an_adapter_adds_its_update(models: list[Path], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(models[0])
    wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(models[0])}))
    student, adapter = Checkpoint(str(models[0])), Checkpoint(str(tmp_path / "adapter"))
    (tmp_path / "out").mkdir()
    merge(student, [Difference("a", 0.5, adapter, student)], "task-arithmetic", 1.0, tmp_path / "out")
    before, found = weights(models[0]), weights(tmp_path / "out")
    full = {name: tensor for name, tensor in wrapped.merge_and_unload().state_dict().items() if name in before}
    changed = {name for name in before if not torch.equal(before[name], found[name])}
    assert changed == {name for name in before if "q_proj" in name}
    for name in changed:
        torch.testing.assert_close(found[name], (before[name] + full[name]) / 2)
    (tmp_path / "other").mkdir()  # a student that is an adapter: halfway between it and its base
    merge(adapter, [Difference("a", 0.5, student, adapter)], "linear", 1.0, tmp_path / "other")
    for name, tensor in weights(tmp_path / "other").items():
        torch.testing.assert_close(tensor, found[name])


def test_what_cannot_be_merged_is_refused(models: list[Path], tmp_path: Path) -> None:
    student = Checkpoint(str(models[0]))

    def refused(other: Path, match: str) -> None:
        with pytest.raises(InputError, match=match):
            check_merge(student, [Difference("weights.x", 1.0, Checkpoint(str(other)), student)], "task-arithmetic")

    refused(save_model(tmp_path / "llama", "student", "llama", 3), "weights.x: .*llama cannot be merged.*only one of")
    refused(save_model(tmp_path / "words", "accuracy", "qwen3", 3), "token [0-9]+ is ")
    wide = AutoModelForCausalLM.from_pretrained(models[1])
    wide.resize_token_embeddings(200)
    wide.save_pretrained(tmp_path / "wide")
    make_tokenizer("student").save_pretrained(tmp_path / "wide")
    refused(tmp_path / "wide", r"embed_tokens.weight is \[200, 16\], not")
    tensors = load_file(models[1] / "model.safetensors")
    first = min(tensors)
    save_file({**tensors, first: tensors[first].to(torch.float8_e4m3fn)}, models[1] / "model.safetensors")
    refused(models[1], f"{first} has 8 bits")
