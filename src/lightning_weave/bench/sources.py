"""Data files of a benchmark: a local file, a directory, or a dataset repository on the hub.

A hub repository is a directory once downloaded, and no loading script of a repository is ever run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from lightning_weave.errors import InputError
from lightning_weave.hub import use_hub, why_not
from lightning_weave.store.tables import SUFFIXES


def locate(source: str, names: tuple[str, ...]) -> list[Path]:
    """Find the data files of a source: a file, a directory, or `owner/name[@revision]` on the hub.

    In a directory, a file named after the benchmark (`names`) is preferred to all files together.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if not _is_hub_name(source):
            raise InputError(f"{source}: no such file or directory. Correct eval.sources.")
        path = _download(source)
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    named = [file for file in files if file.stem in names and file.parent == path]
    if not files:
        raise InputError(f"{path}: no {', '.join(SUFFIXES)} file in this directory.")
    if len(named) > 1:
        names_found = " and ".join(file.name for file in named)
        raise InputError(f"{path}: {names_found} both match this benchmark. Set eval.sources to one of them.")
    return named or files


def _is_hub_name(source: str) -> bool:
    return Path(source).suffix not in SUFFIXES and bool(re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", source))


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = source.partition("@")
    use_hub()
    try:
        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # offline, gated, misspelled: many exception classes, one remedy
        raise InputError(_how_to_get(source, error)) from error


def download_files(repo: str, names: tuple[str, ...]) -> Iterator[Path]:
    """Download files of a dataset repository one at a time, as they are needed."""
    from huggingface_hub import hf_hub_download

    use_hub()
    for name in names:
        try:
            yield Path(hf_hub_download(repo, name, repo_type="dataset"))
        except Exception as error:
            raise InputError(_how_to_get(repo, error, names)) from error


def _how_to_get(source: str, error: Exception, files: tuple[str, ...] = ()) -> str:
    repo, _, revision = source.partition("@")
    reason = why_not(error).split(". ")[0].rstrip(".")
    command = " ".join(["hf download --repo-type dataset", repo, *files]) + f" --revision {revision}" * bool(revision)
    return (
        f"{source} cannot be read from the hub ({reason}). Where there is a network, run: "
        f"{command} --local-dir DIR, then set eval.sources to DIR."
    )
