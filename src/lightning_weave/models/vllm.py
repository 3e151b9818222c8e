"""Sample with vLLM."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.engine_process import EngineProcess
from lightning_weave.types import Request, Response, SamplingSettings


@dataclass(frozen=True)
class Drawn:
    """A response and the log-probabilities that the engine itself gave its tokens (at temperature 1)."""

    response: Response
    logprobs: list[float]


class VLLMSampler:
    """Sample through one engine process, which lives until `close` or the end of this process.

    Each (seed, prompt, response) has its own seed. The engine promises the same draw only for the same requests in
    the same order on the same machine.
    """

    def __init__(
        self,
        path: Path,
        stop: frozenset[int],
        vocabulary: int,
        dtype: str = "auto",
        *,
        max_length: int | None = None,
        python: str | None = None,
        trust_remote_code: bool = False,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.stop = sorted(token for token in stop if token < vocabulary)
        self.vocabulary = vocabulary
        self.on_tokens = on_tokens
        self.adapter: Path | None = None
        self._engine = EngineProcess(
            {
                "model": str(path),
                "dtype": dtype,
                "vocabulary": vocabulary,
                "max_length": max_length,
                "trust_remote_code": trust_remote_code,
                "options": options or {},
            },
            python,
            environment,
        )
        self.limit = int(self._engine.hello["limit"])
        self._sleeps = bool((options or {}).get("enable_sleep_mode"))
        self._asleep = False

    @classmethod
    def open(cls, checkpoint: Checkpoint, dtype: str, **settings: Any) -> "VLLMSampler":
        """Start an engine on a checkpoint."""
        trust = checkpoint.trust_remote_code
        return cls(
            checkpoint.path, checkpoint.stop_ids, checkpoint.vocabulary, dtype, trust_remote_code=trust, **settings
        )

    def with_adapter(self, adapter: Path) -> "VLLMSampler":
        """The same engine with a LoRA adapter over its model; others may use it without."""
        other = copy(self)
        other.adapter = adapter
        return other

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request, in their order."""
        responses = dict(self.stream(requests, settings))
        return [responses[index] for index in range(len(requests))]

    def stream(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[tuple[int, Response]]:
        """Draw one response per request, and yield each with the request's index when it has finished."""
        for index, row in self._stream(requests, settings):
            if not all(map(math.isfinite, row.logprobs)):
                raise logits_not_finite(requests[index].name, str(self.path))
            yield index, row.response

    def sample_with_logprobs(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Drawn]:
        """Draw one response per request, with the engine's own log-probabilities."""
        drawn = dict(self._stream(requests, settings))
        return [drawn[index] for index in range(len(requests))]

    def _stream(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[tuple[int, Drawn]]:
        if not requests:
            return
        self._check_prompts(requests)
        job = {
            "prompts": [list(map(int, request.prompt_ids)) for request in requests],
            "seeds": [request_seed(settings.seed, request) for request in requests],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "stop": self.stop,
            "adapter": self._adapter,
        }
        for entry in self._engine.stream(job):
            drawn = self._drawn(entry)
            if self.on_tokens is not None:
                self.on_tokens(len(drawn.logprobs))
            yield entry["index"], drawn

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Give the engine's log-probability of every token of a row but the first."""
        scored: list[list[float]] = self._engine.ask(
            {"rows": [list(map(int, ids)) for ids in rows], "adapter": self._adapter}
        )["logprobs"]
        return scored

    def reload(self, folder: Path) -> None:
        """Sample with the weights of another checkpoint of the same architecture from now on."""
        self._engine.ask({"reload": str(folder), "asleep": self._asleep})
        self._asleep = False
        self.path = folder

    def rest(self) -> None:
        """Give the device's memory back until the next `reload`, where the engine's options let it sleep."""
        if self._sleeps and not self._asleep:
            self._engine.ask({"sleep": True})
            self._asleep = True

    @property
    def _adapter(self) -> str | None:
        return None if self.adapter is None else str(self.adapter)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def __enter__(self) -> "VLLMSampler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_prompts(self, requests: Sequence[Request]) -> None:
        for request in requests:
            length = len(request.prompt_ids)
            if not 0 < length < self.limit:
                raise InputError(
                    f"prompt {request.prompt} has {length} tokens; the engine takes 1 to {self.limit - 1}. "
                    "Change the length filter of the prompts"
                )

    def _drawn(self, entry: dict[str, Any]) -> Drawn:
        ids = entry["ids"]
        ended = bool(ids) and ids[-1] in self.stop
        if not ids or max(ids) >= self.vocabulary or ended != (entry["finish"] == "stop"):
            raise WeaveError(f"the vLLM engine gave a response that breaks its settings: it ends {ids[-5:]}")
        return Drawn(Response(ids, "stop" if ended else "length"), entry["logprobs"])


def request_seed(seed: int, request: Request) -> int:
    """Give each (seed, prompt, response) a seed of its own."""
    digest = hashlib.sha256(f"{seed}/{request.prompt}/{request.response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # the engine takes signed 64-bit integers
