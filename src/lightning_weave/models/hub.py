"""Models on the Hugging Face hub: what it has of them, and how their files get onto this disk."""

import time
from functools import cache
from pathlib import Path
from typing import cast

from huggingface_hub import HfApi, ModelInfo, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from lightning_weave.errors import InputError
from lightning_weave.hub import use_hub, why_not
from lightning_weave.models.files import weight_files
from lightning_weave.ranks import local_rank

# `*.py` is only ever run with trust_remote_code; pickled weights are never downloaded.
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md"]  # the last has the licence
_WEIGHTS = ["*.safetensors"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*"]
# The bases of the hub's own errors: those of the client that it uses, for connections that break, and of the disk.
_HUB_ERRORS = cast(tuple[type[Exception], ...], (*HfHubHTTPError.__bases__, HFValidationError))
_PATIENCE = 3600.0  # seconds without a new file after which a rank downloads by itself


def resolve_model(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Turn a local directory or a hub name into a local directory; download config, tokenizer and safetensors only.

    Without `weights` the directory has config and tokenizer at least.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # never a name of the hub
        looked = "" if local.is_absolute() else f" (looked in {Path.cwd()})"
        raise InputError(
            f"model {name!r}: no such directory{looked}. Give the path of a checkpoint directory or a hub name"
        )
    use_hub()
    try:
        return _download(name, revision, weights)
    except _HUB_ERRORS as error:
        raise _not_given(name, revision, error) from error


def absent_weights(name: str, folder: Path) -> dict[str, str]:
    """Give the hub's sha256 of the weights that it has for a resolved model and that are not in the folder yet."""
    if Path(name).expanduser().is_dir():
        return {}
    use_hub()
    try:
        listing = _listing(name, folder.name)
    except _HUB_ERRORS as error:
        if _has_weights(folder):
            return {}
        raise _not_given(name, folder.name, error) from error
    names = set(filter_repo_objects(_names(listing), allow_patterns=_WEIGHTS, ignore_patterns=_UNWANTED))
    absent = {
        file.rfilename: file.lfs.sha256 if file.lfs else ""
        for file in listing.siblings or ()
        if file.rfilename in names and "/" not in file.rfilename and not (folder / file.rfilename).exists()
    }
    if all(absent.values()):
        return absent
    resolve_model(name, folder.name)  # files so small that the hub keeps them in git, without a sha256
    return {}


def _not_given(name: str, revision: str | None, error: Exception) -> InputError:
    at = f" at revision {revision!r}" if revision else ""
    match error:
        case GatedRepoError():
            return InputError(
                f"model {name!r}{at}: the repository is gated. Accept its terms on its page, then: hf auth login"
            )
        case RepositoryNotFoundError():
            reason = "it has none of that name, or a private one"
        case RevisionNotFoundError():
            reason = "it has no such revision of it"
        case _:
            reason = why_not(error)
    return InputError(
        f"model {name!r}{at}: no such directory in {Path.cwd()}, and the hub did not give it ({reason}). Give the "
        f"path of a checkpoint directory, or download it on a machine with network access: hf download {name}"
    )


def _has_weights(folder: Path) -> bool:
    files = weight_files(folder)
    return bool(files) and all(file.exists() for file in files)


@cache
def _download(name: str, revision: str | None, weights: bool) -> Path:
    """Ask the hub once per process. The first rank of a machine downloads, the others wait for its files."""
    patterns = [*_SMALL, *_WEIGHTS] if weights else _SMALL
    complete = False
    if local_rank() > 0:
        try:
            listing = _listing(name, revision)
        except _HUB_ERRORS:  # the hub is out of reach: what is here serves, or is said to be missing
            pass
        else:
            revision = listing.sha
            complete = _wait_for_files(name, listing, patterns)
    folder = snapshot_download(
        name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED, local_files_only=complete
    )
    return Path(folder)


def _wait_for_files(name: str, listing: ModelInfo, patterns: list[str]) -> bool:
    """Wait for another rank's download; says whether it came to its end."""
    missing = list(filter_repo_objects(_names(listing), allow_patterns=patterns, ignore_patterns=_UNWANTED))
    since = time.monotonic()
    while time.monotonic() - since < _PATIENCE:
        still = [
            file for file in missing if not isinstance(try_to_load_from_cache(name, file, revision=listing.sha), str)
        ]
        if not still:
            return True
        if still != missing:
            since = time.monotonic()
        missing = still
        time.sleep(0.2)
    return False


@cache
def _listing(name: str, revision: str | None) -> ModelInfo:
    """What the hub has of a model: its commit, its files, and the sha256 of the large ones."""
    return HfApi().model_info(name, revision=revision, files_metadata=True)


def _names(listing: ModelInfo) -> list[str]:
    return [file.rfilename for file in listing.siblings or ()]
