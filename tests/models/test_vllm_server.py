"""Scoring through a vLLM server: its hidden states over HTTP and our head, and servers that cannot do it."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_body import CPU, hf_of, save, some_rows

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.heads import hidden_states
from lightning_weave.models import scorer
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.vllm import SERVER_COMMAND, VLLMBody, server_version
from ports import held_port, vllm_server

Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start servers that answer what a function says; None is a page that is not there."""
    running: list[HTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found = answer(self.path, json.loads(said) if said else {})
                self.send_response(200 if found is not None else 404)
                self.end_headers()
                self.wfile.write(json.dumps(found or {"detail": "Not Found"}).encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def pooling(checkpoint: Checkpoint, cached: int = 0) -> Answer:
    """Answer as vLLM does; with `cached`, as if its prefix cache had the first so many tokens."""
    model = checkpoint.load(torch.float32, CPU)

    @torch.inference_mode()
    def answer(path: str, question: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/v1/models":
            return {"data": [{"id": "served", "max_model_len": 128}]}
        if path != "/pooling":
            return {"version": "0.32.0"} if path == "/version" else None
        assert (question["model"], question["task"], question["use_activation"]) == ("served", "token_embed", False)
        states = [hidden_states(model, torch.tensor([ids]))[0, cached:].numpy() for ids in question["input"]]
        entries = [{"index": i, "data": base64.b64encode(one.tobytes()).decode()} for i, one in enumerate(states)]
        return {"data": entries[::-1]}

    return answer


def check_scores(checkpoint: Checkpoint, url: str) -> None:
    rows = some_rows(checkpoint.vocabulary)
    found = Scorer(VLLMBody(checkpoint, CPU, url=url)).candidates(rows, 8)
    expected = hf_of(checkpoint).candidates(rows, 8, given=[ids_TC for ids_TC, *_ in found])
    for theirs, right in zip(found, expected, strict=True):
        for array, other in zip(theirs[1:], right[1:], strict=True):
            np.testing.assert_allclose(array, other, atol=2e-4)


def test_a_server_scores_as_transformers_does(tmp_path: Path, serve: Callable[[Answer], str]) -> None:
    checkpoint = save(tmp_path / "model", "soft cap")
    url = serve(pooling(checkpoint))
    assert server_version(url) == "0.32.0"
    check_scores(checkpoint, url)


def test_the_next_batch_is_computed_while_the_head_reads_this_one(
    tmp_path: Path, serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path / "model", "tied")
    answer, count = pooling(checkpoint), len(some_rows(checkpoint.vocabulary))
    asked = [threading.Event() for _ in range(count)]
    numbers, heads, head = iter(asked), iter([*asked[1:], asked[-1]]), scorer.top_candidates

    def note(path: str, question: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/pooling":
            next(numbers).set()
        return answer(path, question)

    def wait_for_the_next(*args: Any) -> Any:
        assert next(heads).wait(timeout=60), "the server was not asked for the next batch before the head had ended"
        return head(*args)

    monkeypatch.setattr(scorer, "top_candidates", wait_for_the_next)
    body = VLLMBody(checkpoint, CPU, url=serve(note))
    assert len(Scorer(body, token_budget=1).candidates(some_rows(checkpoint.vocabulary), 8)) == count
    assert next(numbers, None) is None, "each batch was asked for once"


def test_a_server_that_leaves_out_positions_is_refused(tmp_path: Path, serve: Callable[[Answer], str]) -> None:
    checkpoint = save(tmp_path / "model", "tied")
    body = VLLMBody(checkpoint, CPU, url=serve(pooling(checkpoint, cached=1)))
    with pytest.raises(InputError, match=r"not one vector of 64 for each.*--no-enable-prefix-caching"):
        Scorer(body).candidates(some_rows(checkpoint.vocabulary), 4)


def test_a_server_for_chat_alone_is_refused_with_the_reason(tmp_path: Path, serve: Callable[[Answer], str]) -> None:
    checkpoint = save(tmp_path / "model", "tied")
    models = {"data": [{"id": "served", "max_model_len": 128}]}
    url = serve(lambda path, _: models if path == "/v1/models" else None)
    with pytest.raises(InputError) as refused:
        Scorer(VLLMBody(checkpoint, CPU, url=url)).candidates(some_rows(checkpoint.vocabulary), 4)
    assert f"{url}/pooling answers 404" in str(refused.value)
    assert SERVER_COMMAND in str(refused.value)


def test_no_server_is_said(tmp_path: Path) -> None:
    with held_port() as port, pytest.raises(WeaveError, match=rf"no answer from http://127\.0\.0\.1:{port}/version"):
        server_version(f"http://127.0.0.1:{port}")


@pytest.mark.vllm
def test_a_real_server_scores_as_transformers_does(tmp_path: Path, vllm_python: str) -> None:
    checkpoint = save(tmp_path / "model", "experts")
    words = SERVER_COMMAND.removeprefix("vllm serve MODEL ").split()
    with vllm_server(vllm_python, checkpoint.path, tmp_path / "server.log", *words) as url:
        check_scores(checkpoint, url)
