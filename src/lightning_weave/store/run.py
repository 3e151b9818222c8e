"""A run directory: stages as folders of shards with a manifest that is written last.

A stage is *done* when its manifest carries the fingerprint that the recipe gives it now. Every shard carries that
fingerprint too, so a kill needs no clean-up. What another recipe has made in a stage's folder is set aside when the
stage begins and removed when it is whole: until then nothing is lost.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from lightning_weave.errors import CorruptData, StaleInput
from lightning_weave.ranks import is_alone, is_first
from lightning_weave.store.files import (
    append_line,
    read_json,
    read_lines,
    remove,
    remove_temporaries,
    sha256_file,
    sync,
    write_atomic,
    write_json,
)
from lightning_weave.store.identity import fingerprint
from lightning_weave.store.shards import FINGERPRINT, Shard, pack

T = TypeVar("T")
State = Literal["done", "partial", "stale", "missing"]
LATE = 60.0  # seconds until a shared disk shows what another machine has written: as long as NFS keeps a look-up
FORMAT = 1  # of shards and manifests; part of every fingerprint
MANIFEST = "manifest.json"
BEGUN = "step.json"  # what an unfinished stage will be; the manifest takes its place
NOTED = "engines.jsonl"  # what makes an unfinished stage; the manifest has it in the end
ASIDE = ".aside-"


@dataclass(frozen=True)
class Step:
    """One stage of one run as the recipe describes it now: where it lives, what decides its content, how to make it."""

    path: str  # folder below the run directory, for example score/Qwen3-8B-Base
    settings: Mapping[str, Any]  # what decides the content, model identities included
    inputs: tuple["Step", ...] = ()
    command: str = ""  # what a user types to make it
    subject: frozenset[str] = frozenset()  # of a measurement: the settings that say what is measured, not how
    made: str = ""  # the fingerprint on disk, of a step that is taken as it stands there

    @property
    def fingerprint(self) -> str:
        if self.made:
            return self.made
        inputs = {step.path: step.fingerprint for step in self.inputs}
        return fingerprint({"format": FORMAT, "path": self.path, "settings": self.settings, "inputs": inputs})

    def protocol(self, settings: Mapping[str, Any]) -> str:
        """Name how something is measured. Measurements by other protocols stand beside each other."""
        return fingerprint({key: value for key, value in settings.items() if key not in self.subject})[:8]


@dataclass(frozen=True)
class Stage:
    """The folder of one step: which shards are there, which are pending, and its manifest."""

    folder: Path
    step: Step

    def shard_path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.safetensors"

    @property
    def manifest_path(self) -> Path:
        return self.folder / MANIFEST

    def manifest(self) -> dict[str, Any] | None:
        """The manifest on disk, whatever it was made with."""
        if not self.manifest_path.exists():
            return None
        manifest = read_json(self.manifest_path)
        if not isinstance(manifest, dict) or not _all_inside(manifest.get("shards")):
            raise CorruptData(f"{self.manifest_path}: not a valid manifest. Remove it and run: {self.step.command}")
        return manifest

    def state(self) -> State:
        """Compare what is on disk with what the recipe says now."""
        manifest = self.manifest()
        if manifest is not None:
            if manifest.get("fingerprint") != self.step.fingerprint:
                return "stale"
            return "done" if all(self._is_whole(entry) for entry in manifest["shards"]) else "partial"
        begun = recorded(self.folder)
        if begun is not None and begun["fingerprint"] != self.step.fingerprint:
            names = {path.name for path in self.folder.iterdir()}
            return "stale" if names - {BEGUN, NOTED} else "missing"
        files = list(self.folder.glob("*.safetensors")) if self.folder.exists() else []
        if not files:
            return "missing"
        return "partial" if any(self._is_ours(path) for path in files) else "stale"

    def changed_settings(self) -> list[str]:
        """Say how the settings on disk differ from the recipe's, for people."""
        changed = [f"{key} {what}" for key, what in self.changes().items()]
        return changed + [f"{path} has changed" for path in self.changed_inputs()]

    def changes(self) -> dict[str, str]:
        """The settings that differ from those on disk, by key, and how: `12 -> 10`, `is new`, `is gone`."""
        return dict(differences((recorded(self.folder) or {}).get("settings", {}), dict(self.step.settings)))

    def changed_inputs(self) -> list[str]:
        """The inputs that are not those that the manifest was made from."""
        inputs = (recorded(self.folder) or {}).get("inputs", {})
        return [step.path for step in self.step.inputs if inputs.get(step.path) != step.fingerprint]

    def standing(self) -> Step:
        """The step that made what is here; this stage's own where nothing is finished."""
        manifest = self.manifest()
        if manifest is None:
            return self.step
        return replace(self.step, settings=manifest["settings"], made=manifest["fingerprint"])

    def begin(self) -> None:
        """Make room for this step. What another recipe made here is set aside, or put back if it is this step's own.

        A rename each: a kill between them loses nothing, and beginning again ends the same.
        """
        if self.state() == "stale":
            for stage in self.inputs():
                stage.require()  # first: nothing is set aside for what cannot be made
            _move(self.folder, self._aside((recorded(self.folder) or {}).get("fingerprint", "unknown")))
        if self.state() != "done" and self._aside(self.step.fingerprint).exists():
            _move(self._aside(self.step.fingerprint), self.folder)
        if self.state() == "done":
            self.settle()
        elif (recorded(self.folder) or {}).get("fingerprint") != self.step.fingerprint:
            (self.folder / NOTED).unlink(missing_ok=True)
            write_json(self.folder / BEGUN, self._own())

    def aside(self) -> list[Path]:
        """The folders that were set aside for this stage."""
        folders = sorted(self.folder.parent.glob(f"{ASIDE}{self.folder.name}@*"))
        return [folder for folder in folders if folder.name.rpartition("@")[0] == f"{ASIDE}{self.folder.name}"]

    def settle(self) -> None:
        """Remove what was set aside, now that this stage is whole."""
        for folder in self.aside():
            with suppress(FileNotFoundError):  # another rank has removed it
                remove(folder)
        for name in (BEGUN, NOTED):
            (self.folder / name).unlink(missing_ok=True)

    def _aside(self, fingerprint: str) -> Path:
        return self.folder.with_name(f"{ASIDE}{self.folder.name}@{fingerprint}")

    def pending(self, shards: int) -> list[int]:
        """List the shards that still have to be made.

        One that the manifest lists but this machine does not see may only be late to show: look again before it is
        made a second time.
        """
        missing = self.missing(range(shards))
        if missing and not is_alone() and (self.manifest() or {}).get("fingerprint") == self.step.fingerprint:
            self._look_until(lambda: self.state() == "done")
            missing = self.missing(missing)
        return missing

    def missing(self, shards: Iterable[int]) -> list[int]:
        """List those shards that are not there as this machine sees it now."""
        self._refresh()
        return [index for index in shards if not self._is_ours(self.shard_path(index))]

    def _look_until(self, seen: Callable[[], bool]) -> None:
        """Look again until something is seen or cannot be late any more."""
        end = time.monotonic() + LATE
        while not seen() and time.monotonic() < end:
            time.sleep(0.1)
            self._refresh()

    def _refresh(self) -> None:
        """List the folder, which makes a client of NFS ask the server again for names that it has not seen."""
        if not is_alone() and self.folder.exists():
            os.listdir(self.folder)

    def write(self, index: int, shard: Any) -> int:
        """Write one shard atomically; returns its size in bytes. A manifest for shards that were deleted is removed."""
        path = self.shard_path(index)
        data = pack(shard, self.step.fingerprint)
        if not self._is_ours(path):
            self.manifest_path.unlink(missing_ok=True)
        write_atomic(path, data)
        return len(data)

    def open(self, kind: type[T], index: int) -> Shard[T]:
        """Map one shard of this step for reading; a shard of an earlier recipe is refused."""
        path = self.shard_path(index)
        if not path.exists():
            raise CorruptData(f"{path} is missing. Rerun: {self.step.command}")
        shard = Shard(kind, path)
        if shard.fingerprint != self.step.fingerprint:
            raise StaleInput(f"{path} was made with other settings. Rerun: {self.step.command}")
        return shard

    def finish(self, kind: type[Any], shards: int, extra: Mapping[str, Any] | None = None) -> bool:
        """Write the manifest if every shard is there; any rank may call it, all would write the same bytes."""
        if self.state() == "done":  # no need to read and hash it all again
            return True
        if self.missing(range(shards)):
            return False
        paths = [self.shard_path(index) for index in range(shards)]
        # All shards are there, so none is being written; but another rank may be writing this manifest.
        remove_temporaries(self.folder, "" if is_alone() else ".safetensors")
        entries = []
        for path in paths:
            shard = Shard(kind, path)
            entries.append({**_entry(path, self.folder), "rows": len(shard), "positions": shard.positions})
        counts = {name: sum(entry[name] for entry in entries) for name in ("rows", "positions")}
        self._write_manifest(entries, {**counts, **(extra or {})})
        for path in set(self.folder.glob("*.safetensors")) - set(paths):
            path.unlink()  # left by an earlier version, from a recipe with more shards
        return True

    def record(self, files: Sequence[Path], extra: Mapping[str, Any] | None = None) -> None:
        """Finish a stage whose outcome is ordinary files instead of shards."""
        self._write_manifest([_entry(path, self.folder) for path in files], extra or {})

    def note_engine(self, name: str) -> list[str]:
        """Write down for the manifest what makes this stage from now on; returns what else has made parts of it."""
        engines = self.engines()
        noted = {row["engine"] for row in read_lines(self.folder / NOTED)}
        for each in sorted({*engines, name} - noted):  # a manifest goes when one of its shards is made again
            append_line(self.folder / NOTED, {"engine": each})
        return [each for each in engines if each != name]

    def engines(self) -> list[str]:
        """What has made this stage, by version and dtype. They are no part of its fingerprint."""
        noted = [row["engine"] for row in read_lines(self.folder / NOTED)]  # first: it goes when a manifest has come
        manifest = self.manifest() or {}
        recorded_engines = manifest.get("engines", []) if manifest.get("fingerprint") == self.step.fingerprint else []
        return sorted({*recorded_engines, *noted})

    def _write_manifest(self, entries: list[dict[str, Any]], extra: Mapping[str, Any]) -> None:
        engines = {"engines": made_with} if (made_with := self.engines()) else {}
        write_json(self.manifest_path, {**self._own(), "shards": entries, **engines, **extra})
        self.settle()

    def _own(self) -> dict[str, Any]:
        inputs = {step.path: step.fingerprint for step in self.step.inputs}
        return {"fingerprint": self.step.fingerprint, "settings": dict(self.step.settings), "inputs": inputs}

    def require(self) -> dict[str, Any]:
        """Return the manifest, or refuse a missing, unfinished or stale stage with the command that fixes it."""
        if not is_first() and self.state() in ("missing", "partial"):  # another rank may just have made it
            self._look_until(lambda: self.state() == "done")
        match self.state():
            case "done":
                manifest = self.manifest()
                assert manifest is not None
                return manifest
            case "stale":
                self._require_fresh_inputs()
                changed = "; ".join(self.changed_settings()) or "an earlier recipe made it"
                raise StaleInput(f"{self.folder} is stale ({changed}).\nRerun: {self.step.command}")
            case state:
                word = "is not finished" if state == "partial" else "is not there yet"
                raise StaleInput(f"{self.folder} {word}. Make it with: {self.step.command}")

    def _require_fresh_inputs(self) -> None:
        """Where an input is stale too, say that instead: it comes first."""
        for stage in self.inputs():
            if stage.state() == "stale":
                stage.require()

    def inputs(self) -> list["Stage"]:
        """The folders of this step's inputs."""
        run_dir = self.folder.parents[len(Path(self.step.path).parts) - 1]
        return [Stage(run_dir / step.path, step) for step in self.step.inputs]

    def verify(self) -> list[str]:
        """Check every byte listed in the manifest; returns what is wrong, with the file and the fix."""
        problems = []
        for path, what in self.damaged().items():
            remedy = f"Remove it (rm {path}), then run" if path.exists() else "Run"
            problems.append(f"{path} {what}. {remedy}: {self.step.command}")
        return problems

    def damaged(self) -> dict[Path, str]:
        """Find the files that are not what the manifest says, and what they are instead."""
        faults = {}
        for entry in (self.manifest() or {"shards": []})["shards"]:
            path = self.folder / entry["file"]
            if not path.exists():
                faults[path] = "is missing"
            elif sha256_file(path) != entry["sha256"]:
                faults[path] = "is damaged (its sha256 is not the manifest's)"
        return faults

    def _is_whole(self, entry: Mapping[str, Any]) -> bool:
        path = self.folder / entry["file"]
        return path.exists() and path.stat().st_size == entry["bytes"]

    def _is_ours(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            return _read_fingerprint(path) == self.step.fingerprint
        except (ValueError, OSError):
            return False


def recorded(folder: Path) -> dict[str, Any] | None:
    """What a folder holds, or will hold once it is finished: fingerprint, settings and inputs; None if unknown."""
    for name in (MANIFEST, BEGUN):
        if (folder / name).exists():
            document = read_json(folder / name)
            return document if isinstance(document, dict) else None
    return None


def _move(folder: Path, target: Path) -> None:
    if target.exists():  # of an earlier time that this was begun and left
        remove(target)
    os.rename(folder, target)
    sync(folder.parent)


def _all_inside(entries: Any) -> bool:
    """Say whether a manifest's entries name files of its own folder and nothing else."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return False
    paths = [PurePosixPath(str(entry.get("file", "/"))) for entry in entries]
    return not any(path.is_absolute() or ".." in path.parts for path in paths)


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    return {"file": str(path.relative_to(folder)), "sha256": sha256_file(path), "bytes": path.stat().st_size}


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Name what differs between two settings, however deep it lies. A hash says only that something changed."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif old != new:
        if isinstance(old, Mapping) or isinstance(new, Mapping):
            yield key, "is gone" if new is None else "is new"
        elif any(isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value) for value in (old, new)):
            yield key, "has changed"
        else:
            yield key, f"{_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_fingerprint(path: Path) -> str | None:
    """Read only the header of a shard."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 1 << 20)))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if path.stat().st_size != 8 + size + end:
        raise ValueError("cut off")
    return header.get("__metadata__", {}).get(FINGERPRINT)


@dataclass(frozen=True)
class Store:
    """Everything that one run keeps on disk."""

    run_dir: Path

    def stage(self, step: Step) -> Stage:
        """Open the folder of a step: the one of its name or, where that measures by another protocol, one beside it."""
        folder = self.run_dir / step.path
        if step.subject:
            own = beside(folder, step.protocol(step.settings))
            manifest = recorded(folder)
            taken = manifest is not None and step.protocol(manifest["settings"]) != step.protocol(step.settings)
            folder = own if taken or own.exists() else folder
        return Stage(folder, step)


def beside(folder: Path, protocol: str) -> Path:
    """Where a measurement goes when one by another protocol has the name."""
    return folder.with_name(f"{folder.name}@{protocol}")
