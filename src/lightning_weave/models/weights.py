"""The tensors in a checkpoint's safetensors files, and how they and LoRA adapters become the weights of a model."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
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
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGE,
    check_adapter,
    check_trainable,
    check_weights,
    explain_fault,
    quantisation_method,
    weight_files,
)

ALL_ROWS = slice(None)
PEFT_PREFIX = "base_model.model."  # of the names of an adapter's layers
SAME_DIRECTION = 1 - 1e-4  # rows that only weight decay moved stay this parallel; exact equality misses them
NEAR_ZERO = 1e-3  # of the median row's norm
SAMPLE_BLOCKS = 64  # where the median norm is measured: spread over the vocabulary, read in few blocks
BLOCK_ROWS = 32
OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight")
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # the output matrix too if they are tied


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def read(self, rows: slice = ALL_ROWS) -> Tensor:
        """Read some of its rows, which are contiguous, and no other byte."""
        start, stop, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        content = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        with open(self.file, "rb") as file:
            file.seek(self.offset + start * row_bytes)
            if file.readinto(content.numpy().data) != len(content):
                raise InputError(f"{self.file}: the file is truncated. Download or export the checkpoint again")
        return content.view(self.dtype).view(shape)

    def write(self, folder: Path, tensor: Tensor) -> None:
        """Overwrite it in a copy of its file in another folder."""
        with open(folder / self.file.name, "r+b") as file:
            file.seek(self.offset)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of the files that a loader reads. Only the headers of the files are read."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        found = {}
        with explain_fault(path, "cannot be read", "Download the checkpoint again"):
            with open(path, "rb") as file:
                offset = 8 + int.from_bytes(file.read(8), "little")  # the header's length, then the header
            with safe_open(path, framework="pt") as tensors_of_file:
                for key in tensors_of_file.offset_keys():  # safetensors refuses files with gaps between tensors
                    mapped = tensors_of_file.get_slice(key)[...]  # memory-mapped, not read
                    found[key] = StoredTensor(path, mapped.dtype, tuple(mapped.shape), offset)
                    offset += mapped.nbytes
        tensors |= sorted(found.items())
    return tensors


def match_names(stored: Iterable[str], meta_model: Any) -> Iterator[tuple[str, str, WeightConverter | None, str]]:
    """Yield each tensor of the files with its weight in the model, and what converts it, with the pattern it matches.

    Tensors that the model does not use are left out.
    """
    conversions = get_model_conversion_mapping(meta_model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = meta_model.state_dict()
    prefix = meta_model.base_model_prefix
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            yield key, name, by_pattern[pattern] if pattern else None, pattern or ""
    # Transformers reverses the conversions that were used when it saves the model.
    meta_model._weight_conversions = [entry for entry in conversions if entry.was_used()]


def check_shapes(folder: Path, meta_model: Any) -> None:
    """Refuse unreadable weight files, and tensors of other shapes than the configuration's. No tensor is read."""
    stored = stored_tensors(folder)
    state = meta_model.state_dict()
    for key, name, converter, _ in match_names(stored, meta_model) if quantisation_method(folder) is None else ():
        if converter is None and stored[key].shape != tuple(state[name].shape):
            raise InputError(
                f"{stored[key].file}: {key} has the shape {stored[key].shape}, but {tuple(state[name].shape)} by the "
                "model's configuration. Download the checkpoint again"
            )


@dataclass(frozen=True)
class Piece:
    """Weights of a model that are converted from the same tensors of the files: mostly one from one."""

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
    model: Any  # on the meta device
    stored: Mapping[str, StoredTensor]
    pieces: list[Piece] = field(default_factory=list)  # in the order in which transformers reads them

    @classmethod
    def from_folder(cls, folder: Path, meta_model: Any) -> "Layout":
        """Find all weights of a model in a directory; other tensors in the directory are ignored."""
        check_weights(folder)
        check_trainable(folder)
        layout = cls(folder, meta_model, stored_tensors(folder))
        state = meta_model.state_dict()
        sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        converted: dict[str, WeightConverter] = {}
        for key, name, converter, pattern in match_names(layout.stored, meta_model):
            sources[name][pattern].append(key)
            if converter is not None:
                converted[name] = converter
        for name, groups in sources.items():
            keys = {pattern: tuple(each) for pattern, each in groups.items()}
            piece = Piece((name,), keys, converted.get(name))
            if piece.converter is not None:
                tensors = {key: torch.empty(layout.stored[key].shape, device="meta") for key in piece.all_keys}
                try:
                    piece = Piece(tuple(layout._convert(piece, tensors)), keys, piece.converter)
                except RuntimeError as error:
                    raise InputError(
                        f"{folder}: the {len(tensors)} tensors of {name} do not fit together ({first_line(error)}), "
                        f"{piece.all_keys[0]} among them. Download or export the checkpoint again"
                    ) from error
            layout.pieces.append(piece)
        names = {name for piece in layout.pieces for name in piece.names}
        for pair in meta_model.all_tied_weights_keys.items():  # one of two tied names is enough
            names |= set(pair) if names & set(pair) else set()
        ignored = meta_model._keys_to_ignore_on_load_missing or []
        missing = sorted(name for name in state.keys() - names if not any(re.search(each, name) for each in ignored))
        if missing:
            raise InputError(
                f"{folder}: the weights lack {len(missing)} tensors of the model, {missing[0]} among them. "
                "Download or export the checkpoint again"
            )
        for piece in layout.pieces:  # whose tensors must be writable
            weights = {name: torch.empty(state[name].shape, device="meta") for name in piece.names}
            shapes = {key: tuple(tensor.shape) for key, tensor in layout._revert(piece, weights).items()}
            if shapes != (held := {key: layout.stored[key].shape for key in piece.all_keys}):
                differing = sorted(dict(shapes.items() ^ held.items()))
                raise InputError(
                    f"{folder}: the tensors of {piece.names[0]} do not have the shapes of the model's "
                    f"configuration ({differing[0]}). Check its config.json and files"
                )
        return layout

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each weight of the model has in the files, by its name in the model."""
        return {name: self.stored[piece.all_keys[0]].dtype for piece in self.pieces for name in piece.names}

    def read(self, wanted: Mapping[str, slice]) -> Iterator[tuple[str, Tensor]]:
        """Read the given rows of the given weights, and nothing else if the files allow it."""
        for piece in self.pieces:
            names = [name for name in piece.names if name in wanted]
            if not names:
                continue
            if piece.converter is None:
                yield names[0], self.stored[piece.all_keys[0]].read(wanted[names[0]])
                continue
            # Experts may be stored one by one: then each tensor of the files is a row of the weight.
            first, *rest = piece.converter.operations
            stacked = isinstance(first, MergeModulelist) and first.dim == 0 and len(piece.names) == 1
            by_row = stacked and all(isinstance(each, Concatenate) and each.dim != 0 for each in rest)
            if by_row:
                keys = {pattern: each[wanted[names[0]]] for pattern, each in piece.keys.items()}
                piece = Piece(piece.names, keys, piece.converter)
            weights = self._convert(piece, {key: self.stored[key].read() for key in piece.all_keys})
            for name in names:
                yield name, weights[name] if by_row else weights[name][wanted[name]]

    def write(self, folder: Path, piece: Piece, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of a piece over its tensors, in a copy of the checkpoint's files."""
        for key, tensor in self._revert(piece, weights).items():
            self.stored[key].write(folder, tensor)

    def _convert(self, piece: Piece, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of a piece to its weights."""
        converter = deepcopy(piece.converter)
        assert converter is not None, piece.names
        for pattern, keys in piece.keys.items():
            for key in keys:
                converter.add_tensor(piece.names[0], key, pattern, tensors[key])
        weights = converter.convert(piece.names[0], model=self.model, config=self.model.config)
        return {name: weight[0] if isinstance(weight, list) else weight for name, weight in weights.items()}

    def _revert(self, piece: Piece, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the weights of a piece back to its tensors."""
        if piece.converter is None:
            return {piece.all_keys[0]: weights[piece.names[0]]}
        return revert_weight_conversion(self.model, dict(weights))


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to one matrix of its base: the product of two small matrices."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    transposed: bool  # the base stores the matrix as inputs x outputs

    def rows(self, rows: slice, device: Any) -> Tensor:
        """Compute some rows of the product, in float32."""
        left, right = (self.a_RI.t(), self.b_OR.t()) if self.transposed else (self.b_OR, self.a_RI)
        return left[rows].to(device).float() @ right.to(device).float() * self.scale


def read_updates(path: Path, meta_model: Any) -> dict[str, LowRankUpdate]:
    """Read what an adapter adds, by the names of the weights in the model. Only the shapes of the model are needed."""
    attach_adapter(meta_model, "merged", path)
    tensors = _read_tensors(path)
    by_name = {}
    for place, layer in _adapted_layers(meta_model):
        a_RI, b_OR = (tensors.pop(f"{place}.lora_{factor}.weight", None) for factor in "AB")
        if a_RI is None or b_OR is None or layer.lora_variant:
            raise InputError(f"{path}: has more than a low-rank update of {place}. {MERGE}")
        by_name[f"{place}.weight"] = LowRankUpdate(a_RI, b_OR, layer.scaling["merged"], layer.fan_in_fan_out)
    if tensors:
        raise InputError(f"{path}: {next(iter(tensors))} is not a low-rank update of a matrix. {MERGE}")
    return by_name


def merge_adapter(model: Any, path: Path) -> Any:
    """Add an adapter to the weights of its base model, and remove its modules."""
    attach_adapter(model, "merged", path)
    _set_adapter(model, "merged")
    for place, layer in _adapted_layers(model):
        with explain_fault(path, "cannot be merged into its base model", "Use another adapter"):
            layer.merge()
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    return model.requires_grad_(False)


def attach_adapter(model: Any, name: str, path: Path) -> None:
    """Add an adapter to its base model in place, switched off."""
    if name in getattr(model, "peft_config", {}):
        return
    check_adapter(path)
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError:
        raise InputError(f"{path}: a LoRA adapter needs the package peft: pip install peft") from None
    with explain_fault(path / ADAPTER_CONFIG, "cannot be used", "Correct it, or download the adapter again"):
        config = LoraConfig.from_pretrained(str(path))
    config.init_lora_weights = False  # all are read from the file; some initialisations change the base
    config.inference_mode = True
    tensors = _read_tensors(path)
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        explain_fault(path, "does not fit its base model", "Is it the right base?"),
    ):
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several on one base are intended
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # only the names are needed
        inject_adapter_in_model(config, model, adapter_name=name)
        try:
            loaded = set_peft_model_state_dict(model, tensors, adapter_name=name)
        except RuntimeError as error:  # the reason is in its last line
            raise ValueError(str(error).splitlines()[-1].strip()) from None
    missing = [key for key in loaded.missing_keys if f".{name}." in key]
    if wrong := [*loaded.unexpected_keys, *missing]:
        raise InputError(f"{path}: does not fit its base model ({wrong[0]}). Is it the right base?")
    model.eval().requires_grad_(False)
    _set_adapter(model, None)


@contextmanager
def using_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Activate one of the attached adapters, or none."""
    _set_adapter(model, name)
    try:
        yield
    finally:
        _set_adapter(model, None)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    return {key.removeprefix(PEFT_PREFIX): value for key, value in load_file(path / ADAPTER_WEIGHTS).items()}


def _set_adapter(model: Any, name: str | None) -> None:
    for _, layer in _adapted_layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name, inference_mode=True)


def _adapted_layers(model: Any) -> list[tuple[str, Any]]:
    if not hasattr(model, "peft_config"):  # peft may not be installed
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def find_output_matrix(folder: Path) -> StoredTensor | None:
    """Find the output matrix of a checkpoint by its name; None if its name is not one of the usual ones."""
    tensors = stored_tensors(folder)
    named = (key for ending in (*OUTPUT_NAMES, *EMBEDDING_NAMES) for key in sorted(tensors) if key.endswith(ending))
    key = next(named, None)
    return None if key is None else tensors[key]


def untrained_special_tokens(checkpoint: Checkpoint) -> set[int]:
    """List the special tokens whose output row looks untrained, without loading or downloading the checkpoint."""
    matrix = find_output_matrix(checkpoint.path) if checkpoint.is_downloaded else None
    return set() if matrix is None else untrained_rows(matrix, sorted(checkpoint.tokenizer.added_tokens_decoder))


def untrained_rows(matrix: Tensor | StoredTensor, special: Sequence[int]) -> set[int]:
    """List the special tokens whose row of an output matrix is parallel to another one's, or almost zero.

    Base checkpoints leave chat, tool and think tokens as they were initialised, often all alike. Of a matrix on disk
    only the rows that are compared are read.
    """
    size = matrix.shape[0]
    ids = sorted(id for id in special if id < size)
    if not ids:
        return set()
    if isinstance(matrix, StoredTensor):
        starts = range(0, size, max(BLOCK_ROWS, size // SAMPLE_BLOCKS))
        rows_SD = torch.cat([matrix.read(slice(id, id + 1)) for id in ids])
        others_ND = torch.cat([matrix.read(slice(start, start + BLOCK_ROWS)) for start in starts])
    else:
        rows_SD = matrix[ids]
        others_ND = matrix[:: max(1, size // (SAMPLE_BLOCKS * BLOCK_ROWS))]
    rows_SD = rows_SD.float()
    norms_S = rows_SD.norm(dim=-1)
    near_zero_S = norms_S < NEAR_ZERO * others_ND.float().norm(dim=-1).median()
    unit_SD = rows_SD / norms_S.clamp(min=1e-12)[:, None]
    cosine_SS = (unit_SD @ unit_SD.T).fill_diagonal_(-1.0)
    alike_S = (cosine_SS >= SAME_DIRECTION).any(dim=-1)
    return {id for id, found in zip(ids, (near_zero_S | alike_S).tolist(), strict=True) if found}
