"""As much of a W&B server as its client needs to begin a run, to continue it, and to log to it."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER = {"id": "1", "name": "me"}
PROJECT = {"id": "2", "name": "weave", "entity": OWNER}


@dataclass
class KeptRun:
    """What the server knows about one run."""

    settings: list[dict[str, Any]] = field(default_factory=list)  # of every command that began or continued it
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    runs: dict[str, KeptRun]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/file_stream"):
            self._log(self.path.split("/")[-2], json.loads(_plain(raw)).get("files") or {})
            self._answer({"limits": {}})
        elif self.path.endswith("/graphql"):
            asked = json.loads(_plain(raw))
            self._answer({"data": self._look_up(asked["query"], asked.get("variables") or {})})
        else:  # figures about the client itself
            self._answer({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def _look_up(self, query: str, said: dict[str, Any]) -> dict[str, Any]:
        if "query RunResumeStatus" in query:
            return {"model": PROJECT | {"bucket": self._tail(said["name"])}}
        if "mutation UpsertBucket" in query:
            self.runs.setdefault(said["name"], KeptRun()).settings.append(said)
            bucket = {"id": "3", "name": said["name"], "displayName": said.get("displayName"), "project": PROJECT}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        return {
            "viewer": {"id": "4", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"features": []},
            "createRunFiles": {"runID": "3", "uploadHeaders": [], "files": []},
        }

    def _tail(self, name: str) -> dict[str, Any] | None:
        """What a client needs to continue a run; None if there is no such run."""
        if name not in self.runs:
            return None
        run = self.runs[name]
        counts = {"historyLineCount": len(run.history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]), "eventsTail": "[]"}
        begun = {"wandbConfig": json.dumps({"t": 1}), "config": "{}", "tags": []}
        return {"id": "3", "name": name, "summaryMetrics": json.dumps(run.summary), **counts, **tails, **begun}

    def _log(self, name: str, files: dict[str, Any]) -> None:
        run = self.runs.setdefault(name, KeptRun())
        for file, chunk in files.items():
            if file.endswith("history.jsonl"):
                run.history[chunk["offset"] :] = map(json.loads, chunk["content"])
            elif file.endswith("summary.json"):
                run.summary = json.loads(chunk["content"][-1])

    def _answer(self, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *unused: Any) -> None: ...


def _plain(raw: bytes) -> bytes:
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


@contextmanager
def serve_wandb() -> Iterator[tuple[str, dict[str, KeptRun]]]:
    """Serve on this machine; gives the address, and the runs by their ids."""
    runs: dict[str, KeptRun] = {}
    handler = type("Handler", (_Handler,), {"runs": runs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", runs
    finally:
        server.shutdown()
        server.server_close()
