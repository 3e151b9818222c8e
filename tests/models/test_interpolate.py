"""Interpolation: the inputs at the ends bit for bit, the straight line between, streamed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_weave.errors import InputError
from lightning_weave.models.weights import interpolate
from tiny import save_model


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    first = save_model(tmp_path / "first", "student", "qwen3", 1)
    return first, save_model(tmp_path / "second", "student", "qwen3", 2, noise_from=first)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_ends_are_the_inputs_bit_for_bit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for share, source in ((0.0, pair[0]), (1.0, pair[1])):
        interpolate(*pair, share, tmp_path / f"at-{share}")
        expected, found = weights(source), weights(tmp_path / f"at-{share}")
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_between_them_lies_the_straight_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    interpolate(*pair, 0.8, tmp_path / "between")
    one, two, found = weights(pair[0]), weights(pair[1]), weights(tmp_path / "between")
    for name in one:
        torch.testing.assert_close(found[name], 0.2 * one[name] + 0.8 * two[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "between")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_low_precision_and_many_files(tmp_path: Path) -> None:
    """bfloat16 is mixed in float32 and rounded once; tensors are found in whatever file each side has them."""
    generator = torch.Generator().manual_seed(0)
    tensors = [{f"t{n}": torch.randn(3, n + 1, generator=generator).bfloat16() for n in range(4)} for _ in range(2)]
    for side, (folder, split) in enumerate((("a", 2), ("b", 3))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        names = list(tensors[side])
        save_file({name: tensors[side][name] for name in names[:split]}, tmp_path / folder / "1.safetensors")
        save_file({name: tensors[side][name] for name in names[split:]}, tmp_path / folder / "2.safetensors")
    interpolate(tmp_path / "a", tmp_path / "b", 0.3, tmp_path / "out")
    found = weights(tmp_path / "out")
    for name, tensor in tensors[0].items():
        expected = torch.lerp(tensor.float(), tensors[1][name].float(), 0.3).bfloat16()
        assert torch.equal(found[name], expected)
    assert sorted(load_file(tmp_path / "out" / "1.safetensors")) == ["t0", "t1"]


def test_other_shapes_are_refused_and_nothing_is_left(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "accuracy", "llama", 3)
    with pytest.raises(InputError, match="same"):
        interpolate(pair[0], other, 0.5, tmp_path / "out")
    with pytest.raises(InputError, match="between 0"):
        interpolate(*pair, 1.5, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="exists already"):
        interpolate(*pair, 0.5, pair[1])


def test_only_what_a_loader_would_read_is_mixed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    expected = weights(pair[0])
    save_file({name: tensor + 1 for name, tensor in expected.items()}, pair[0] / "zzz-old.safetensors")
    interpolate(*pair, 0.0, tmp_path / "stray")
    found = weights(tmp_path / "stray")
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    names = sorted(expected)
    for folder in pair:
        whole = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        for part, chosen in (("a", names[:5]), ("b", names[5:])):
            save_file({name: whole[name] for name in chosen}, folder / f"{part}.safetensors")
        where = {name: f"{'a' if name in names[:5] else 'b'}.safetensors" for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    interpolate(*pair, 0.0, tmp_path / "indexed")
    assert all(torch.equal(expected[name], weights(tmp_path / "indexed")[name]) for name in expected)
    for folder in pair:
        (folder / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"first/b\.safetensors: cannot be read"):
        interpolate(*pair, 0.5, tmp_path / "out")


def test_what_cannot_be_mixed_is_refused_and_nothing_is_left(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights_path = pair[1] / "model.safetensors"
    whole = weights_path.read_bytes()
    weights_path.write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"second/model\.safetensors: cannot be read"):
        interpolate(*pair, 0.5, tmp_path / "out")
    weights_path.write_bytes(whole)
    with pytest.raises(InputError, match="no directory can be made there"):
        interpolate(*pair, 0.5, pair[0] / "config.json" / "out")
    for folder in pair:
        tensors = load_file(folder / "model.safetensors")
        first = min(tensors)
        save_file({**tensors, first: tensors[first].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"is torch\.float8_e4m3fn, which cannot be mixed"):
        interpolate(*pair, 0.5, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_what_the_configurations_differ_in_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (pair[0] / "README.md").write_text("the first one's card")
    assert interpolate(*pair, 0.25, tmp_path / "same") == []
    assert (
        tmp_path / "same" / "README.md"
    ).read_text() == "(1 - 0.25) x `first` + 0.25 x `second`, weight by weight.\n"
    config = json.loads((pair[1] / "config.json").read_text())
    (pair[1] / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 77, "dtype": "float16"}))
    assert interpolate(*pair, 0.25, tmp_path / "other") == ["max_position_embeddings"]
