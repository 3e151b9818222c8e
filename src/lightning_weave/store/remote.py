"""Files in a store that fsspec reaches (s3://, gs://, hf://, file://), listed with their checksums in one index.

The index is written last: what it lists is there. Every file is checked against it on arrival.
"""

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from pydantic import BaseModel

from lightning_weave.errors import InputError, WeaveError, first_line, hide_credentials
from lightning_weave.store.files import (
    CHECKSUM,
    FilePath,
    fingerprint,
    remove,
    sha256_file,
    sync,
    temporary_name,
    unwritable,
    write_checked,
)
from lightning_weave.store.stage import DIGITS

INDEX = "lightning-weave.json"
LARGEST = 1 << 28  # bytes of an index
FULL = (errno.ENOSPC, errno.EDQUOT)
Index = dict[str, Any]  # what is published, as the tables of `Published`


class PublishedRecipe(BaseModel):  # what uses more of it checks that
    name: str
    student: dict[str, Any]


class PublishedStage(BaseModel):
    path: str
    folder: FilePath
    bytes: int
    rows: int | None
    settings: dict[str, Any]


class PublishedAnchor(BaseModel):
    table: dict[str, Any]  # of the recipe
    models: dict[str, str]  # their identities
    sides: dict[str, str]  # role -> model


class Published(BaseModel):
    """What an index holds, whoever wrote it."""

    recipe: PublishedRecipe
    identities: dict[str, str]  # of models and data
    licences: dict[str, str]
    anchors: dict[str, PublishedAnchor]
    stages: dict[str, PublishedStage]  # by fingerprint
    files: dict[FilePath, str]  # sha256
    links: dict[FilePath, FilePath]  # both from the run directory


@contextmanager
def reaching(url: str, here: Path | None = None) -> Iterator[None]:
    """Turn what a store answers into one line that names it; or what writing a file here has failed of."""
    try:
        yield
    except WeaveError:
        raise
    except (ImportError, ValueError) as error:  # no driver for this protocol, or not a URL
        raise InputError(f"{url}: cannot be opened ({first_line(error)})") from None
    except Exception as error:
        if here and isinstance(error, OSError) and (error.errno in FULL or error.filename == str(here)):
            raise unwritable(here.parent, error) from None
        # The hub's client wraps what an upload of a large file was answered.
        answers = [getattr(one, "response", None) for one in (error, error.__cause__)]
        status = next((answer.status_code for answer in answers if answer is not None), None)
        if isinstance(error, PermissionError) or status in (401, 403):
            raise InputError(f"{url}: permission denied. Log in with an account that may use it") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404:
            raise InputError(f"{url}: not found, or you may not read it") from None
        reason = getattr(error, "strerror", None) or first_line(error)
        raise WeaveError(f"{url}: {reason}. Run the same command again: it continues") from None


class Remote:
    """A folder of such a store."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if (shown := hide_credentials(url)) != url:  # it would be in the log, the card and the recipe
            raise InputError(f"{shown}: holds a password or a token. Use the environment variables of the store")
        with reaching(url):
            local = {"auto_mkdir": True} if url.startswith("file:") or "://" not in url else {}
            self.fs, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **local)
        self.is_hub = "hf" in ([self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def repository(self) -> tuple[str, str]:
        """The data set on the hub that files are written to, and a folder in it."""
        found = re.fullmatch(r"datasets/([^/@]+/[^/@]+)((?:/[^/]+)*)", self.root)
        if found is None:
            raise InputError(f"{self.url}: not a data set of the hub. Write hf://datasets/OWNER/NAME")
        return found[1], found[2].lstrip("/") + "/" * bool(found[2])

    def create(self, private: bool) -> None:
        """Create the repository on the hub, if it is one there and does not exist."""
        if self.is_hub:
            with reaching(self.url):
                HfApi().create_repo(self.repository()[0], repo_type="dataset", private=private, exist_ok=True)

    def index(self) -> Index:
        """Read what is published; all tables are empty if nothing is."""
        with reaching(self.url):
            self.fs.invalidate_cache()
            try:
                text = self.fs.cat_file(f"{self.root}/{INDEX}", end=LARGEST)
            except FileNotFoundError:
                return {key: {} for key in Published.model_fields}
        try:
            index: Index = json.loads(text)
            if index.pop(CHECKSUM) != fingerprint(index):
                raise ValueError("not what was written")
            stages = Published.model_validate(index, strict=True).stages
            if not all(stage.folder.endswith(f"@{key[:DIGITS]}") for key, stage in stages.items()):
                raise ValueError("the folder of another stage")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            wrong = "is damaged, or lists a file that does not belong to a run; nothing was read"
            raise InputError(f"{self.url}/{INDEX}: {wrong}. Ask its owner to remove it and push again") from None
        return index

    def put(self, files: Mapping[str, Path], index: Index, message: str) -> Index:
        """Write files, then the index, to which this one is added; on the hub in one commit.

        The index is read again just before: another push may have changed it. The hub refuses a commit in between;
        other stores cannot.
        """
        with tempfile.TemporaryDirectory() as folder, reaching(self.url):
            copy = Path(folder) / INDEX
            if not self.is_hub:
                for each, path in files.items():
                    self._write(path, each)
                write_checked(copy, merged := merge(self.index(), index))
                self._write(copy, INDEX)
                return merged
            name, below = self.repository()
            while True:
                parent = HfApi().repo_info(name, repo_type="dataset").sha
                write_checked(copy, merged := merge(self.index(), index))
                adds = [CommitOperationAdd(below + each, path) for each, path in [*files.items(), (INDEX, copy)]]
                try:
                    HfApi().create_commit(name, adds, commit_message=message, repo_type="dataset", parent_commit=parent)
                    return merged
                except HfHubHTTPError as error:
                    if error.response.status_code != 412:  # another commit came in between
                        raise

    def _write(self, path: Path, name: str) -> None:
        """Write a file; where others could see half of it, under a temporary name first."""
        target = f"{self.root}/{name}"
        if not isinstance(self.fs, LocalFileSystem):
            return self.fs.put_file(str(path), target)
        temporary = temporary_name(Path(target))
        try:
            self.fs.put_file(str(path), str(temporary))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, name: str, sha256: str, target: Path) -> None:
        """Fetch a file under a temporary name, and rename it if its bytes are those of the index."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(target.absolute())
        try:
            with reaching(self.url, temporary):
                self.fs.get_file(f"{self.root}/{name}", str(temporary))
                is_same = sha256_file(temporary) == sha256
                sync(temporary)
            if not is_same:
                wrong = "is damaged or just being pushed (its sha256 is not that of the index); not kept"
                raise InputError(f"{self.url}/{name}: {wrong}. To repair it, remove {INDEX} there and push again")
            os.replace(temporary, target)
        finally:
            if temporary.exists():
                remove(temporary)


def merge(before: Index, index: Index) -> Index:
    """Add an index to what was published before."""
    return {key: index[key] if key == "recipe" else before[key] | index[key] for key in Published.model_fields}
