"""Engines beside torchrun, each in its own process on its own GPUs, with a package that stands in for vLLM."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_weave.errors import WeaveError
from lightning_weave.models import worker_process as engine_process
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.models.worker_process import engine_version
from lightning_weave.stages.costs import costs
from lightning_weave.store import ledger
from lightning_weave.types import Request, SamplingSettings

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("engine_rank.py")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines that stand in for vLLM write down what they were given."""
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setenv("STAND_IN_RECORDS", str(folder))
    paths = (str(TESTS / "stand_in"), *sys.path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    return folder


def read(records: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in records.iterdir()]


@pytest.mark.slow
@pytest.mark.ranks
def test_engines_of_two_ranks_have_their_own_gpus_and_nothing_of_torchrun(records: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7", "VLLM_PORT": "29500", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(PROGRAM), str(tmp_path), "2"], check=True, env=environment)
    engines = read(records)
    assert sorted(engine["environment"]["CUDA_VISIBLE_DEVICES"] for engine in engines) == ["4,5", "6,7"]
    assert engines[0]["port"] != engines[1]["port"]
    for engine in engines:
        left = {name for name in engine["environment"] if name.startswith(("TORCHELASTIC", "MASTER_", "VLLM_PORT"))}
        left |= {name for name in engine["environment"] if name.endswith(("RANK", "WORLD_SIZE"))}
        assert left == set()
        assert engine["settings"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("device", "options", "chunked"),
    [
        ("cpu", {}, False),
        ("cpu", {"enable_chunked_prefill": True}, True),
        ("cpu", {"max_num_batched_tokens": 8192}, None),
        ("cuda", {}, None),  # where vLLM warns of wrong outputs if they are
    ],
)
def test_prompts_are_read_whole_on_a_cpu_unless_the_options_say_otherwise(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, options: dict, chunked: bool | None
) -> None:
    monkeypatch.setenv("STAND_IN_DEVICE", device)
    with VLLMSampler(tmp_path, frozenset({1}), 8, options=options):
        pass
    (engine,) = read(records)
    assert engine["settings"].get("enable_chunked_prefill") is chunked


@pytest.mark.usefixtures("records")
def test_the_version_is_asked_without_starting_an_engine(records: Path) -> None:
    assert engine_version(None) == "unknown"  # it is no installed distribution
    assert read(records) == []


def test_a_harmless_warning_is_not_blamed(tmp_path: Path) -> None:
    log = (
        "WARNING 01-01 00:00:00 [llm.py:1] ValueError: Tokenizer not available when skip_tokenizer_init=True\\n"
        "UserWarning: RuntimeError: nothing to see here\\n"
        "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] RuntimeError: the generator cannot be rewound"
    )
    answer = '{"error": "EngineDeadError: EngineCore encountered an issue. See stack trace (above)"}'
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nread line\nprintf '{log}\\n' >&2\necho '{answer}'\n")
    python.chmod(0o755)
    with pytest.raises(WeaveError, match=r"first error was RuntimeError: the generator cannot be rewound"):
        VLLMSampler(tmp_path, frozenset({1}), 8, python=str(python))


@pytest.mark.usefixtures("records")
def test_the_ledger_knows_when_an_engine_had_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()  # a second passes whenever somebody looks at the clock
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), time=time.time)
    monkeypatch.setattr(engine_process, "time", clock)
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr(ledger, "FLUSH_EVERY", math.inf)
    settings = SamplingSettings(1.0, 1.0, 4, 0)
    with ledger.measure(tmp_path, "rollout") as meter:
        meter.devices = 2
        with VLLMSampler(tmp_path, frozenset({1}), 8) as engine:
            for _ in engine.stream([Request([5], 0, 0), Request([5], 1, 0)], settings):
                pass
            meter.flush()
            for _ in range(100):  # seconds of whoever uses the engine
                clock.monotonic()
            meter.flush()
            engine.score([[5, 7]])
    (row,) = ledger.read_ledger(tmp_path)  # of the whole session
    assert row["engine"]["starting"] == 2  # two devices, one second
    assert row["engine"]["busy"] > 2, "the stream, and two seconds of scoring"
    assert row["engine"]["starting"] + row["engine"]["busy"] <= row["device_seconds"] - 2 * 100
    (whole,) = costs([row], "stage").values()
    assert whole.idle is not None
    assert whole.idle * whole.seconds >= 2 * 100, "two devices wait"


@pytest.mark.usefixtures("records")
def test_what_comes_while_an_engine_samples_joins_what_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine finishes nothing before it has the requests of both threads; each gets its own."""
    monkeypatch.setenv("STAND_IN_TOGETHER", "5")
    settings = SamplingSettings(1.0, 1.0, 4, 0)
    questions = [[Request([5], n, 0) for n in range(2)], [Request([5], n, 0) for n in range(3)]]
    with VLLMSampler(tmp_path, frozenset({1}), 8) as engine, ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda requests: dict(engine.stream(requests, settings)), questions))
        assert [sorted(answer) for answer in answers] == [[0, 1], [0, 1, 2]]
        assert engine.score([[5, 7]]) == [[0.0]]  # when all is done


@pytest.mark.usefixtures("records")
def test_an_engine_that_fails_is_said_to_all_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TOGETHER", "4")
    settings = SamplingSettings(1.0, 1.0, 4, 0)
    several = [[Request([5], 0, 0)], [Request([5], 0, 0)]]
    with VLLMSampler(tmp_path, frozenset({1}), 8) as engine, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.sample, requests, settings) for requests in several]
        while len(engine._engine._open) < 2:
            time.sleep(0.01)
        os.kill(engine._engine._process.pid, signal.SIGKILL)
        for one in asked:
            with pytest.raises(WeaveError, match="the vLLM process failed: it ended with code -9"):
                one.result()
        with pytest.raises(WeaveError, match="it ended with code -9"):
            engine.sample(several[0], settings)
