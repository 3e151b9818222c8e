"""Open the engine that a recipe names, on GPUs of its own, once it is known to agree with the scorer."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from lightning_weave.config import Eval, Harness, Reference, Rollout, Score
from lightning_weave.devices import beside_engine, own_gpus
from lightning_weave.errors import InputError, Mismatch, WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.engine_process import engine_version
from lightning_weave.models.hf import RefillingSampler, Scorer, hf_scorer
from lightning_weave.models.memory import free_memory
from lightning_weave.models.protocols import Sampler
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.models.vllm_body import ServerBody, VLLMBody, server_version
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.parity import (
    FILE,
    ROWS,
    Agreement,
    Parity,
    ScoredRow,
    compare,
    compare_scorers,
    judge,
    score_a_few,
)
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage

OLDEST = (0, 32)
MOST_TOKENS_PER_TOKEN = 4  # of another tokenizer: a longer row is refused by its number
FEW_TOKENS = 4096
FULL = 1024  # requests that fill the batch of any engine
MOST_AT_ONCE = 16
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
log = logging.getLogger(__name__)
Compared = TypeVar("Compared", VLLMSampler, Scorer)
Section = Rollout | Eval | Reference | Score


class Engines:
    """Opens samplers and scorers, one at a time, and keeps the last one up for the next job that asks for the same.

    One at a time, since an engine takes nearly all of a GPU. A process that is sent this object has its own.
    """

    def __init__(self, room: int = 0) -> None:
        self.room = room  # tokens that later jobs will ask of an engine that is opened for an earlier one
        self._key: dict[str, Any] = {}
        self._open: Sampler | Scorer | None = None

    def sampler(
        self,
        steps: Steps,
        checkpoint: Checkpoint,
        section: Rollout | Eval,
        prompts: Sequence[list[int]],
        max_tokens: int,
    ) -> Sampler:
        """A sampler for these prompts and at most so many tokens each."""
        key = {"kind": "sampler", "model": checkpoint, **engine_key(section)}
        needed = longest_context(checkpoint, prompts, max_tokens)
        if key != self._key or (isinstance(self._open, VLLMSampler) and self._open.limit < needed):
            self.close()
            length = max(self.room, needed) + 1  # an engine scores no row that fills it
            limit = checkpoint.context_limit
            self._open = open_sampler(
                steps, checkpoint, section, prompts, length if limit is None else min(length, limit)
            )
            self._key = key
        return cast(Sampler, self._open)

    def scorer(
        self, steps: Steps, checkpoint: Checkpoint, section: Reference | Score, url: str | None = None
    ) -> Scorer:
        """A scorer of rows in the model's own tokens; `url` is that of a server that runs the model."""
        key = {"kind": "scorer", "model": checkpoint, "url": url, **engine_key(section)}
        if key != self._key:
            self.close()
            self._open = open_scorer(steps, checkpoint, section, url)
            self._key = key
        return cast(Scorer, self._open)

    def close(self) -> None:
        """Stop what is up."""
        engine = self._open
        self._open = None
        self._key = {}
        if engine is not None:
            engine.close()

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _engines_here, (self.room,)


_here = Engines()  # of a worker process, such as an actor of Ray: for all jobs that it is sent


def _engines_here(room: int) -> Engines:
    _here.room = max(_here.room, room)
    return _here


@contextmanager
def borrowed(engines: Engines | None) -> Iterator[Engines]:
    """These engines, which stay up afterwards; without any, new ones, which do not."""
    if engines is not None:
        yield engines
        return
    with Engines() as own:
        yield own


def engine_key(section: Section) -> dict[str, Any]:
    """What two sections must agree on to use one engine."""
    names = {"hf": {"batch_size", "token_budget"}, "vllm": {"python", "options", "parity", "token_budget"}}
    return section.model_dump(include=names[section.engine] | {"engine", "dtype"})


def share_an_engine(one: Section, other: Section) -> bool:
    """Whether an engine of its own process that is opened for one section can do the work of the other."""
    return one.engine == other.engine != "hf" and engine_key(one) == engine_key(other)


def open_sampler(
    steps: Steps, checkpoint: Checkpoint, section: Rollout | Eval, prompts: Sequence[list[int]], length: int
) -> Sampler:
    """Load a model behind the Sampler protocol, for contexts of this length; these prompts are what it is tried on."""
    device = set_up(steps.recipe, steps.store)
    free_memory()  # of models that nobody uses any more: an engine wants nearly all of a GPU
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        model = checkpoint.load(dtype, device)
        return RefillingSampler(model, checkpoint.stop_ids, checkpoint.vocabulary, section.batch_size)
    _refuse_adapter(checkpoint)
    device = beside_engine(device, gpus_of(section))
    start = partial(
        VLLMSampler.open,
        checkpoint,
        _name(dtype),
        max_length=length,
        python=section.python,
        options=dict(section.options),
        environment=own_gpus(device, gpus_of(section)),
    )
    check = ParityCheck(steps, checkpoint, section, f"vllm {engine_version(section.python)}", dtype)
    # The engine normalises over all rows of the output matrix, those of no token included.
    few = partial(score_a_few, checkpoint, prompts, length, dtype=dtype, device=device, padded=True)
    return check.start(start, few, compare)


def note_engine(
    steps: Steps, stage: Stage, checkpoint: Checkpoint, section: Section, server: str | None = None
) -> None:
    """Write down for a stage's manifest what makes its shards; say it where another version or dtype has made some.

    A new version is no reason to discard what an earlier one has made: it is not in the fingerprint.
    """
    dtype = _name(checkpoint.compute_dtype(section.dtype, set_up(steps.recipe, steps.store)))
    if section.engine == "hf":
        name = f"transformers {version('transformers')}, torch {version('torch')}, {dtype}"
    elif server is not None:
        name = f"vllm server {server_version(server)}, {dtype}"
    else:
        name = f"vllm {engine_version(section.python)}, {dtype}"
    if others := stage.note_engine(name):
        log.warning(
            "warning: %s: what is missing is now made with %s; the rest was made with %s",
            stage.step.path,
            name,
            " and ".join(others),
        )


def with_lora(section: Eval, rank: int) -> Eval:
    """Let an engine take LoRA adapters of this rank."""
    room = next((size for size in LORA_RANKS if size >= rank), rank)
    return section.model_copy(update={"options": {"enable_lora": True, "max_lora_rank": room, **section.options}})


def with_adapter(
    steps: Steps, sampler: Sampler, adapter: Path, *, merged: Checkpoint, section: Eval, prompts: Sequence[list[int]]
) -> Sampler:
    """Put an adapter on the model of an engine, once it is known to be the merged checkpoint."""
    assert isinstance(sampler, VLLMSampler)
    dtype = merged.compute_dtype(section.dtype, set_up(steps.recipe, steps.store))
    check = ParityCheck(steps, merged, section, f"vllm {engine_version(section.python)}, adapter", dtype)
    # On the CPU: the device is the engine's.
    few = partial(score_a_few, merged, prompts, sampler.limit, dtype=dtype, device=torch.device("cpu"), padded=True)
    return check.start(lambda: sampler.with_adapter(adapter), few, compare)


def open_scorer(steps: Steps, checkpoint: Checkpoint, section: Reference | Score, url: str | None = None) -> Scorer:
    """Load a model that scores rows in its own tokens, or reach the server that has it."""
    device = set_up(steps.recipe, steps.store)
    dtype = checkpoint.compute_dtype(section.dtype, device)
    if section.engine == "hf":
        return hf_scorer(checkpoint.load(dtype, device), checkpoint.vocabulary, section.token_budget)
    _refuse_adapter(checkpoint)
    device = beside_engine(device, gpus_of(section))
    free_memory()
    version = engine_version(section.python) if url is None else server_version(url)
    check_version(version, "score", "[reference] and [score]")
    length = _longest_row(steps, checkpoint)
    room = {"gpu_memory_utilization": 0.8} if device.type != "cpu" else {}  # the head lives beside the engine

    def start() -> Scorer:
        if url is not None:
            return Scorer(ServerBody(checkpoint, device, url), section.token_budget)
        body = VLLMBody(
            checkpoint,
            _name(dtype),
            device,
            max_length=length,
            python=section.python,
            options={**room, **section.options},
            environment=own_gpus(device, gpus_of(section)),
        )
        return Scorer(body, section.token_budget)

    where = "hidden states" if url is None else f"hidden states from {url}"
    check = ParityCheck(steps, checkpoint, section, f"vllm {version}, {where}", dtype, elsewhere=url is not None)
    prompts = _few_prompts(steps, checkpoint)
    few = partial(score_a_few, checkpoint, prompts, length or FEW_TOKENS, dtype=dtype, device=device, padded=False)
    return check.start(start, few, compare_scorers)


@dataclass(frozen=True)
class ParityCheck:
    """One engine that is compared with transformers before it is used, unless the run remembers that it was."""

    steps: Steps
    checkpoint: Checkpoint
    section: Section
    engine: str
    dtype: torch.dtype
    elsewhere: bool = False  # on a server, whose machine may be larger than this one

    def start(
        self,
        start: Callable[[], Compared],
        few: Callable[[], list[ScoredRow]],
        compare: Callable[[Compared, Sequence[ScoredRow]], Agreement],
    ) -> Compared:
        """Start the engine; what transformers says is computed before, while the device is free."""
        key = {
            "model": self.steps.identity_of(self.checkpoint),
            "engine": self.engine,
            "dtype": str(self.dtype),
            "options": dict(self.section.options),  # quantization and the like change what an engine computes
        }
        parity = Parity(self.steps.store.run_dir / FILE, key)
        if (agreement := parity.remembered()) is None:
            with parity.alone():
                if (agreement := parity.remembered()) is None:
                    expected = self._expected(few)
                    with self._what_to_do():
                        engine = start()
                        try:
                            if expected is not None:
                                parity.accept(self.section, self.checkpoint, compare(engine, expected))
                        except BaseException:
                            engine.close()
                            raise
                    return engine
        judge(agreement, self.section, self.checkpoint)
        with self._what_to_do():
            return start()

    @contextmanager
    def _what_to_do(self) -> Iterator[None]:
        """Say which model an engine fails on, as it starts or at the first question, and what to do."""
        try:
            yield
        except (InputError, Mismatch):
            raise
        except WeaveError as error:
            if self.elsewhere:
                raise
            key = type(self.section).__name__.lower()
            or_anchor = " (or the engine of its anchor)" if key == "score" else ""
            raise WeaveError(
                f"{self.checkpoint.path}: {error}\n"
                f'If this vLLM cannot run the model, set {key}.engine{or_anchor} to "hf", or name the Python of an '
                f"environment with another version: {key}.python"
            ) from error

    def _expected(self, few: Callable[[], list[ScoredRow]]) -> list[ScoredRow] | None:
        """Score a few rows with transformers; None, and a warning, where it cannot load the model."""
        try:
            return few()
        except WeaveError as error:
            if not self._may_be_too_much_for_transformers(error):
                raise
            log.warning("warning: vLLM is not compared with transformers, which cannot load this model here: %s", error)
            return None
        finally:
            free_memory()

    def _may_be_too_much_for_transformers(self, error: WeaveError) -> bool:
        """Say whether the engine may do what the scorer cannot: more GPUs, another machine, or quantised weights."""
        if self.checkpoint.is_quantised:
            return True
        return (self.elsewhere or gpus_of(self.section) > 1) and not isinstance(error, InputError)


def check_version(version: str, task: str, where: str) -> None:
    """Refuse a vLLM with which a task was never tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST:
        raise InputError(
            f'vLLM {version} cannot {task}: engine = "vllm" in {where} needs '
            f'{OLDEST[0]}.{OLDEST[1]} or later. Install it there, or set engine = "hf"'
        )


def _refuse_adapter(checkpoint: Checkpoint) -> None:
    if checkpoint.base is not None:
        raise InputError(
            f'{checkpoint.name}: engine = "vllm" reads no LoRA adapter. Merge it into its base with peft, or set '
            'engine = "hf"'
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _longest_row(steps: Steps, checkpoint: Checkpoint) -> int | None:
    """Bound the length of a trajectory in a model's own tokens, with one to spare: memory is set aside for that."""
    recipe = steps.recipe
    longest = steps.student.context_limit
    if recipe.rollout.from_ is None:
        length = recipe.prompts.max_tokens + recipe.rollout.max_tokens
        longest = length if longest is None else min(length, longest)
    limit = checkpoint.context_limit
    if longest is None:
        return limit
    spelled = longest + 1 if checkpoint == steps.student else MOST_TOKENS_PER_TOKEN * longest + 1
    return spelled if limit is None else min(spelled, limit)


def _few_prompts(steps: Steps, checkpoint: Checkpoint) -> list[list[int]]:
    """Take a few prompts, in the tokens of the model that is checked."""
    few = sorted((prompt.token_ids for prompt in read_prompts(steps.prompts_file)), key=len)[:ROWS]
    if checkpoint == steps.student:
        return few
    texts = [steps.student.tokenizer.decode(ids) for ids in few]
    return [checkpoint.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def gpus_of(section: Rollout | Eval | Reference | Score | Harness) -> int:
    """Count the GPUs that one engine takes."""
    if section.engine == "hf":
        return 1
    return int(section.options.get("tensor_parallel_size", 1)) * int(section.options.get("pipeline_parallel_size", 1))


def shards_at_once(section: Rollout | Eval) -> int:
    """Count the shards that one sampling engine takes at a time: others fill its batch while the end of one is slow."""
    if section.engine == "hf":
        return 1
    requests = section.block if isinstance(section, Eval) else section.prompts_per_shard * section.responses
    return min(1 + -(-FULL // requests), MOST_AT_ONCE)


def longest_context(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Say how long a sequence can get: memory is set aside for that, not for all that the model could hold."""
    length = max((len(ids) for ids in prompts), default=1) + max_tokens
    limit = checkpoint.context_limit
    return length if limit is None else min(length, limit)
