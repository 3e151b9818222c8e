"""Stands in for vLLM: writes down its environment and arguments, meets itself on a port, and answers fixed tokens.

With `STAND_IN_COMPUTES` it answers what the checkpoint says that it was given, or was given last. Given weights of a
name that `STAND_IN_KILLS` has, it kills the process that gave them. With `STAND_IN_TOGETHER` it answers nothing before
it has had so many requests at once.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.computed import Computed


class LLM:
    """One engine; `STAND_IN_RECORDS` names the directory of the records."""

    def __init__(self, **settings: Any) -> None:
        if os.environ.get("STAND_IN_REFUSES", "\0") in settings["model"]:
            raise ValueError("Model architectures ['Small'] are not supported for now")
        port = _meet() if settings.get("tensor_parallel_size", 1) > 1 else None
        record = {"settings": settings, "environment": dict(os.environ), "port": port}
        (Path(os.environ["STAND_IN_RECORDS"]) / f"{os.getpid()}.json").write_text(json.dumps(record))
        self.computed = Computed(settings["model"]) if "STAND_IN_COMPUTES" in os.environ else None
        self.llm_engine = LLMEngine(
            settings["max_model_len"] or 64, self._answer, self.computed.size if self.computed else 16
        )
        if "pooler_config" in settings:
            assert self.computed is not None
            self.llm_engine.model_config.dtype = self.computed.compute_in(settings["dtype"])

    def generate(self, prompts: list[dict], params: Any, use_tqdm: bool, lora_request: Any = None) -> list[Any]:
        """Answer every prompt with token 7 until its room ends; every token is certain."""
        several = params if isinstance(params, list) else [params] * len(prompts)
        return [self._answer(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, several, strict=True)]

    def encode(self, prompts: list[dict], params: Any, pooling_task: str, use_tqdm: bool) -> list[Any]:
        """Answer every prompt with its hidden states, in float32 whatever they were computed in, as vLLM does."""
        assert (pooling_task, params) == ("token_embed", {"use_activation": False})
        assert self.computed is not None
        states = [self.computed.hidden(prompt["prompt_token_ids"]) for prompt in prompts]
        return [SimpleNamespace(outputs=SimpleNamespace(data=states_TD)) for states_TD in states]

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        """Take other weights."""
        assert method == "reload_weights", method
        self._write_down(f"reload {kwargs['weights_path']}")
        if os.environ.get("STAND_IN_KILLS", "\0") in kwargs["weights_path"]:
            os.kill(os.getppid(), signal.SIGKILL)
        assert self.computed is not None
        self.computed.load(kwargs["weights_path"])

    def sleep(self, level: int) -> None:
        """Forget the weights."""
        self._write_down(f"sleep {level}")
        assert self.computed is not None
        self.computed.model = None

    def wake_up(self, tags: list[str]) -> None:
        """Make room for weights, or for what is computed with them."""
        self._write_down(f"wake up {' '.join(tags)}")

    def reset_prefix_cache(self) -> None:
        """Forget what was computed."""
        self._write_down("reset")

    def _answer(self, prompt: list[int], params: "SamplingParams") -> Any:
        return self.computed.answer(prompt, params) if self.computed else _output(prompt, params)

    def _write_down(self, call: str) -> None:
        with open(Path(os.environ["STAND_IN_RECORDS"]) / f"{os.getpid()}.calls", "a") as calls:
            calls.write(f"{call}\n")


class LLMEngine:
    """Takes requests, and finishes one of them per step, the newest first."""

    def __init__(self, longest: int, answer: Callable[[list[int], "SamplingParams"], Any], size: int) -> None:
        self.model_config = SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: size)
        self.answer = answer
        self.waiting: list[Any] = []
        self.together = int(os.environ.get("STAND_IN_TOGETHER", "0"))
        self.steps = 0

    def add_request(self, request_id: str, prompt: dict, params: "SamplingParams", lora_request: Any = None) -> None:
        self.waiting.append((request_id, self.answer(prompt["prompt_token_ids"], params)))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        if len(self.waiting) < self.together:
            self.steps += 1
            assert self.steps < 60_000, f"never {self.together} requests at once"
            time.sleep(0.01)
            return []
        self.together = 0
        request_id, output = self.waiting.pop()
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=output.outputs)]


def PoolingParams(**settings: Any) -> dict[str, Any]:
    return settings


@dataclass
class SamplingParams:
    """Those that are asked for here."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    output_kind: str = "cumulative"


def _output(prompt: list[int], params: SamplingParams) -> Any:
    ids = [7] * params.max_tokens
    certain = SimpleNamespace(logprob=0.0)
    response = SimpleNamespace(token_ids=ids, finish_reason="length", logprobs=[{7: certain}] * len(ids))
    read = None if params.prompt_logprobs is None else [None, *({token: certain} for token in prompt[1:])]
    return SimpleNamespace(outputs=[response], prompt_logprobs=read)


def _meet() -> int:
    """Make a process group as the workers of vLLM do, on a free port of the engine's own."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
    return int(store.port)
