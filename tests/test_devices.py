"""Which device a process takes, and which GPUs the programs that it starts may see."""

import ast
from pathlib import Path

import pytest
import torch

from lightning_weave import devices
from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.ranks import without_ranks
from lightning_weave.stages.work import choose_device

GPU = torch.device("cuda", 0)
THREADS = ("Thread", "ThreadPoolExecutor")
WITHOUT_A_DEVICE = {
    "grading/code.py",
    "grading/graders.py",
    "models/hub.py",
    "models/vllm_worker.py",  # reads lines; in the engine's process
    "models/worker_process.py",  # reads lines
    "stages/eval.py",  # grades
}


def seen_by(monkeypatch: pytest.MonkeyPatch, visible: str | None, rank: int, ranks: int, count: int) -> str:
    """What the engine of one rank sees, on a machine with eight GPUs where nothing else is said."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return devices.own_gpus(GPU, count)["CUDA_VISIBLE_DEVICES"]


def test_layers_are_compiled_only_with_a_c_compiler_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them Triton fails at the first kernel."""
    assert not devices.has_compiler(torch.device("cpu"))
    monkeypatch.setattr(devices, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(devices, "find_spec", lambda package: package)
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for needed in ("gcc", "Python.h"):
        assert not devices.has_compiler(GPU)
        (tmp_path / needed).touch(mode=0o755)
    assert devices.has_compiler(GPU)


@pytest.mark.parametrize(
    ("visible", "ranks", "count", "seen"),
    [
        (None, 8, 1, ["0", "1", "2", "3", "4", "5", "6", "7"]),  # torchrun
        (None, 4, 2, ["0,1", "2,3", "4,5", "6,7"]),  # with tensor parallel engines
        (None, 1, 4, ["0,1,2,3"]),
        ("6,3, 5,1", 2, 2, ["6,3", "5,1"]),  # part of a machine
        ("GPU-a1,GPU-b2", 2, 1, ["GPU-a1", "GPU-b2"]),
        ("3", 2, 1, ["3", "3"]),  # a launcher that shows each rank its own GPU
    ],
)
def test_every_engine_has_its_own_block_of_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, count: int, seen: list[str]
) -> None:
    assert [seen_by(monkeypatch, visible, rank, ranks, count) for rank in range(ranks)] == seen


@pytest.mark.parametrize(
    ("visible", "ranks", "count", "message"),
    [
        (None, 8, 2, "8 processes .* 2 GPUs each .* needs 16 GPUs, and 8 are visible. Start 4 processes"),
        ("0,1", 1, 4, "needs 4 GPUs, and 2 are visible. Lower tensor_parallel_size"),
        ("0,1,2", 4, 1, "needs 4 GPUs, and 3 are visible. Start 3 processes"),
    ],
)
def test_engines_that_would_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, count: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        seen_by(monkeypatch, visible, 0, ranks, count)


@pytest.mark.parametrize(
    ("visible", "ranks", "count", "beside"),
    [(None, 4, 2, [0, 2, 4, 6]), (None, 8, 1, [*range(8)]), ("3", 2, 1, [0, 0])],
)
def test_what_stands_beside_an_engine_is_on_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, count: int, beside: list[int]
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(devices, "_chosen", None)
    for rank, first in enumerate(beside):
        seen_by(monkeypatch, visible, rank, ranks, count)
        assert devices.use_engine_gpu(torch.device("cuda", rank), count) == torch.device("cuda", first)
        assert current.pop() == devices._chosen == torch.device("cuda", first)


def test_an_engine_on_a_cpu_is_told_nothing() -> None:
    assert devices.own_gpus(torch.device("cpu"), 2) == {}
    assert devices.use_engine_gpu(torch.device("cpu"), 2) == torch.device("cpu")


def test_a_program_with_ranks_of_its_own_does_not_see_ours() -> None:
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    names = [f"{kind}{what}" for kind in kinds for what in ("RANK", "WORLD_SIZE")]
    names += ["ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"]
    ours = dict.fromkeys(names, "1")
    assert without_ranks({**ours, "PATH": "/bin", "OMP_NUM_THREADS": "1"}) == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is an Apple GPU here")
    with pytest.raises(InputError, match=f'machine.device = "{name}"'):
        devices.choose_device(name)


def test_the_gpu_of_a_rank_is_chosen_and_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(devices, "_chosen", None)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert devices.choose_device("auto") == torch.device("cuda", 2)
    assert current == [torch.device("cuda", 2)]
    assert devices.choose_device("cpu") == torch.device("cpu")
    assert devices.device_name() is None  # a CPU run on a machine that has a GPU


def test_attention_on_a_gpu_never_makes_a_cudnn_plan_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "_chosen", None)
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_device(check_recipe({"name": "r", "student": {"model": "s"}, "machine": {"device": "cuda"}}))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)


def test_every_thread_sets_its_device_or_uses_none() -> None:
    source = Path(devices.__file__).parent
    found = set()
    for file in source.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in THREADS:
                continue
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            if given.get("initializer") != "set_device" and "prompt" not in given:  # the report has threads of tokens
                found.add(file.relative_to(source).as_posix())
    assert found == WITHOUT_A_DEVICE


@pytest.mark.parametrize("allowed", [True, False])
def test_products_in_tf32_are_the_recipes_choice(allowed: bool) -> None:
    products = torch.backends.cuda.matmul
    usual = products.allow_tf32
    world = {"name": "r", "student": {"model": "s"}, "machine": {"device": "cpu", "tf32": allowed}}
    try:
        products.allow_tf32 = not allowed
        choose_device(check_recipe(world))
        assert products.allow_tf32 is allowed
    finally:
        products.allow_tf32 = usual


@pytest.mark.parametrize(
    ("name", "wide", "sharded"), [("cuda", True, True), ("mps", False, False), ("cpu", False, True)]
)
def test_what_a_kind_of_device_can_do(name: str, wide: bool, sharded: bool) -> None:
    """torch has no product of bfloat16 into float32 for Apple's GPU, and no collectives."""
    assert devices.has_wide_products(torch.device(name)) is wide
    assert devices.can_shard(torch.device(name)) is sharded
