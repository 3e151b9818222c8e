"""Open the engine that a recipe names, after checking that it agrees with the scorer."""

import fcntl
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.config import Harness, StageEngine
from lightning_weave.devices import free_memory, own_gpus, use_engine_gpu
from lightning_weave.errors import InputError, Mismatch, WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.sampler import HFSampler, RefillingSampler
from lightning_weave.models.scorer import Sampler, Scorer
from lightning_weave.models.vllm import VLLMBody, VLLMSampler, server_version
from lightning_weave.models.worker_process import engine_version
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages.work import set_up
from lightning_weave.store import Stage, append_line, read_lines
from lightning_weave.types import Request, SamplingSettings

FILE = "parity.jsonl"
ROWS = 4
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=32, seed=0)
OLDEST = (0, 32)
# Nats per token that rounding alone explains, with room. SmolLM2 measured 6e-6 in float32 and 0.042 in bfloat16, the
# demo's student with two kernels 6e-7, 1.5e-3 (float16) and 1.4e-2.
PARITY = {torch.float32: 0.002, torch.float16: 0.02, torch.bfloat16: 0.1}
ROUTED_PARITY = 4  # times as much is only warned of where rounding sends a token to another expert
MOST_TOKENS_PER_TOKEN = 4  # of another tokenizer: a longer row is refused by its number
FEW_TOKENS = 4096
FULL = 1024  # requests that fill the batch of any engine
MOST_AT_ONCE = 16
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
Compared = TypeVar("Compared", VLLMSampler, Scorer)
log = logging.getLogger(__name__)


class ScoredRow(NamedTuple):
    """A prompt with a response, and the scorer's log-probabilities of the response."""

    prompt: list[int]
    response: list[int]
    logprobs_T: NDArray[np.float32]


def score_a_few(
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    padded: bool,
) -> list[ScoredRow]:
    """Draw and score responses to the shortest prompts with transformers; no row has `length` tokens or more.

    With `padded` all rows of the output matrix count, those of no token included.
    """
    model = checkpoint.load(dtype, device)
    size = model.get_output_embeddings().weight.shape[0] if padded else checkpoint.vocabulary
    requests = [Request(ids, number, 0) for number, ids in enumerate(sorted(prompts, key=len)[:ROWS])]
    drawn = HFSampler(model, checkpoint.stop_ids, checkpoint.vocabulary).sample(requests, SETTINGS)
    rows = [
        (request.prompt_ids, response.ids[: length - 1 - len(request.prompt_ids)])
        for request, response in zip(requests, drawn, strict=True)
    ]
    scored = Scorer.from_model(model, size).candidates(rows, 1)
    return [ScoredRow(*row, logprobs_T) for row, (*_, logprobs_T) in zip(rows, scored, strict=True)]


def sampler_gap(sampler: VLLMSampler, expected: Sequence[ScoredRow]) -> float:
    """Compare the scorer's rows with the engine's reading of them, and that with the engine's own writing.

    An engine reads a prompt in one way and writes a response in another, and both must be right. In nats per token.
    """

    def read(rows: Sequence[tuple[list[int], list[int]]]) -> list[NDArray[np.float64]]:
        scored = sampler.score([[*prompt, *response] for prompt, response in rows])
        return [np.array(logprobs[len(prompt) - 1 :]) for (prompt, _), logprobs in zip(rows, scored, strict=True)]

    reading = read([(prompt, response) for prompt, response, _ in expected])
    requests = [Request(prompt, number, 0) for number, (prompt, *_) in enumerate(expected)]
    drawn = sampler.sample(requests, SETTINGS, finite=False)
    room = [max(0, sampler.limit - 1 - len(prompt)) for prompt, *_ in expected]
    own = [(prompt, one.ids[:most]) for (prompt, *_), one, most in zip(expected, drawn, room, strict=True)]
    writing = [np.array((one.logprobs or [])[:most]) for one, most in zip(drawn, room, strict=True)]
    gaps = [_mean_gap([logprobs_T for *_, logprobs_T in expected], reading), _mean_gap(writing, read(own))]
    return float(np.max(gaps))


def scorer_gap(scorer: Scorer, expected: Sequence[ScoredRow]) -> float:
    """Compare the rows of a transformers model with what another body computes for them, in nats per token."""
    scored = scorer.candidates([(prompt, response) for prompt, response, _ in expected], 1)
    return _mean_gap([logprobs_T for *_, logprobs_T in expected], [logprobs_T for *_, logprobs_T in scored])


def _mean_gap(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> float:
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())


def judge(gap: float, tokens: int, section: StageEngine, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Refuse an engine that is further from the scorer than the recipe or, by default, the dtype allows."""
    bound = PARITY[dtype] if section.parity is None else section.parity
    if gap <= bound:
        log.info("%s: vLLM and the scorer agree to %.1e nats per token", section.stage, gap)
        return
    message = (
        f"engine.{section.stage} = {section.engine!r} and the scorer disagree by {gap:.4f} nats per token, more than "
        f"engine.parity = {bound:g} ({tokens} tokens of {checkpoint.path})"
    )
    if section.parity is None and checkpoint.has_experts and gap <= ROUTED_PARITY * bound:
        log.warning("warning: %s, as a mixture of experts may in %s", message, _name(dtype))
        return
    raise Mismatch(  # for a NaN as well
        f'{message}.\nTry engine.dtype = "float32" or another version of vLLM; engine.{section.stage} = "hf" always '
        "agrees"
    )


class Engines(AbstractContextManager["Engines"]):
    """Opens samplers and scorers, one at a time, and keeps the last one up for the next job that asks for the same.

    One at a time, since an engine takes nearly all of a GPU. A process that is sent this object uses its own.
    """

    def __init__(self, room: int = 0) -> None:
        self.room = room  # tokens that later jobs will ask of an engine that is opened for an earlier one
        self._key: dict[str, Any] = {}
        self._open: Sampler | Scorer | None = None

    def sampler(
        self, run: Run, checkpoint: Checkpoint, section: StageEngine, prompts: Sequence[list[int]], max_tokens: int
    ) -> Sampler:
        """Return a sampler for these prompts and at most `max_tokens` new tokens each."""
        key = {"kind": "sampler", "model": checkpoint, **engine_key(section)}
        needed = longest_context(checkpoint, prompts, max_tokens)
        if key != self._key or (isinstance(self._open, VLLMSampler) and self._open.limit < needed):
            self.close()
            length = max(self.room, needed) + 1  # an engine scores no row that fills it
            length = min(length, checkpoint.context_limit or length)
            self._open = open_sampler(run, checkpoint, section, prompts, length)
            self._key = key
        return cast(Sampler, self._open)

    def scorer(self, run: Run, checkpoint: Checkpoint, section: StageEngine, url: str | None = None) -> Scorer:
        """Return a scorer of rows in the model's own tokens; `url` is that of a server that runs the model."""
        key = {"kind": "scorer", "model": checkpoint, "url": url, **engine_key(section)}
        if key != self._key:
            self.close()
            self._open = open_scorer(run, checkpoint, section, url)
            self._key = key
        return cast(Scorer, self._open)

    def close(self) -> None:
        """Stop the open engine."""
        engine = self._open
        self._open = None
        self._key = {}
        if engine is not None:
            engine.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _engines_of_process, (self.room,)


_process_engines = Engines()  # of a worker process, such as an actor of Ray: for all jobs that it is sent


def _engines_of_process(room: int) -> Engines:
    _process_engines.room = max(_process_engines.room, room)
    return _process_engines


def borrowed(engines: Engines | None) -> AbstractContextManager[Engines]:
    """Use these engines and leave them up; without any, open new ones and close them afterwards."""
    return Engines() if engines is None else nullcontext(engines)


def engine_key(section: StageEngine) -> dict[str, Any]:
    """Return the settings that two stages must share to use one engine."""
    names = {"hf": ("batch_size", "token_budget"), "vllm": ("python", "options", "parity", "token_budget")}
    return {name: getattr(section, name) for name in (*names[section.engine], "engine", "dtype")}


def share_an_engine(one: StageEngine, other: StageEngine) -> bool:
    """Whether one engine process can serve both stages."""
    return one.engine == other.engine != "hf" and engine_key(one) == engine_key(other)


def open_sampler(
    run: Run, checkpoint: Checkpoint, section: StageEngine, prompts: Sequence[list[int]], length: int
) -> Sampler:
    """Load a model behind the Sampler protocol for contexts of this length; an engine is compared on these prompts."""
    device = set_up(run)
    free_memory()  # of models that nobody uses any more: an engine wants nearly all of a GPU
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        model = checkpoint.load(dtype, device)
        return RefillingSampler(model, checkpoint.stop_ids, checkpoint.vocabulary, section.batch_size)
    refuse_adapter(checkpoint, section.stage)
    device = use_engine_gpu(device, gpus_of(section))
    environment = own_gpus(device, gpus_of(section))
    settings = {"python": section.python, "options": dict(section.options), "environment": environment}
    start = partial(VLLMSampler.from_checkpoint, checkpoint, _name(dtype), max_length=length, **settings)
    name = f"vllm {engine_version(section.python)}"
    # The engine normalises over all rows of the output matrix, those of no token included.
    few = partial(score_a_few, checkpoint, prompts, length, dtype=dtype, device=device, padded=True)
    return start_compared(run, checkpoint, section, name, dtype, start, few, sampler_gap)


def note_engine(
    run: Run, stage: Stage, checkpoint: Checkpoint, section: StageEngine, server: str | None = None
) -> None:
    """Record for a stage's manifest what computes its shards; warn if another version or dtype computed some.

    The version is not in the fingerprint: what an earlier one computed is kept.
    """
    dtype = _name(checkpoint.compute_dtype(section.dtype, set_up(run)))
    if section.engine == "hf":
        name = f"transformers {version('transformers')}, torch {version('torch')}, {dtype}"
    elif server is not None:
        name = f"vllm server {server_version(server)}, {dtype}"
    else:
        name = f"vllm {engine_version(section.python)}, {dtype}"
    if others := stage.note_engine(name):
        text = "warning: %s: what is missing is now computed with %s; the rest was computed with %s"
        log.warning(text, stage.path, name, " and ".join(others))


def with_lora(section: StageEngine, rank: int) -> StageEngine:
    """Let an engine take LoRA adapters of this rank."""
    room = next((size for size in LORA_RANKS if size >= rank), rank)
    return replace(section, options={"enable_lora": True, "max_lora_rank": room, **section.options})


def with_adapter(
    run: Run, sampler: Sampler, adapter: Path, *, merged: Checkpoint, section: StageEngine, prompts: Sequence[list[int]]
) -> Sampler:
    """Add an adapter to the model of an engine, after comparing it with the merged checkpoint."""
    assert isinstance(sampler, VLLMSampler)
    dtype = merged.compute_dtype(section.dtype, set_up(run))
    name = f"vllm {engine_version(section.python)}, adapter"
    # On the CPU: the device is the engine's.
    few = partial(score_a_few, merged, prompts, sampler.limit, dtype=dtype, device=torch.device("cpu"), padded=True)
    return start_compared(run, merged, section, name, dtype, lambda: sampler.with_adapter(adapter), few, sampler_gap)


def open_scorer(run: Run, checkpoint: Checkpoint, section: StageEngine, url: str | None = None) -> Scorer:
    """Load a model that scores rows in its own tokens, or connect to the server that has it."""
    device = set_up(run)
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        return Scorer.from_model(checkpoint.load(dtype, device), checkpoint.vocabulary, section.token_budget)
    refuse_adapter(checkpoint, section.stage)
    device = use_engine_gpu(device, gpus_of(section))
    free_memory()
    version = engine_version(section.python) if url is None else server_version(url)
    check_version(version, "score", "reference and score")
    # Memory is set aside for the longest trajectory in the model's own tokens, with one to spare.
    is_student = checkpoint == run.student
    longest = run.student.context_limit
    if run.recipe.rollout.from_ is None:
        length = run.recipe.prompts.max_tokens + run.recipe.rollout.max_tokens
        longest = length if longest is None else min(length, longest)
    bounds = [] if longest is None else [(1 if is_student else MOST_TOKENS_PER_TOKEN) * longest + 1]
    bounds += [] if checkpoint.context_limit is None else [checkpoint.context_limit]
    max_length = min(bounds, default=None)
    room = {"gpu_memory_utilization": 0.8} if device.type != "cpu" else {}  # the head is on the same device
    environment = own_gpus(device, gpus_of(section))
    settings = {"python": section.python, "options": {**room, **section.options}, "environment": environment}

    def start() -> Scorer:
        body = VLLMBody(checkpoint, device, url=url, dtype=_name(dtype), max_length=max_length, **settings)
        return Scorer(body, section.token_budget)

    name = f"vllm {version}, hidden states" + ("" if url is None else f" from {url}")
    prompts = sorted((prompt.token_ids for prompt in read_prompts(run.prompts_file)), key=len)[:ROWS]
    if not is_student:
        texts = [run.student.tokenizer.decode(ids) for ids in prompts]
        prompts = [checkpoint.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    few = partial(score_a_few, checkpoint, prompts, max_length or FEW_TOKENS, dtype=dtype, device=device, padded=False)
    return start_compared(run, checkpoint, section, name, dtype, start, few, scorer_gap, remote=url is not None)


def start_compared(
    run: Run,
    checkpoint: Checkpoint,
    section: StageEngine,
    engine: str,
    dtype: torch.dtype,
    start: Callable[[], Compared],
    few: Callable[[], list[ScoredRow]],
    gap_of: Callable[[Compared, Sequence[ScoredRow]], float],
    remote: bool = False,
) -> Compared:
    """Start an engine and compare it with transformers, unless the run remembers that it was.

    What transformers computes is computed before, while the device is free. It may be unable to load what the engine
    can: with more GPUs, on another machine (`remote`), or quantised weights.
    """
    file = run.directory / FILE
    options = dict(section.options)  # quantization and the like change what an engine computes
    key = {"model": run.identity_of(checkpoint), "engine": engine, "dtype": str(dtype), "options": options}

    def find() -> dict[str, Any] | None:
        return next((row for row in read_lines(file, gap=float | int, tokens=int) if key.items() <= row.items()), None)

    expected = None
    with ExitStack() as locked:
        if (known := find()) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = locked.enter_context(open(file.with_name(".parity.lock"), "w"))
            with suppress(OSError):  # a file system without locks: each process compares for itself
                fcntl.flock(lock, fcntl.LOCK_EX)
            known = find()  # another process may have compared meanwhile
        if known is not None:
            locked.close()
            judge(known["gap"], known["tokens"], section, checkpoint, dtype)
        else:
            try:
                expected = few()
            except WeaveError as error:
                is_larger = (remote or gpus_of(section) > 1) and not isinstance(error, InputError)
                if not (checkpoint.is_quantised or is_larger):
                    raise
                log.warning("warning: vLLM is not compared with transformers, which cannot load this model: %s", error)
            finally:
                free_memory()
        try:
            started = start()
            if expected is not None:
                try:
                    gap = gap_of(started, expected)
                    tokens = sum(len(response) for _, response, _ in expected)
                    judge(gap, tokens, section, checkpoint, dtype)
                    append_line(file, {**key, "gap": gap, "tokens": tokens})
                except BaseException:
                    started.close()
                    raise
            return started
        except (InputError, Mismatch):
            raise
        except WeaveError as error:
            if remote:
                raise
            or_anchor = " (or the engine of its anchor)" if section.stage == "score" else ""
            raise WeaveError(
                f"{checkpoint.path}: {error}\n"
                f'If this vLLM cannot run the model, set engine.{section.stage}{or_anchor} to "hf", or name the Python '
                "of an environment with another version: engine.python"
            ) from error


def check_version(version: str, task: str, where: str) -> None:
    """Refuse a vLLM with which a task was never tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST:
        raise InputError(
            f'vLLM {version} cannot {task}: "vllm" for {where} in [engine] needs {OLDEST[0]}.{OLDEST[1]} or later. '
            'Install it, or set "hf" there'
        )


def refuse_adapter(checkpoint: Checkpoint, stage: str) -> None:
    """Refuse a LoRA adapter, which vLLM is not given."""
    if checkpoint.base is not None:
        raise InputError(
            f'{checkpoint.name}: engine.{stage} = "vllm" cannot load a LoRA adapter. Merge it with peft, or set '
            f'engine.{stage} = "hf"'
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gpus_of(section: StageEngine | Harness) -> int:
    """Count the GPUs that one engine takes."""
    if section.engine == "hf":
        return 1
    return int(section.options.get("tensor_parallel_size", 1)) * int(section.options.get("pipeline_parallel_size", 1))


def shards_at_once(section: StageEngine, requests: int) -> int:
    """Return how many shards of `requests` an engine takes at a time: they fill its batch as others end."""
    if section.engine == "hf":
        return 1
    return min(1 + -(-FULL // requests), MOST_AT_ONCE)


def longest_context(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Return the longest sequence that can occur: memory is reserved for that, not for the model's whole context."""
    length = max((len(ids) for ids in prompts), default=1) + max_tokens
    limit = checkpoint.context_limit
    return length if limit is None else min(length, limit)
