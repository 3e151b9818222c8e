"""Sample and score with vLLM: our own engine process (`vllm_worker.py`), or for scoring a server that is running."""

import base64
import hashlib
import json
import math
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import copy
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_weave.devices import set_device
from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.heads import Head, describe_head
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import check_weights
from lightning_weave.models.scorer import Context
from lightning_weave.models.weights import StoredTensor, stored_tensors
from lightning_weave.models.worker_process import WorkerProcess
from lightning_weave.types import Request, Response, SamplingSettings

SERVER_COMMAND = "vllm serve MODEL --runner pooling --pooler-config.task token_embed --no-enable-prefix-caching"
SERVER_TIMEOUT = 3600.0  # seconds, for a batch that waits behind those of others


def start_engine(
    path: Path,
    dtype: str,
    *,
    max_length: int | None = None,
    python: str | None = None,
    trust_remote_code: bool = False,
    options: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **kind: Any,
) -> WorkerProcess:
    """Start vLLM on a model, in the environment of `python`, with `options` for vllm.LLM."""
    settings = {"model": str(path), "dtype": dtype, "max_length": max_length, "trust_remote_code": trust_remote_code}
    return WorkerProcess({**settings, "options": options or {}, **kind}, python, environment)


class VLLMSampler(AbstractContextManager["VLLMSampler"]):
    """Samples through one engine process (`start_engine`), which lives until `close` or the end of this process.

    Each (seed, prompt, response) has its own seed. The engine promises the same draw only for the same requests in
    the same order on the same machine.
    """

    def __init__(self, path: Path, stop: frozenset[int], vocabulary: int, dtype: str = "auto", **settings: Any) -> None:
        self.path = path
        self.stop = sorted(token for token in stop if token < vocabulary)
        self.vocabulary = vocabulary
        self.adapter: str | None = None
        self._engine = start_engine(path, dtype, vocabulary=vocabulary, **settings)
        self.limit = int(self._engine.started["limit"])
        self.close = self._engine.close
        self._sleeps = bool((settings.get("options") or {}).get("enable_sleep_mode"))
        self._asleep = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dtype: str, **settings: Any) -> "VLLMSampler":
        """Start an engine on a checkpoint."""
        trust = checkpoint.trust_remote_code
        return cls(
            checkpoint.path, checkpoint.stop_ids, checkpoint.vocabulary, dtype, trust_remote_code=trust, **settings
        )

    def with_adapter(self, adapter: Path) -> "VLLMSampler":
        """Return a sampler on the same engine with a LoRA adapter; the engine can be used without it as well."""
        other = copy(self)
        other.adapter = str(adapter)
        return other

    def sample(self, requests: Sequence[Request], settings: SamplingSettings, finite: bool = True) -> list[Response]:
        """Draw one response per request, in their order."""
        responses = dict(self.stream(requests, settings, finite))
        return [responses[index] for index in range(len(requests))]

    def stream(
        self, requests: Sequence[Request], settings: SamplingSettings, finite: bool = True
    ) -> Iterator[tuple[int, Response]]:
        """Draw one response per request, and yield each with the request's index as soon as it has finished.

        Unless its log-probabilities need not be `finite`, a model whose logits are not is refused.
        """
        if not requests:
            return
        for request in requests:
            if not 0 < (length := len(request.prompt_ids)) < self.limit:
                raise InputError(
                    f"prompt {request.prompt} has {length} tokens; the engine takes 1 to {self.limit - 1}. "
                    "Change the length filter of the prompts"
                )
        job = {
            "prompts": [list(map(int, request.prompt_ids)) for request in requests],
            "seeds": [request_seed(settings.seed, request) for request in requests],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "stop": self.stop,
            "adapter": self.adapter,
        }
        for entry in self._engine.stream(job):
            ids = entry["ids"]
            stopped = bool(ids) and ids[-1] in self.stop
            if not ids or max(ids) >= self.vocabulary or stopped != (entry["finish"] == "stop"):
                raise WeaveError(f"the vLLM engine returned a response that breaks its settings: it ends {ids[-5:]}")
            if finite and not all(map(math.isfinite, entry["logprobs"])):
                raise logits_not_finite(requests[entry["index"]].name, str(self.path))
            yield entry["index"], Response(ids, "stop" if stopped else "length", logprobs=entry["logprobs"])

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the engine's log-probability of every token of a row but the first."""
        job = {"rows": [list(map(int, ids)) for ids in rows], "adapter": self.adapter}
        scored: list[list[float]] = self._engine.ask(job)["logprobs"]
        return scored

    def reload(self, folder: Path) -> None:
        """Load the weights of another checkpoint of the same architecture."""
        self._engine.ask({"reload": str(folder), "asleep": self._asleep})
        self._asleep = False
        self.path = folder

    def sleep(self) -> None:
        """Free the device's memory until the next `reload`, if the engine has enable_sleep_mode."""
        if self._sleeps and not self._asleep:
            self._engine.ask({"sleep": True})
            self._asleep = True


def request_seed(seed: int, request: Request) -> int:
    """Derive a seed from (seed, prompt, response)."""
    digest = hashlib.sha256(f"{seed}/{request.prompt}/{request.response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # the engine takes signed 64-bit integers


class VLLMBody:
    """vLLM as the body of a scorer: an engine process that is started here, or a pooling server at `url`."""

    packs = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        url: str | None = None,
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        self.name = str(checkpoint) if url is None else f"{checkpoint} at {url}"
        self.url = url
        self.device = device  # of the head
        self.head, self.embedded = load_head(checkpoint, device)
        self.limit: int | None
        self._asking = ThreadPoolExecutor(1, "hidden states", initializer=set_device, initargs=(device,))
        self._ahead: tuple[list[Context], Future[Tensor]] | None = None
        if url is not None:
            served = _ask_server(url, "/v1/models")["data"][0]
            self.served_name = str(served["id"])
            self.limit = int(served["max_model_len"])
            return
        trust = checkpoint.trust_remote_code
        self._engine = start_engine(checkpoint.path, dtype, trust_remote_code=trust, hidden=True, **settings)
        self.limit = int(self._engine.started["limit"])
        self._folder = tempfile.TemporaryDirectory(prefix="lweave-hidden-")

    def hidden(self, batch: list[Context], upcoming: list[Context]) -> Tensor:
        """Compute the hidden states of the needed positions (N, D), row after row, in the engine's dtype if narrow.

        With a wider output matrix they are made as wide: the head computes in what it is given. Then the upcoming batch
        is asked for, so that the engine computes while the head does.
        """
        _, states = self._ahead if self._ahead and self._ahead[0] == batch else self._ask(batch)
        states_ND = states.result()
        self._ahead = self._ask(upcoming) if upcoming else None
        return states_ND

    def _ask(self, batch: list[Context]) -> tuple[list[Context], Future[Tensor]]:
        return batch, self._asking.submit(self._states, batch)

    def _states(self, batch: list[Context]) -> Tensor:
        states_ND = self._from_engine(batch) if self.url is None else self._from_server(self.url, batch)
        states_ND = states_ND.to(self.device)
        return states_ND.to(torch.promote_types(states_ND.dtype, self.head.weight_VD.dtype))

    def _from_engine(self, batch: list[Context]) -> Tensor:
        file = Path(self._folder.name) / "hidden"
        rows = [context.ids.tolist() for context in batch]
        positions = [context.positions_T.tolist() for context in batch]
        answer = self._engine.ask({"rows": rows, "positions": positions, "file": str(file)})
        states = torch.from_numpy(np.fromfile(file, np.uint8)).view(getattr(torch, answer["dtype"]))
        return states.view(answer["count"], -1)

    def _from_server(self, url: str, batch: list[Context]) -> Tensor:
        query = {"task": "token_embed", "use_activation": False, "encoding_format": "base64", "embed_dtype": "float32"}
        rows = [context.ids.tolist() for context in batch]
        answer = _ask_server(url, "/pooling", {"model": self.served_name, "input": rows, **query})
        width = self.head.weight_VD.shape[1]
        states = []
        for context, entry in zip(batch, sorted(answer["data"], key=lambda entry: entry["index"]), strict=True):
            numbers = np.frombuffer(base64.b64decode(entry["data"]), np.float32)
            if len(numbers) != len(context.ids) * width:
                raise InputError(
                    f"{url} returned {len(numbers)} numbers for {len(context.ids)} tokens, not one vector of "
                    f"{width} for each. Start it with {SERVER_COMMAND} and the checkpoint {self.name}"
                )
            states.append(numbers.reshape(len(context.ids), -1)[context.positions_T.numpy()])
        wide_ND = torch.from_numpy(np.concatenate(states))
        narrow_ND = wide_ND.bfloat16()
        return narrow_ND if torch.equal(narrow_ND.float(), wide_ND) else wide_ND

    def close(self) -> None:
        """Stop the engine; a server keeps running."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        if self.url is None:
            self._engine.close()  # waits until it has answered
            self._folder.cleanup()


def server_version(url: str) -> str:
    """Ask a server which vLLM it runs."""
    return str(_ask_server(url, "/version").get("version", "unknown"))


def _ask_server(url: str, path: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url.rstrip("/") + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:300]
        raise InputError(
            f"{url}{path} answers {error.code} {error.reason}: {text}\nScoring needs a vLLM server that returns "
            f"hidden states: start it with {SERVER_COMMAND}"
        ) from None
    except (OSError, HTTPException, ValueError) as error:  # no server, one that died, or one of another kind
        raise WeaveError(f"no answer from {url}{path} ({error}). Start the server, then run this again") from None


def load_head(checkpoint: Checkpoint, device: torch.device) -> tuple[Head, int]:
    """Read only the output matrix; returns the head and the number of ids that the model takes."""
    check_weights(checkpoint.path)
    tensors = stored_tensors(checkpoint.path)
    model = checkpoint.build_meta()
    module = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    names = {each: name for name, each in model.named_modules()}

    def find(name: str) -> StoredTensor | None:
        """Find a tensor; a multimodal checkpoint has a prefix before the names of its text model."""
        ending = ".".join(name.split(".")[-2:])
        longer = min((key for key in tensors if f".{key}".endswith(f".{ending}")), key=len, default=name)
        return tensors.get(name, tensors.get(longer))

    weight = find(f"{names[module]}.weight")
    if weight is None and model.config.get_text_config().tie_word_embeddings:
        weight = find(f"{names[embeddings]}.weight")
    if weight is None or not weight.dtype.is_floating_point:
        raise InputError(
            f"{checkpoint}: no unquantised output matrix ({names[module]}.weight) in its weights, which vLLM needs to "
            'score. Use a version whose lm_head is not quantised, or engine = "hf"'
        )
    module.weight = nn.Parameter(weight.read().to(device), requires_grad=False)
    bias = find(f"{names[module]}.bias") if getattr(module, "bias", None) is not None else None
    if bias is not None:
        module.bias = nn.Parameter(bias.read().to(device), requires_grad=False)
    return describe_head(model, checkpoint.vocabulary), embeddings.num_embeddings
