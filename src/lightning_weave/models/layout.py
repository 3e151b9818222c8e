"""How a checkpoint's files hold a model's weights: read and written in pieces, never whole.

Names in the files are often not those of the model: a text model reads a part of a multimodal checkpoint, and experts
lie there one by one. Transformers knows both ways; no other file asks it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from lightning_weave.errors import InputError, first_line
from lightning_weave.models.files import check_trainable, check_weights, weight_files

EVERYTHING = slice(None)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    end: int

    def read(self, rows: slice = EVERYTHING) -> Tensor:
        """Read some of its rows, which lie together, and no other byte."""
        start, stop, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        size = (self.end - self.begin) // (self.shape[0] if self.shape else 1)
        content = torch.empty((stop - start) * size, dtype=torch.uint8)
        with open(self.file, "rb") as file:
            file.seek(self.begin + start * size)
            if file.readinto(content.numpy().data) != len(content):
                raise InputError(f"{self.file}: is cut off. Download or export the checkpoint again")
        return content.view(self.dtype).view(shape)

    def write(self, folder: Path, tensor: Tensor) -> None:
        """Put other numbers in its place, in a copy of its file."""
        with open(folder / self.file.name, "r+b") as file:
            file.seek(self.begin)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Piece:
    """Weights of a model that are made of the same tensors of the files: mostly one of one."""

    names: tuple[str, ...]  # in the model
    keys: Mapping[str, tuple[str, ...]]  # in the files, by the pattern that they match
    converter: WeightConverter | None  # None: the tensor itself

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


@dataclass(frozen=True)
class Layout:
    """Where the weights of a model are in the files of its checkpoint."""

    folder: Path
    model: Any  # its shapes only
    stored: Mapping[str, Stored]

    @classmethod
    def of(cls, folder: Path, skeleton: Any) -> "Layout":
        """Find all weights of a model in a directory; what the directory has beside them is left alone."""
        check_weights(folder)
        check_trainable(folder)
        layout = cls(folder, skeleton, dict(_stored(folder)))
        layout._check()
        return layout

    @cached_property
    def pieces(self) -> list[Piece]:
        """The weights in the order of the files' names, as transformers itself would look for them."""
        conversions = get_model_conversion_mapping(self.model)
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in conversions if not isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        state = self.model.state_dict()
        sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        converted: dict[str, WeightConverter] = {}
        for key in sorted(self.stored, key=dot_natural_key):
            prefix = self.model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                continue
            sources[name][pattern or ""].append(key)
            if pattern:
                converted[name] = by_pattern[pattern]
        # What was used on the way in is what transformers turns round on the way out.
        self.model._weight_conversions = [entry for entry in conversions if entry.was_used()]
        return [
            self._piece(name, {pattern: tuple(keys) for pattern, keys in groups.items()}, converted.get(name))
            for name, groups in sources.items()
        ]

    def _piece(self, name: str, keys: Mapping[str, tuple[str, ...]], converter: WeightConverter | None) -> Piece:
        if converter is None:
            return Piece((name,), keys, None)
        piece = Piece((name,), keys, converter)
        tensors = {key: torch.empty(self.stored[key].shape, device="meta") for key in piece.all_keys}
        try:
            return Piece(tuple(self._converted(piece, tensors)), keys, converter)
        except RuntimeError as error:
            raise InputError(
                f"{self.folder}: the {len(tensors)} tensors of {name} do not fit together ({first_line(error)}), "
                f"{piece.all_keys[0]} among them. Download or export the checkpoint again"
            ) from error

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each weight of the model has in the files, by its name in the model."""
        return {name: self.stored[piece.all_keys[0]].dtype for piece in self.pieces for name in piece.names}

    def read(self, wanted: Mapping[str, slice]) -> Iterator[tuple[str, Tensor]]:
        """Read the given rows of the given weights, and nothing else where the files allow it."""
        for piece in self.pieces:
            names = [name for name in piece.names if name in wanted]
            if names and piece.converter is None:
                yield names[0], self.stored[piece.all_keys[0]].read(wanted[names[0]])
            elif names and _is_list_of_rows(piece):
                own = Piece(piece.names, {p: keys[wanted[names[0]]] for p, keys in piece.keys.items()}, piece.converter)
                yield from self._converted(own, {key: self.stored[key].read() for key in own.all_keys}).items()
            elif names:
                whole = self._converted(piece, {key: self.stored[key].read() for key in piece.all_keys})
                yield from ((name, whole[name][wanted[name]]) for name in names)

    def write(self, folder: Path, piece: Piece, weights: Mapping[str, Tensor]) -> None:
        """Put the weights of a piece where its tensors are, in a copy of the checkpoint's files."""
        for key, tensor in self._reverted(piece, weights).items():
            self.stored[key].write(folder, tensor)

    def _converted(self, piece: Piece, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the weights of a piece of its tensors."""
        converter = deepcopy(piece.converter)
        assert converter is not None, piece.names
        for pattern, keys in piece.keys.items():
            for key in keys:
                converter.add_tensor(piece.names[0], key, pattern, tensors[key])
        weights = converter.convert(piece.names[0], model=self.model, config=self.model.config)
        return {name: weight[0] if isinstance(weight, list) else weight for name, weight in weights.items()}

    def _reverted(self, piece: Piece, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the tensors of a piece of its weights."""
        if piece.converter is None:
            return {piece.all_keys[0]: weights[piece.names[0]]}
        return revert_weight_conversion(self.model, dict(weights))

    def _check(self) -> None:
        """Refuse files that lack weights of the model, or whose tensors could not be written back."""
        state = self.model.state_dict()
        names = {name for piece in self.pieces for name in piece.names}
        for pair in self.model.all_tied_weights_keys.items():  # one of two tied names is enough
            names |= set(pair) if names & set(pair) else set()
        ignored = self.model._keys_to_ignore_on_load_missing or []
        absent = sorted(name for name in state.keys() - names if not any(re.search(each, name) for each in ignored))
        if absent:
            raise InputError(
                f"{self.folder}: the weights lack {len(absent)} tensors of the model, {absent[0]} among them. "
                "Download or export the checkpoint again"
            )
        for piece in self.pieces:
            weights = {name: torch.empty(state[name].shape, device="meta") for name in piece.names}
            shapes = {key: tuple(tensor.shape) for key, tensor in self._reverted(piece, weights).items()}
            if shapes != (held := {key: self.stored[key].shape for key in piece.all_keys}):
                differing = sorted(dict(shapes.items() ^ held.items()))
                raise InputError(
                    f"{self.folder}: the tensors of {piece.names[0]} are not as the model's configuration has them "
                    f"({differing[0]}). Check its config.json and files"
                )


def _is_list_of_rows(piece: Piece) -> bool:
    """Whether each tensor of the files is a row of the weight, as experts are that lie there one by one."""
    assert piece.converter is not None, piece.names
    first, *rest = piece.converter.operations
    stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return stacked and len(piece.names) == 1 and all(isinstance(op, Concatenate) and op.dim != 0 for op in rest)


def _stored(folder: Path) -> Iterator[tuple[str, Stored]]:
    for path in weight_files(folder):
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for key, entry in header.items():
                if key != "__metadata__":
                    begin, end = (8 + size + offset for offset in entry["data_offsets"])
                    yield key, Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end)
        except (OSError, ValueError, KeyError, MemoryError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Download the checkpoint again") from None
