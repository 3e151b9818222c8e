"""One handle for a model: where it is, what is known of it without its weights, and how to load it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_weave.config import Dtype, Policy, Student
from lightning_weave.errors import InputError
from lightning_weave.models.adapters import Update, adapter_config, base_name, merged, updates
from lightning_weave.models.files import checkpoint_json
from lightning_weave.models.hub import absent_weights, resolve_model
from lightning_weave.store import model_identity
from lightning_weave.store.identity import fingerprint

if TYPE_CHECKING:
    import torch

    from lightning_weave.models.layout import Layout


MARK = "rehearsal"  # key of the config.json of doubles, so that none is taken for a model
_NAMES_THE_BASE = ("base_model_name_or_path", "revision")  # where it lies, not what it is


@dataclass(frozen=True)
class Checkpoint:
    """A model directory or hub name, or a LoRA adapter and with it the base that it names.

    Nothing is downloaded or read before it is needed.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False  # whether code that comes with the checkpoint may run

    @classmethod
    def of(cls, section: Student | Policy) -> "Checkpoint":
        """The checkpoint that a section of the recipe names."""
        return cls(section.model, section.revision, section.trust_remote_code)

    def at(self, folder: Path) -> "Checkpoint":
        """The same architecture with the weights of another directory, such as a trained student's."""
        return replace(self, name=str(folder), revision=None)

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @cached_property
    def base(self) -> "Checkpoint | None":
        """The checkpoint that a LoRA adapter was trained on, from its configuration; None of a whole model."""
        folder = self.own_path
        config = adapter_config(folder)
        if config is None:
            return None
        return replace(self, name=base_name(folder, config), revision=config.get("revision"))

    @cached_property
    def adapter_path(self) -> Path:
        """The local directory of an adapter, weights and all."""
        return self._folder(weights=True)

    @cached_property
    def path(self) -> Path:
        """The local directory of the model, an adapter's base; a hub name is downloaded, weights and all."""
        folder = self._folder(weights=True)
        return folder if adapter_config(folder) is None or self.base is None else self.base.path

    @cached_property
    def light_path(self) -> Path:
        """The same directory, for whoever reads configuration and tokenizer: no weights are downloaded for it."""
        folder = self.own_path
        return folder if self.base is None else self.base.light_path

    @property
    def own_path(self) -> Path:
        """The directory of the configuration, of an adapter its own; no weights are downloaded for it."""
        return self._folder(weights=False)

    def _folder(self, weights: bool) -> Path:
        local = Path(self.name).expanduser()
        return local if local.is_dir() else resolve_model(self.name, self.revision, weights=weights)

    def as_arguments(self) -> dict[str, Any]:
        """The whole checkpoint in the words of transformers, for other programs that load it."""
        return {"pretrained": str(self.path.resolve()), "trust_remote_code": self.trust_remote_code}

    @property
    def is_here(self) -> bool:
        """Whether the weights are on this disk, or a part of the work still has to fetch them from the hub."""
        return not absent_weights(self.name, self.own_path) and (self.base is None or self.base.is_here)

    @property
    def identity(self) -> str:
        """What the checkpoint is, by content; of weights that are still on the hub, by the sha256 that it gives."""
        folder = self.own_path
        own = model_identity(folder, absent_weights(self.name, folder))
        if self.base is None:
            return own
        config = {key: value for key, value in (adapter_config(folder) or {}).items() if key not in _NAMES_THE_BASE}
        return fingerprint({"adapter": own, "config": config, "base": self.base.identity})

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, read once for as long as its files do not change: reading the spellings is slow."""
        stamps = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in self.light_path.glob("*.json")))
        return _tokenizer(self.light_path, self.trust_remote_code, stamps)

    @property
    def vocabulary(self) -> int:
        """How many ids the tokenizer has; output rows beyond them belong to no token."""
        return _loading().vocabulary_size(self.tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a response."""
        return _loading().stop_ids(self.light_path, self.tokenizer)

    @cached_property
    def config(self) -> Any:
        """Its configuration, class defaults included."""
        return _loading().read_config(self.light_path, self.trust_remote_code)

    @property
    def is_double(self) -> bool:
        """Whether a rehearsal made it, or it was trained or mixed from what a rehearsal made."""
        return MARK in checkpoint_json(self.light_path / "config.json")

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are stored in fewer bits than they are computed with."""
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def context_limit(self) -> int | None:
        """The longest context it was made for; None where it sets no limit."""
        return _loading().context_limit(self.config)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype it was saved in."""
        return _loading().configured_dtype(self.light_path) or _loading().checkpoint_dtype(self.path)

    def compute_dtype(self, setting: Dtype, device: "torch.device") -> "torch.dtype":
        """Resolve "auto": float32 on a CPU, the checkpoint's own dtype elsewhere."""
        import torch

        if setting != "auto":
            return getattr(torch, setting)
        return torch.float32 if device.type == "cpu" else self.dtype

    def load(self, dtype: "torch.dtype", device: "torch.device") -> Any:
        """Load the weights for inference; an adapter is merged into its base."""
        if self.base is not None:
            return merged(self.base.load(dtype, device), self.adapter_path)
        return _loading().load_model(self.path, dtype=dtype, device=device, trust_remote_code=self.trust_remote_code)

    def load_quantised(self, bits: str, dtype: "torch.dtype", device: "torch.device") -> Any:
        """Load the model with its matrices in 4 or 8 bits, to train an adapter beside them."""
        if self.base is not None:
            raise InputError(
                f"{self.name} is a LoRA adapter, but train.lora.base = {bits!r} needs a whole checkpoint. Merge it "
                "into its base with peft"
            )
        return _loading().load_quantised(self.path, bits, dtype, device, self.trust_remote_code)

    def without_weights(self, dtype: "torch.dtype") -> Any:
        """The model with buffers but without memory for its weights, to be sharded before they are read."""
        return _loading().without_weights(self.path, self.config, dtype, self.trust_remote_code)

    @cached_property
    def updates(self) -> Mapping[str, Update]:
        """What an adapter adds to the weights of its base, by their names in the model; nothing of a whole model."""
        return {} if self.base is None else updates(self.adapter_path, self.skeleton())

    @property
    def layout(self) -> "Layout":
        """Where its weights are in its files; an adapter's are those of its base."""
        from lightning_weave.models.layout import Layout

        return Layout.of(self.path, self.skeleton())

    def skeleton(self) -> Any:
        """The model without its weights: every module and shape, no memory."""
        return _loading().skeleton(self.config, self.trust_remote_code)


@lru_cache(maxsize=8)
def _tokenizer(path: Path, trust_remote_code: bool, stamps: tuple[tuple[str, int], ...]) -> Any:
    return _loading().load_tokenizer(path, trust_remote_code)


def _loading() -> Any:
    """What needs torch and transformers, which take seconds to import: looking at a run needs neither."""
    from lightning_weave.models import load

    return load
