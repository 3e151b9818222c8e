"""The tensors of a checkpoint directory, read one at a time."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_weave.errors import InputError
from lightning_weave.models.files import check_weights, weight_files


@dataclass(frozen=True)
class Weights:
    """Where the tensors of a checkpoint directory are."""

    folder: Path
    files: dict[str, str]  # tensor -> file

    @classmethod
    def of(cls, folder: Path) -> "Weights":
        check_weights(folder)
        files: dict[str, str] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="pt") as tensors:
                    files |= dict.fromkeys(tensors.keys(), path.name)
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: cannot be read ({error}). Download the checkpoint again") from None
        return cls(folder, files)

    def shape(self, name: str) -> tuple[list[int], str]:
        with safe_open(self.folder / self.files[name], framework="pt") as tensors:
            part = tensors.get_slice(name)
            return part.get_shape(), part.get_dtype()

    def read(self, name: str) -> Tensor:
        with safe_open(self.folder / self.files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)
