"""A small hub on the loopback address for the real client: revisions, uploads, gated and missing data, faults."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import yaml

PATIENCE = 600  # seconds for an answer, however busy the machine
LARGE = (".safetensors",)  # what it keeps as large files, with a sha256


@dataclass
class Hub:
    """Repositories as commits of files, what was asked for, and what goes wrong."""

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repository -> commit -> files
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)  # `METHOD path range`
    cut: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the connection breaks ...
    cuts: int = 0  # ... so many times
    hold: threading.Event = field(default_factory=threading.Event)  # weights are sent only while it is set
    private: dict[str, bool] = field(default_factory=dict)  # repositories that the client has created
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded files by their sha256, before they are committed
    refused: int | None = None  # uploads after which writing is forbidden
    before_commit: Callable[[], object] | None = None  # called once, when the next commit has arrived

    def push(self, repository: str, folder: Path) -> str:
        """Add a commit with the files of a folder; returns its name."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        return self.push_files(repository, files)

    def push_files(self, repository: str, files: dict[str, bytes], commit: str | None = None) -> str:
        """Add a commit with these files, perhaps by a given name; the name of a data set begins with `datasets/`."""
        commit = commit or hashlib.sha1(b"".join(files.values()) + repository.encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        return commit

    def sent(self, ending: str) -> list[str]:
        """The requests for the content of files with this ending."""
        return [line for line in self.asked if line.startswith("GET") and line.split()[1].endswith(ending)]


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Run a hub, and point the client of this process to it and to an empty cache."""
    hub = Hub()
    hub.hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of processes that are started; this one has read it already
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # uploads go to this server, not to Xet storage
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lightning_weave.models.hub.CONNECT_TIMEOUT", PATIENCE)
    for clock in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # after ten seconds it would ask again
        monkeypatch.setenv(clock, str(PATIENCE))
        monkeypatch.setattr(f"huggingface_hub.constants.{clock}", PATIENCE)
    try:
        yield hub
    finally:
        hub.hold.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Say what is known of some paths, or take a part of an upload."""
        asked = self._body().decode()
        path = unquote(self.path.partition("?")[0])
        upload = re.fullmatch(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/(preupload|commit)/[^/]+", path)
        batch = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        if path == "/api/validate-yaml":
            header = yaml.safe_load(json.loads(asked)["content"].split("---")[1])
            return self._json({"errors": [], "warnings": [], "header": header})
        if path == "/api/repos/create":
            return self._create(json.loads(asked))
        if batch or upload:
            self.hub.asked.append(f"POST {path}")
            if self.hub.refused is not None and len(self.hub.large) >= self.hub.refused:
                return self._refuse(403, "Forbidden")
        if batch:
            objects = [self._place(one) for one in json.loads(asked)["objects"]]
            return self._json({"transfer": "basic", "objects": objects})
        if upload and upload[2] == "preupload":
            names = [one["path"] for one in json.loads(asked)["files"]]
            modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
            return self._json(
                {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]}
            )
        if upload:
            return self._commit(upload[1], [json.loads(line) for line in asked.splitlines()])
        found = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", self.path)
        commits = self.hub.commits.get(f"datasets/{found[1]}" if found else "")
        if found is None or commits is None:
            return self._refuse(404, "RepoNotFound")
        files = commits.get(found[2]) or list(commits.values())[-1]
        wanted = json.loads(asked)["paths"] if asked.startswith("{") else parse_qs(asked)["paths"]
        return self._json([row for row in _tree(files) if row["path"] in wanted])

    def do_PUT(self) -> None:
        """Take a large file."""
        data = self._body()
        name = self.path.rsplit("/", 1)[1]
        if hashlib.sha256(data).hexdigest() != name:
            return self._refuse(400, "BadChecksum")
        self.hub.large[name] = data
        return self._json({})

    def _body(self) -> bytes:
        """Read what was sent, also in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{'datasets/' if asked.get('type') == 'dataset' else ''}{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.commits:
            return self._json(url, 409)
        self.hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.push_files(name, {}, hashlib.sha1(name.encode()).hexdigest())
        return self._json(url)

    def _place(self, one: dict[str, Any]) -> dict[str, Any]:
        there = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] in self.hub.large:
            return there
        return {**there, "actions": {"upload": {"href": f"{self.hub.url}/large/{one['oid']}"}}}

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        if (call := self.hub.before_commit) is not None:
            self.hub.before_commit = None
            call()
        commits = self.hub.commits[repository]
        parent = list(commits)[-1]
        if lines[0]["value"].get("parentCommit", parent) != parent:
            return self._refuse(412, "PreconditionFailed")
        files = dict(commits[parent])
        for line in lines[1:]:
            value = line["value"]
            is_large = line["key"] == "lfsFile"
            files[value["path"]] = self.hub.large[value["oid"]] if is_large else base64.b64decode(value["content"])
        name = hashlib.sha1(parent.encode() + json.dumps(lines).encode()).hexdigest()
        self.hub.push_files(repository, files, name)
        return self._json({"commitUrl": f"{self.hub.url}/{repository}/commit/{name}", "commitOid": name})

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        api = re.fullmatch(r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        repository = found[1] if found else ""
        commits = self.hub.commits.get(repository)
        if found is None or commits is None:
            return self._refuse(404, "RepoNotFound")
        revision = (api[3] if api else file[2] if file else None) or "main"
        revision, _, below = revision.partition("/") if api and api[2] == "tree" else (revision, "", "")
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return self._refuse(404, "RevisionNotFound")
        if api:
            files = commits[commit]
            deep = "recursive=true" in self.path.lower()
            rows = _tree(files) if deep and not below else _below(_tree(files), below, deep)
            if api[2] == "tree" and not rows:
                return self._refuse(404, "EntryNotFound")
            return self._json(rows if api[2] == "tree" else _info(repository, commit, files))
        assert file is not None
        if repository in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if file[3] not in commits[commit]:
            return self._refuse(404, "EntryNotFound")
        return self._send(commit, file[3], commits[commit][file[3]])

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, commit: str, name: str, data: bytes) -> None:
        start = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_digest(name, data)}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if name.endswith(LARGE):
            self.hub.hold.wait()
        if name in self.hub.cut and self.hub.cuts:
            self.hub.cuts -= 1
            self.wfile.write(data[start : start + self.hub.cut[name]])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(data[start:])


def _digest(name: str, data: bytes) -> str:
    """A large file's sha256, another's name in git."""
    return (hashlib.sha256(data) if name.endswith(LARGE) else hashlib.sha1(b"blob %d\0" % len(data) + data)).hexdigest()


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    rows = [
        {"type": "file", "path": name, "size": len(data), "oid": _digest(name, data)} for name, data in files.items()
    ]
    for row in rows:
        if str(row["path"]).endswith(LARGE):
            row["lfs"] = {"oid": row["oid"], "size": row["size"], "pointerSize": 130}
    return rows


def _below(rows: list[dict[str, Any]], folder: str, deep: bool) -> list[dict[str, Any]]:
    """What lies in a folder, and unless all of it is wanted, its folders instead of what is in those."""
    start = f"{folder}/" if folder else ""
    inside = [row for row in rows if str(row["path"]).startswith(start)]
    found = {}
    for row in inside:
        first, slash, _ = str(row["path"])[len(start) :].partition("/")
        is_folder = bool(slash) and not deep
        entry = {"type": "directory", "path": start + first, "oid": "0" * 40, "size": 0} if is_folder else row
        found[str(entry["path"])] = entry
    return list(found.values())


def _info(repository: str, commit: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = []
    for row in _tree(files):
        sibling = {"rfilename": row["path"], "size": row["size"], "blobId": row["oid"]}
        if "lfs" in row:
            sibling["lfs"] = {"sha256": row["oid"], "size": row["size"], "pointerSize": 130}
        siblings.append(sibling)
    return {
        "_id": "1",
        "id": repository,
        "modelId": repository,
        "sha": commit,
        "private": False,
        "siblings": siblings,
        "tags": [],
        "downloads": 0,
        "likes": 0,
    }
