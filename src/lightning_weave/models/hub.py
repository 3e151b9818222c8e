"""Checkpoint directories and the Hugging Face hub: resolve names, download files, check what is there."""

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from lightning_weave.errors import InputError, WeaveError, first_line

CONNECT_TIMEOUT = 4.0  # seconds
UNREACHABLE: set[str] = set()  # endpoints that did not answer
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGE = "Merge it with peft (merge_and_unload), and use the merged checkpoint"  # of an adapter that is not supported
NOT_ADAPTED = ("lm_head", "embed_tokens", "lora_embedding_", "wte", "embed_out")  # these are read separately
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# `*.py` is only ever run with trust_remote_code; pickled weights are never downloaded.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md"]  # the last has the licence
WEIGHT_FILES = ["*.safetensors"]
IGNORED = ["original/*", "consolidated*", "onnx/*"]
# The base classes of the hub's own errors: those of its HTTP client, for broken connections, and of the disk.
HUB_ERRORS = cast(tuple[type[Exception], ...], (*HfHubHTTPError.__bases__, HFValidationError))


def go_offline_if_unreachable() -> None:
    """Call this before any request: if the hub does not answer, only what was downloaded before is used."""
    if not constants.HF_HUB_OFFLINE and not _is_reachable(constants.ENDPOINT):
        UNREACHABLE.add(constants.ENDPOINT)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has already read the setting
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def explain_hub_error(error: Exception) -> str:
    """Explain in one line why a download failed."""
    if constants.ENDPOINT in UNREACHABLE:
        return f"{constants.ENDPOINT} is unreachable, and it was not downloaded before"
    return first_line(error)


@cache
def _is_reachable(endpoint: str) -> bool:
    """Try to connect, in a thread, since name resolution has no timeout. Assume so behind a proxy."""
    address = urlsplit(endpoint)
    if address.scheme in getproxies():
        return True
    connected = Event()

    def connect() -> None:
        try:
            port = address.port or {"http": 80, "https": 443}[address.scheme]
            socket.create_connection((address.hostname or "", port), timeout=CONNECT_TIMEOUT).close()
            connected.set()
        except (OSError, KeyError):
            pass

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT)
    return connected.is_set()


def check_weights(path: Path) -> None:
    """Refuse a directory without a checkpoint, or with one that could run code when it is loaded."""
    if not (path / "config.json").is_file():
        is_adapter = (path / ADAPTER_CONFIG).is_file()
        hint = "it is a LoRA adapter; merge it into its base model" if is_adapter else "give the directory that has it"
        raise InputError(f"{path}: not a checkpoint, it has no config.json ({hint})")
    if (path / ADAPTER_CONFIG).is_file():  # with peft installed, transformers would apply it to the weights
        raise InputError(f"{path}: has a LoRA adapter as well as weights. Merge it into them, or remove its files")
    if any(path.glob("*.safetensors")):
        for name in indexed_files(path):
            if not name.endswith(".safetensors") or Path(name).name != name:
                raise InputError(
                    f"{path}: {INDEX_FILE} refers to {name!r}; weights are only read from *.safetensors in the same "
                    "directory. Download the checkpoint again, or convert it with save_pretrained"
                )
        return
    other = "Use a revision with safetensors (on the hub often refs/pr/1)"
    _refuse_pickled(path, f"{other}, or, if you trust it, convert it once with save_pretrained")
    raise InputError(f"{path}: no weights here (*.safetensors). Download the checkpoint again")


def _refuse_pickled(path: Path, advice: str) -> None:
    for name in sorted(file.name for pattern in PICKLED for file in path.glob(pattern)):
        raise InputError(f"{path}: {name} is pickled, and loading it would run code from the file. {advice}")


def adapter_config(path: Path) -> Mapping[str, Any] | None:
    """Read the configuration of an adapter; None if the directory holds a full checkpoint, or nothing."""
    is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    return checkpoint_json(path / ADAPTER_CONFIG) if is_adapter else None


def check_adapter(path: Path) -> None:
    """Refuse an adapter that could run code when it is loaded, or that has more than low-rank updates of layers."""
    config = checkpoint_json(path / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type {config.get('peft_type')} is not supported, only LORA. {MERGE}")
    if config.get("modules_to_save") or config.get("trainable_token_indices"):
        raise InputError(f"{path}: has full modules in addition to its low-rank updates. {MERGE}")
    if not (path / ADAPTER_WEIGHTS).is_file():
        _refuse_pickled(path, "If you trust it, save the adapter again as safetensors (save_pretrained)")
        raise InputError(f"{path}: no weights here ({ADAPTER_WEIGHTS}). Download the adapter again")
    from safetensors import safe_open

    weights = path / ADAPTER_WEIGHTS
    with (
        explain_fault(weights, "cannot be read", "Download the adapter again"),
        safe_open(weights, framework="np") as tensors,
    ):
        names = list(tensors.keys())
    if unsupported := [name for name in names if any(part in name for part in NOT_ADAPTED)]:
        raise InputError(f"{path}: changes {unsupported[0]}, the head or the embeddings. {MERGE}")


def quantisation_method(path: Path) -> str | None:
    """Return the method by which a checkpoint's weights are quantised; None if they are not."""
    for source in config_sections(path):
        if isinstance(settings := source.get("quantization_config"), dict):
            return str(settings.get("quant_method", "an unnamed method"))
    return None


def check_trainable(path: Path) -> None:
    """Refuse quantised weights, which are too coarse to hold a training step."""
    if method := quantisation_method(path):
        raise InputError(
            f"{path}: its weights are quantised ({method}): it can be scored, but not trained. Set student.model to "
            "the checkpoint that it was quantised from"
        )


def indexed_files(path: Path) -> list[str]:
    """List the weight files that the index names; none if the weights are a single file."""
    files = checkpoint_json(path / INDEX_FILE).get("weight_map")
    return sorted({str(name) for name in files.values()}) if isinstance(files, dict) else []


def weight_files(path: Path) -> list[Path]:
    """List the files that a loader reads: those of the index, or the one of the usual name, or all."""
    if listed := indexed_files(path):
        return [path / name for name in listed]
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def checkpoint_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; empty if there is no such file."""
    if not path.is_file():
        return {}
    with explain_fault(path, "not valid JSON", "Download the checkpoint again"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds {type(content).__name__}, not a JSON object. Download the checkpoint again")
    return content


@contextmanager
def explain_fault(path: Path, problem: str, advice: str, trusted: bool = True) -> Iterator[None]:
    """Turn whatever a library raises about a checkpoint's files into one line that names them and what to do.

    Unless the checkpoint's code is `trusted`, that it was not run is the likeliest reason.
    """
    try:
        yield
    except (WeaveError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of libraries in Rust
            raise
        configs = () if trusted else ("config.json", "tokenizer_config.json")
        if any(checkpoint_json(path / name).get("auto_map") for name in configs):
            raise InputError(
                f"{path}: the checkpoint comes with Python code (auto_map in its config), which is not run unless the "
                "recipe and the command allow it. Read the code, then set trust_remote_code = true for this model "
                "(student, anchors.NAME or policies.NAME) and add --trust"
            ) from error
        raise InputError(f"{path}: {problem} ({first_line(error)}). {advice}") from error


def config_sections(path: Path) -> list[dict[str, Any]]:
    """Read the config.json of a directory, and the section of it that describes the text model, if there is one."""
    config = checkpoint_json(path / "config.json")
    return [each for each in (config, config.get("text_config")) if isinstance(each, dict)]


def resolve_model(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Return the local directory of a path or a hub name; config, tokenizer and safetensors are downloaded.

    Without `weights` only config and tokenizer are downloaded.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # never a hub name
        looked = "" if local.is_absolute() else f" (looked in {Path.cwd()})"
        raise InputError(
            f"model {name!r}: no such directory{looked}. Give the path of a checkpoint directory or a hub name"
        )
    go_offline_if_unreachable()
    try:
        return _download(name, revision, weights)
    except HUB_ERRORS as error:
        raise _download_error(name, revision, error) from error


def missing_weights(name: str, folder: Path) -> dict[str, str]:
    """Return the hub's sha256 of the weight files of a resolved model that are not in its folder yet."""
    if Path(name).expanduser().is_dir():
        return {}
    go_offline_if_unreachable()
    try:
        listing = _listing(name, folder.name)
    except HUB_ERRORS as error:
        if (local := weight_files(folder)) and all(file.exists() for file in local):
            return {}
        raise _download_error(name, folder.name, error) from error
    files = [file.rfilename for file in listing.siblings or ()]
    names = set(filter_repo_objects(files, allow_patterns=WEIGHT_FILES, ignore_patterns=IGNORED))
    missing = {
        file.rfilename: file.lfs.sha256 if file.lfs else ""
        for file in listing.siblings or ()
        if file.rfilename in names and "/" not in file.rfilename and not (folder / file.rfilename).exists()
    }
    if all(missing.values()):
        return missing
    resolve_model(name, folder.name)  # files so small that the hub keeps them in git have no sha256
    return {}


def _download_error(name: str, revision: str | None, error: Exception) -> InputError:
    at = f" at revision {revision!r}" if revision else ""
    match error:
        case GatedRepoError():
            return InputError(
                f"model {name!r}{at}: the repository is gated. Accept its terms on its page, then: hf auth login"
            )
        case RepositoryNotFoundError():
            reason = "no such repository, or a private one"
        case RevisionNotFoundError():
            reason = "no such revision"
        case _:
            reason = explain_hub_error(error)
    return InputError(
        f"model {name!r}{at}: no such directory in {Path.cwd()}, and the download failed ({reason}). Give the path of "
        f"a checkpoint directory, or download it on a machine with network access: hf download {name}"
    )


@cache
def _download(name: str, revision: str | None, weights: bool) -> Path:
    """Ask the hub once per process. Its library locks each file, so that one rank downloads and the others wait."""
    patterns = [*SMALL_FILES, *WEIGHT_FILES] if weights else SMALL_FILES
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED))


@cache
def _listing(name: str, revision: str | None) -> ModelInfo:
    """Ask the hub for a model's commit, its files, and the sha256 of the large ones."""
    return HfApi().model_info(name, revision=revision, files_metadata=True)
