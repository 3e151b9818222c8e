"""Merge checkpoints weight by weight: linear, task arithmetic, TIES and DARE (by peft), tensor by tensor."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import check_weights, quantisation_method, weight_files
from lightning_weave.models.weights import LowRankUpdate, StoredTensor, match_names, stored_tensors

MergeMethod = Literal["linear", "task-arithmetic", "ties", "dare"]


@dataclass(frozen=True)
class Difference:
    """One weighted difference of weights, post - pre, both of the student's shapes; adapters count with their base."""

    name: str  # for messages
    weight: float
    post: Checkpoint
    pre: Checkpoint


@dataclass(frozen=True)
class _Weights:
    """The tensors of a checkpoint, and what an adapter adds to them, by the names in the student's files."""

    tensors: Mapping[str, StoredTensor]
    updates: Mapping[str, LowRankUpdate]

    def read(self, key: str) -> Tensor:
        """Read one tensor, in float32."""
        weight = self.tensors[key].read().float()
        return weight + self.updates[key].rows(slice(None), weight.device) if key in self.updates else weight


def check_merge(student: Checkpoint, differences: Sequence[Difference], method: MergeMethod) -> None:
    """Refuse models whose weights cannot be added to the student's. Reads headers and tokenizers, no weights."""
    if method in ("ties", "dare"):
        try:
            import peft  # noqa: F401
        except ImportError:
            raise InputError(f'merge = "{method}" needs the package peft: pip install peft') from None
    check_weights(student.path)
    for one in differences:
        for side in (one.post, one.pre):
            _check_fit(side, student, one.name)


def merge(
    student: Checkpoint, differences: Sequence[Difference], method: MergeMethod, density: float, out: Path
) -> None:
    """Write the student plus the merged differences into an empty directory.

    Tensor by tensor in float32, rounded once to the student's dtype; everything but weights is the student's.
    """
    check_merge(student, differences, method)
    own = _open(student, student)
    pairs = [(_open(one.post, student), _open(one.pre, student)) for one in differences]
    weights = torch.tensor([one.weight for one in differences])
    kept = set(weight_files(student.path))
    for path in sorted(student.path.iterdir()):
        if path.is_file() and (path.suffix != ".safetensors" or path in kept) and path.name != "README.md":
            shutil.copyfile(path, out / path.name)
    for key, tensor in own.tensors.items():
        if tensor.dtype.is_floating_point:
            merged = _combine([post.read(key) - pre.read(key) for post, pre in pairs], weights, method, density, key)
            tensor.write(out, (own.read(key) + merged).to(tensor.dtype))


def _combine(differences: list[Tensor], weights: Tensor, method: MergeMethod, density: float, key: str) -> Tensor:
    if method in ("linear", "task-arithmetic"):
        return torch.stack([weight * each for weight, each in zip(weights, differences, strict=True)]).sum(dim=0)
    from peft.utils.merge_utils import dare_linear, ties

    if method == "ties":
        return ties(differences, weights, density)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(key.encode()))
        return dare_linear(differences, weights, density)


def _check_fit(side: Checkpoint, student: Checkpoint, name: str) -> None:
    """Refuse tensors, shapes or tokens that differ from the student's, and quantised weights."""
    cannot = f"{name}: {side} cannot be merged with {student}"
    check_weights(side.path)
    if quantised := quantisation_method(side.path) or quantisation_method(student.path):
        raise InputError(f"{cannot}: quantised weights ({quantised}) cannot be added")
    own, tensors = (stored_tensors(one.path) for one in (student, side))
    if missing := sorted(own.keys() ^ tensors.keys()):
        raise InputError(f"{cannot}: only one of them has {missing[0]}")
    for key, tensor in own.items():
        other = tensors[key]
        if other.shape != tensor.shape:
            raise InputError(f"{cannot}: {key} is {list(other.shape)}, not {list(tensor.shape)}")
        if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (other.dtype, tensor.dtype)):
            raise InputError(f"{cannot}: {key} has 8 bits. Convert both to bfloat16 first")
    ours, theirs = ({id: word for word, id in one.tokenizer.get_vocab().items()} for one in (student, side))
    if differing := [id for id in sorted(ours.keys() & theirs.keys()) if ours[id] != theirs[id]]:
        first = differing[0]
        raise InputError(f"{cannot}: token {first} is {theirs[first]!r} in one and {ours[first]!r} in the other")
    _open(side, student)


def _open(checkpoint: Checkpoint, student: Checkpoint) -> _Weights:
    """Find the tensors of a checkpoint, and where in the student's files an adapter's updates belong."""
    tensors = stored_tensors(checkpoint.path)
    files = {}
    if checkpoint.base is not None:
        found = match_names(tensors, student.build_meta())
        files = {name: key for key, name, converter, _ in found if converter is None}
    if unknown := checkpoint.updates.keys() - files.keys():
        raise InputError(f"{checkpoint}: changes {min(unknown)}, a tensor that the files of {student} lack")
    return _Weights(tensors, {files[name]: update for name, update in checkpoint.updates.items()})
