"""Walk from one checkpoint to another of the same shape, one tensor in memory at a time (model interpolation)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_weave.errors import InputError
from lightning_weave.models.files import checkpoint_json
from lightning_weave.models.weights import Weights
from lightning_weave.store import make_directory, whole_directory

ALIGNMENT = 8
NOT_SHAPING = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "rehearsal",
}


def interpolate(first: Path, second: Path, share: float, out: Path) -> list[str]:
    """Write (1 - share) * first + share * second; everything but weights and card is the first's.

    Returns the keys of config.json in which the two differ, since only the first's is kept.
    """
    if not 0 <= share <= 1:
        raise InputError(f"--lambda {share}: must be between 0 (the first checkpoint) and 1 (the second)")
    if out.exists():
        raise InputError(f"{out} exists already. Give another directory, or remove it")
    one = Weights.of(first)
    two = Weights.of(second)
    _check_same_shape(one, two)
    differing = _differing_keys(first, second)
    make_directory(out.parent, str(out))
    with whole_directory(out) as unfinished:
        for path in sorted(first.iterdir()):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, unfinished / path.name)
        card = f"(1 - {share:g}) x `{first.name}` + {share:g} x `{second.name}`, weight by weight.\n"
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        for file in sorted(set(one.files.values())):
            names = [name for name, holder in one.files.items() if holder == file]
            _write(unfinished / file, {name: one.shape(name) for name in names}, _mixed(one, two, names, share))
    return differing


def _differing_keys(first: Path, second: Path) -> list[str]:
    one, two = (checkpoint_json(folder / "config.json") for folder in (first, second))
    return sorted(key for key in one.keys() | two.keys() if key not in NOT_SHAPING and one.get(key) != two.get(key))


def _mixed(one: Weights, two: Weights, names: list[str], share: float) -> Iterator[Tensor]:
    for name in names:
        if share in (0, 1):  # bit for bit, whatever float32 would make of it
            yield (two if share else one).read(name)
        else:
            a = one.read(name)
            b = two.read(name)
            yield torch.lerp(a.float(), b.float(), share).to(a.dtype) if a.is_floating_point() else a


def _check_same_shape(one: Weights, two: Weights) -> None:
    if differing := sorted(one.files.keys() ^ two.files.keys()):
        raise InputError(
            f"{one.folder} and {two.folder} are not of one shape: only one of them has {differing[0]}. "
            "Interpolation needs two checkpoints of the same architecture"
        )
    for name in one.files:
        if (dtype := one.shape(name)[1]) not in _BYTES:
            raise InputError(f"{one.folder}: {name} is {dtype}, which cannot be mixed. Convert it to bfloat16 first")
        if one.shape(name) != two.shape(name):
            raise InputError(
                f"{name} is {one.shape(name)} in {one.folder} but {two.shape(name)} in {two.folder}. "
                "Interpolation needs two checkpoints of the same shape and dtype"
            )


def _write(path: Path, shapes: dict[str, tuple[list[int], str]], tensors: Iterator[Tensor]) -> None:
    """Write a safetensors file tensor by tensor; the library would want all of them at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
