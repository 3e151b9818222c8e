"""Sample with vLLM, which runs in its own process and, where `python` says so, in its own environment."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.ranks import without_ranks
from lightning_weave.types import Request, Response, SamplingSettings

WORKER = Path(__file__).with_name("vllm_worker.py")
_SECONDS_TO_END = 30


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
        self.python = python or sys.executable
        self.environment = environment or {}  # beside that of this process, such as the GPUs that are the engine's
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process that writes to it)
        self._process = self._launch()
        settings = {
            "model": str(path),
            "dtype": dtype,
            "vocabulary": vocabulary,
            "max_length": max_length,
            "trust_remote_code": trust_remote_code,
            "options": options or {},
        }
        self.limit = int(self._ask(settings)["limit"])

    @classmethod
    def open(cls, checkpoint: Checkpoint, dtype: str, **settings: Any) -> "VLLMSampler":
        """Start an engine on a checkpoint."""
        trust = checkpoint.trust_remote_code
        return cls(
            checkpoint.path, checkpoint.stop_ids, checkpoint.vocabulary, dtype, trust_remote_code=trust, **settings
        )

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request, in their order."""
        rows = self.sample_with_logprobs(requests, settings)
        for request, row in zip(requests, rows, strict=True):
            if not all(map(math.isfinite, row.logprobs)):
                raise logits_not_finite(request.name, str(self.path))
        return [row.response for row in rows]

    def sample_with_logprobs(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Drawn]:
        """Draw one response per request, with the engine's own log-probabilities."""
        if not requests:
            return []
        self._check_prompts(requests)
        job = {
            "prompts": [list(map(int, request.prompt_ids)) for request in requests],
            "seeds": [_seed(settings.seed, request) for request in requests],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            "stop": self.stop,
        }
        drawn = [self._drawn(entry) for entry in self._ask(job)["responses"]]
        if self.on_tokens is not None:
            self.on_tokens(sum(len(row.logprobs) for row in drawn))
        return drawn

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Give the engine's log-probability of every token of a row but the first."""
        scored: list[list[float]] = self._ask({"rows": [list(map(int, ids)) for ids in rows]})["logprobs"]
        return scored

    def close(self) -> None:
        """Stop the engine by closing its input."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what a dead engine did not read
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._words.close()

    def __enter__(self) -> "VLLMSampler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _launch(self) -> "subprocess.Popen[str]":
        try:
            return subprocess.Popen(
                [self.python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=_environment(self.python) | self.environment,
                text=True,
            )
        except OSError as error:
            self._words.close()
            raise _cannot_run(self.python, error) from error

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "missing" in answer:
            self.close()
            raise _not_installed(self.python, answer["error"])
        if "error" in answer:
            cause = self._cause(answer["error"])
            self.close()
            raise WeaveError(f"the vLLM engine failed: {answer['error']}{cause}")
        return answer

    def _cause(self, error: str) -> str:
        """Find what lies behind "see root cause above": the first error that the engine has logged, not a warning."""
        lines = [line for line in self._said() if not re.search(r"\b(?:DEBUG|INFO|WARNING)\b", line)]
        lines.sort(key=lambda line: not re.search(r"\bERROR\b", line))
        named = (re.search(r"\b\w*(?:Error|Exception): .+", line) for line in lines)
        found = next((match.group() for match in named if match and match.group() not in error), None)
        return f"\nIts first error was {found}" if found else ""

    def _said(self) -> list[str]:
        self._words.seek(0)
        return [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._said()
        return f"it ended with code {code}; its last output: {lines[-1] if lines else 'none'}"

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


def engine_version(python: str | None) -> str:
    """Ask which vLLM an environment has, before anything is loaded for it."""
    python = python or sys.executable
    command = [python, str(WORKER), "--version"]
    try:
        said = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(python), text=True, check=False
        ).stdout
    except OSError as error:
        raise _cannot_run(python, error) from error
    try:
        answer = json.loads(said)
    except ValueError:
        return "unknown"
    if "missing" in answer:
        raise _not_installed(python, answer["error"])
    return str(answer.get("version", "unknown"))


def _environment(python: str) -> dict[str, str]:
    """Leave out what is not the engine's: our ranks, a port that others have too, packages of another Python."""
    ours = {"VLLM_PORT"} if python == sys.executable else {"VLLM_PORT", "PYTHONPATH", "PYTHONHOME"}
    return {name: value for name, value in without_ranks(os.environ).items() if name not in ours}


def _cannot_run(python: str, error: OSError) -> InputError:
    return InputError(f"the engine's Python {python!r} (rollout.python, eval.python) cannot be run ({error.strerror})")


def _not_installed(python: str, error: str) -> InputError:
    return InputError(
        f"vLLM cannot be imported by {python} ({error}). Install it there (pip install vllm), "
        "or name the Python of an environment that has it: rollout.python, eval.python"
    )


def _seed(seed: int, request: Request) -> int:
    """Give each (seed, prompt, response) a seed of its own."""
    digest = hashlib.sha256(f"{seed}/{request.prompt}/{request.response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # the engine takes signed 64-bit integers
