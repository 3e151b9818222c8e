"""Hidden states from vLLM, for the scorer's own head: anchors of any size, over several GPUs, quantised or not.

The engine runs as a pooling model, so it drops the output matrix and ships one vector per wanted position. Candidates,
tail mass and soft caps are then computed by the same code as for a transformers model.
"""

import base64
import json
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.heads import Head, describe_head
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.engine_process import EngineProcess
from lightning_weave.models.hf_scorer import Context
from lightning_weave.models.weights import Weights

SERVED_WITH = "vllm serve MODEL --runner pooling --pooler-config.task token_embed --no-enable-prefix-caching"
_SECONDS_TO_ANSWER = 3600.0  # for a batch that waits behind those of others


class VLLMBody:
    """One engine that computes hidden states."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: torch.device,
        *,
        max_length: int | None = None,
        python: str | None = None,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = str(checkpoint)
        self.device = device  # of the head
        self.head, self.embedded = load_head(checkpoint, device)
        settings = {
            "hidden": True,
            "model": str(checkpoint.path),
            "dtype": dtype,
            "max_length": max_length,
            "trust_remote_code": checkpoint.trust_remote_code,
            "options": options or {},
        }
        self._engine = EngineProcess(settings, python, environment)
        self.limit: int | None = int(self._engine.hello["limit"])
        self._folder = tempfile.TemporaryDirectory(prefix="lweave-hidden-")

    def hidden(self, batch: list[Context]) -> Tensor:
        """Compute the wanted hidden states (N, D), row after row."""
        file = Path(self._folder.name) / "hidden.float32"
        rows = [context.ids.tolist() for context in batch]
        positions = [context.positions_T.tolist() for context in batch]
        count = self._engine.ask({"rows": rows, "positions": positions, "file": str(file)})["count"]
        return torch.from_numpy(np.fromfile(file, np.float32).reshape(count, -1)).to(self.device)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()
        self._folder.cleanup()


class ServerBody:
    """A vLLM server that runs the same model for pooling, reached over HTTP."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, url: str) -> None:
        self.name = f"{checkpoint} at {url}"
        self.url = url
        self.device = device  # of the head
        self.head, self.embedded = load_head(checkpoint, device)
        served = _ask_server(url, "/v1/models")["data"][0]
        self.model = str(served["id"])
        self.limit: int | None = int(served["max_model_len"])

    def hidden(self, batch: list[Context]) -> Tensor:
        """Compute the wanted hidden states (N, D), row after row."""
        rows = [context.ids.tolist() for context in batch]
        query = {"task": "token_embed", "use_activation": False, "encoding_format": "base64", "embed_dtype": "float32"}
        answer = _ask_server(self.url, "/pooling", {"model": self.model, "input": rows, **query})
        states = []
        for context, entry in zip(batch, sorted(answer["data"], key=lambda entry: entry["index"]), strict=True):
            numbers = np.frombuffer(base64.b64decode(entry["data"]), np.float32)
            if len(numbers) != len(context.ids) * self.head.weight_VD.shape[1]:
                raise InputError(
                    f"{self.url} gives {len(numbers)} numbers for {len(context.ids)} tokens, not one vector of "
                    f"{self.head.weight_VD.shape[1]} for each. It needs {SERVED_WITH} and the checkpoint {self.name}"
                )
            states.append(numbers.reshape(len(context.ids), -1)[context.positions_T.numpy()])
        return torch.from_numpy(np.concatenate(states)).to(self.device)

    def close(self) -> None:
        """Nothing to end: the server is not ours."""


def server_version(url: str) -> str:
    """Ask a server which vLLM it runs."""
    return str(_ask_server(url, "/version").get("version", "unknown"))


def _ask_server(url: str, path: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url.rstrip("/") + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS_TO_ANSWER) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:300]
        raise InputError(
            f"{url}{path} answers {error.code} {error.reason}: {text}\nOnly a vLLM server that gives hidden states can "
            f"score: start it with {SERVED_WITH}"
        ) from None
    except (OSError, HTTPException, ValueError) as error:  # no server, one that died, or one of another kind
        raise WeaveError(f"no answer from {url}{path} ({error}). Start the server, then run this again") from None


def load_head(checkpoint: Checkpoint, device: torch.device) -> tuple[Head, int]:
    """Read the output matrix alone; returns the head and the number of ids that the model takes."""
    model = checkpoint.skeleton()
    embedded = model.get_input_embeddings().num_embeddings
    module = model.get_output_embeddings()
    name = next(name for name, each in model.named_modules() if each is module)
    inner = next(name for name, each in model.named_modules() if each is model.get_input_embeddings())
    weights = Weights.of(checkpoint.path)
    key = _find(weights, f"{name}.weight")
    if key is None and model.config.get_text_config().tie_word_embeddings:
        key = _find(weights, f"{inner}.weight")
    weight = None if key is None else weights.read(key)
    if weight is None or not weight.is_floating_point():
        raise InputError(
            f"{checkpoint}: no unquantised output matrix ({name}.weight) in its weights, which vLLM needs to score. "
            'Use a version whose lm_head is not quantised, or engine = "hf"'
        )
    module.weight = nn.Parameter(weight.to(device), requires_grad=False)
    if getattr(module, "bias", None) is not None and (key := _find(weights, f"{name}.bias")):
        module.bias = nn.Parameter(weights.read(key).to(device), requires_grad=False)
    return describe_head(model, checkpoint.vocabulary), embedded


def _find(weights: Weights, name: str) -> str | None:
    """Find a tensor by its name; a multimodal checkpoint has its text model's names behind a prefix."""
    if name in weights.files:
        return name
    ending = ".".join(name.split(".")[-2:])
    return min((key for key in weights.files if f".{key}".endswith(f".{ending}")), key=len, default=None)
