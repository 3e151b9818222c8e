"""A model checkpoint: where it is, its configuration and tokenizer, and how to load it.

torch and transformers take seconds to import and are imported where they are needed: looking at a run needs neither.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import metadata_load

from lightning_weave.config import Dtype, Policy, Student
from lightning_weave.devices import explain_out_of_memory, free_memory
from lightning_weave.errors import InputError
from lightning_weave.models.hub import (
    ADAPTER_CONFIG,
    SMALL_FILES,
    adapter_config,
    check_weights,
    checkpoint_json,
    config_sections,
    explain_fault,
    missing_weights,
    quantisation_method,
    resolve_model,
)
from lightning_weave.store import model_identity
from lightning_weave.store.files import fingerprint

if TYPE_CHECKING:
    import torch

    from lightning_weave.models.weights import Layout, LowRankUpdate

REHEARSAL_KEY = "rehearsal"  # marks the config.json of doubles, so that none is mistaken for the real model
LARGEST = {  # what config.json may say of a model's size
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1000),
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "intermediate_size", "head_dim"), 10**8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "max_position_embeddings"), 10**8),
}
END_OF_TURN_TOKENS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>")
log = logging.getLogger(__name__)


def card_header(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What the card of a model states for the hub; empty if the model is gone or has no such card."""
    try:
        return metadata_load(checkpoint.config_path / "README.md") or {}
    except (InputError, OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Checkpoint:
    """A model directory or hub name, or a LoRA adapter together with the base model that it names.

    Nothing is downloaded or read before it is needed.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False  # whether code that comes with the checkpoint may run

    @classmethod
    def from_section(cls, section: Student | Policy) -> "Checkpoint":
        """Return the checkpoint that a section of the recipe names."""
        return cls(section.name, section.revision, section.trust_remote_code)

    def at(self, folder: Path) -> "Checkpoint":
        """Return the same architecture with the weights of another directory, such as a trained student's."""
        return replace(self, name=str(folder), revision=None)

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @cached_property
    def base(self) -> "Checkpoint | None":
        """The base model that a LoRA adapter was trained on; None for a full model."""
        config = adapter_config(self.source_path)
        if config is None:
            return None
        name = config.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise InputError(
                f"{self.source_path}: {ADAPTER_CONFIG} has no base_model_name_or_path. Add the base model's directory "
                "or hub name"
            )
        return replace(self, name=name, revision=config.get("revision"))

    @cached_property
    def path(self) -> Path:
        """The local directory of the model, or of an adapter's base model, with its weights."""
        folder = self.adapter_path
        return folder if adapter_config(folder) is None or self.base is None else self.base.path

    @cached_property
    def config_path(self) -> Path:
        """The same directory for reading configuration and tokenizer: no weights are downloaded for it."""
        return self.source_path if self.base is None else self.base.config_path

    @cached_property
    def adapter_path(self) -> Path:
        """The local directory of what is named, an adapter or a model, with its weights."""
        return resolve_model(self.name, self.revision)

    @property
    def source_path(self) -> Path:
        """The local directory of what is named, an adapter or a model: no weights are downloaded for it."""
        return resolve_model(self.name, self.revision, weights=False)

    @property
    def is_downloaded(self) -> bool:
        """Whether all weights are on this disk."""
        return not missing_weights(self.name, self.source_path) and (self.base is None or self.base.is_downloaded)

    @property
    def identity(self) -> str:
        """The hash of its content; for weights that are still on the hub, from the sha256 that the hub lists."""
        folder = self.source_path
        own = model_identity(folder, missing_weights(self.name, folder))
        if self.base is None:
            return own
        location = ("base_model_name_or_path", "revision")
        config = {key: value for key, value in (adapter_config(folder) or {}).items() if key not in location}
        return fingerprint({"adapter": own, "config": config, "base": self.base.identity})

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, loaded again only if its files change: reading the spellings is slow."""
        if (self.config_path / "config.json").is_file():  # transformers reads it too; its own faults come first
            assert self.config is not None
        files = (file for pattern in SMALL_FILES for file in self.config_path.rglob(pattern))  # chat templates as well
        stamps = {(str(file), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files if file.is_file()}
        return _load_tokenizer(self.config_path, self.trust_remote_code, frozenset(stamps))

    @property
    def vocabulary(self) -> int:
        """The highest token id plus one; rows of the output matrix beyond it belong to no token."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a response: all eos ids, the known end-of-turn tokens, and the chat template's own."""
        tokenizer = self.tokenizer
        generation = checkpoint_json(self.config_path / "generation_config.json")
        ids = {tokenizer.eos_token_id}
        for source in (generation, *config_sections(self.config_path)):
            eos = source.get("eos_token_id")
            for token in eos if isinstance(eos, list) else [eos]:
                if token is not None and (type(token) is not int or not 0 <= token < 2**31):
                    file = "generation_config.json" if source is generation else "config.json"
                    raise InputError(
                        f"{self.config_path / file}: eos_token_id = {token!r} is no token id. Correct or remove it"
                    )
                ids.add(token)
        special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids.update(special[text] for text in END_OF_TURN_TOKENS if text in special)
        if tokenizer.chat_template:
            reply = "a reply of the assistant"
            turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": reply}]
            try:
                after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(reply)[2].lstrip()
            except Exception:  # a template that wants more than two plain turns, or is broken: rendering prompts tells
                after = ""
            ids.update(index for content, index in special.items() if content and after.startswith(content))
        return frozenset(token for token in ids if token is not None)

    @cached_property
    def config(self) -> Any:
        """Its transformers configuration."""
        from transformers import AutoConfig

        path = self.config_path
        for section in config_sections(path):  # before transformers builds as many layers
            for key, most in LARGEST.items():
                value = section.get(key)
                if value is not None and not isinstance(value, list) and not (type(value) is int and 0 < value <= most):
                    raise InputError(
                        f"{path / 'config.json'}: {key} = {value!r} is no whole number from 1 to {most}. Correct it, "
                        "or download the checkpoint again"
                    )
        trust, advice = self.trust_remote_code, "Correct it, or download the checkpoint again"
        with explain_fault(path, "its config.json cannot be used", advice, trust):
            return AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True)

    @property
    def is_double(self) -> bool:
        """Whether a rehearsal made it, or it was trained or mixed from what a rehearsal made."""
        return REHEARSAL_KEY in checkpoint_json(self.config_path / "config.json")

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are stored in fewer bits than they are computed with."""
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def has_experts(self) -> bool:
        """Whether a router chooses the experts of each token."""
        config = self.config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return any((getattr(config, name, None) or 0) > 1 for name in names)

    @property
    def context_limit(self) -> int | None:
        """The longest context that its configuration allows; None if it sets no limit."""
        return context_limit(self.config)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype it was saved in, from its config.json or else from the weights themselves."""
        import torch

        if (dtype := configured_dtype(self.config_path)) is not None:
            return dtype
        from lightning_weave.models.weights import stored_tensors

        known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        return next((each.dtype for each in stored_tensors(self.path).values() if each.dtype in known), torch.float32)

    def compute_dtype(self, setting: Dtype, device: "torch.device") -> "torch.dtype":
        """Resolve "auto": float32 on a CPU, the checkpoint's own dtype elsewhere."""
        import torch

        if setting != "auto":
            return getattr(torch, setting)
        return torch.float32 if device.type == "cpu" else self.dtype

    def load(self, dtype: "torch.dtype", device: "torch.device") -> Any:
        """Load for inference: safetensors only, in this dtype, without gradients; an adapter is merged."""
        from lightning_weave.models.packing import use_efficient_attention
        from lightning_weave.models.weights import merge_adapter

        if self.base is not None:
            return merge_adapter(self.base.load(dtype, device), self.adapter_path)
        path = self.path
        model, info = self._from_pretrained(dtype, device)
        # Transformers fills missing weights with random numbers and only warns.
        if missing := sorted(info["missing_keys"]):
            raise InputError(
                f"{path}: the weights lack {len(missing)} tensors of the model, {missing[0]} among them. "
                "Download or export the checkpoint again"
            )
        if method := quantisation_method(path):
            if unused := info["unexpected_keys"]:  # such as scales
                raise InputError(
                    f"{path}: its weights are quantised ({method}), and transformers does not use {len(unused)} of "
                    f"its tensors, {min(unused)} among them. Use the checkpoint that it was quantised from"
                )
            if not any(weight.dtype.itemsize == 1 for weight in model.parameters()):  # transformers has dequantised
                for weight in model.parameters():
                    weight.data = weight.data.to(dtype)
        use_efficient_attention(model)
        return model.eval().requires_grad_(False)

    def load_quantised(self, bits: str, dtype: "torch.dtype", device: "torch.device") -> Any:
        """Load with the matrices, except the head's, in 4 or 8 bits, to train an adapter; it computes in `dtype`."""
        from torch import Tensor, nn
        from transformers import BitsAndBytesConfig

        if self.base is not None:
            raise InputError(
                f"{self.name} is a LoRA adapter, but train.lora.base = {bits!r} needs a full checkpoint. Merge it "
                "into its base model with peft"
            )
        if find_spec("bitsandbytes") is None:
            raise InputError(f"train.lora.base = {bits!r} needs bitsandbytes: pip install bitsandbytes")
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings = {**four, "bnb_4bit_compute_dtype": dtype} if bits == "nf4" else {"load_in_8bit": True}
        model, _ = self._from_pretrained(dtype, device, quantization_config=BitsAndBytesConfig(**settings))
        for module in model.modules():
            if isinstance(weight := getattr(module, "weight", None), Tensor) and not weight.is_floating_point():
                # Only the weight itself, which never changes: torch's checkpoints do not know the scales.
                module._save_to_state_dict = partial(nn.Module._save_to_state_dict, module)
                module.support_avx512bf16_for_cpu = False  # some CPUs would repack the weight when it is first used
        return model

    def _from_pretrained(self, dtype: "torch.dtype", device: "torch.device", **settings: Any) -> tuple[Any, Any]:
        """Call transformers' loader; returns the model, and which weights it did not find or use."""
        from transformers import AutoModelForCausalLM

        from lightning_weave.models.weights import check_shapes

        path, trust = self.path, self.trust_remote_code
        check_weights(path)
        check_shapes(path, self.build_meta())
        free_memory()  # of the model before, which is not used any more
        _prepare_loading(path, trust)
        problem = "cannot be loaded as a causal language model"
        advice = "Check its config.json and weights, or download the checkpoint again"
        with explain_fault(path, problem, advice, trust), explain_out_of_memory(path, device):
            return AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=trust,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                device_map={"": device},  # each tensor goes there as it is read
                **settings,
            )

    def build_meta(self) -> Any:
        """Build the model on the meta device: every module and shape, no memory."""
        import torch

        with torch.device("meta"):
            return self._from_config()

    def build_without_weights(self, dtype: "torch.dtype") -> Any:
        """Build the model with real buffers and meta parameters, to be sharded before its weights are read."""
        from accelerate import init_empty_weights

        if self.trust_remote_code:
            _prepare_loading(self.path, self.trust_remote_code)
        with init_empty_weights(include_buffers=False):
            model = self._from_config(dtype=dtype)
        model.tie_weights()  # within the block each use of a weight has become its own
        return model

    def _from_config(self, **settings: Any) -> Any:
        from transformers import AutoModelForCausalLM

        # A model changes its configuration, for example its attention; the next one starts from a fresh copy.
        config, trust = deepcopy(self.config), self.trust_remote_code
        problem = "not a causal language model that transformers can build"
        with explain_fault(self.config_path, problem, "Check its config.json", trust):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust, **settings)

    @cached_property
    def updates(self) -> "Mapping[str, LowRankUpdate]":
        """What an adapter adds to the weights of its base, by their names in the model; empty for a full model."""
        from lightning_weave.models.weights import read_updates

        return {} if self.base is None else read_updates(self.adapter_path, self.build_meta())

    @property
    def layout(self) -> "Layout":
        """Where its weights are in its files; an adapter's are those of its base model."""
        from lightning_weave.models.weights import Layout

        return Layout.from_folder(self.path, self.build_meta())


def context_limit(config: Any) -> int | None:
    """Return the longest context that a configuration allows, or None if it sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def configured_dtype(folder: Path) -> "torch.dtype | None":
    """Return the dtype that a config.json says its checkpoint was saved in; None if it does not."""
    import torch

    for source in config_sections(folder):
        named = source.get("dtype") or source.get("torch_dtype")
        dtype = getattr(torch, str(named).removeprefix("torch."), None) if named else None
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


@lru_cache(maxsize=8)
def _load_tokenizer(path: Path, trust_remote_code: bool, stamps: frozenset[tuple[str, int, int]]) -> Any:
    from transformers import AutoTokenizer

    _prepare_loading(path, trust_remote_code)
    with explain_fault(path, "no usable tokenizer", "Add its tokenizer.json to the directory", trust_remote_code):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        tokenizer(["a text"])  # some damages show only when it is used
        if not tokenizer.get_vocab():
            raise ValueError("it has no tokens")
    return tokenizer


@cache
def _prepare_loading(path: Path, trust_remote_code: bool) -> None:
    """Turn off a progress bar per tensor file, and warn of code that is run."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the stages have one bar each
    if trust_remote_code:
        log.warning("warning: trust_remote_code = true: code that comes with %s is run with your rights", path)
