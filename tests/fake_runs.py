"""Score and train models of full size on the fake device, with the product's own code, and say what memory it took.

A program of its own, as the fake device wants: it reads a list of settings from stdin and writes what it measured, one
line each. `measure` starts it.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "dtype": "bfloat16"}
# From the hub, as far as sizes are concerned; the others come with the package.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-32B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "google/gemma-3-4b-it": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    },
}
CANDIDATES = 16
LENGTHS: list[int] = []  # of the rows of an update, where they differ


@dataclass(frozen=True)
class Setting:
    """One model at work."""

    stage: str  # "score", "reference", "train" or "head", which is the loss and its gradients alone
    model: str
    dtype: str
    world: int = 1
    checkpointing: bool = False
    layers: int | None = None  # instead of all
    lora: int | None = None  # the rank of adapters, which alone are trained


@dataclass(frozen=True)
class Measured:
    """Bytes on one device."""

    setting: Setting
    loading: int  # most, until the model stands ready
    ready: int  # held then
    largest: int  # the largest storage held then
    peaks: dict[int, int]  # most, at work on one row, by its number of tokens


def config_of(model: str) -> dict[str, Any]:
    """Give the configuration of a model, or the one that is written out instead of a name."""
    if model.startswith("{"):
        return json.loads(model)
    if model in CONFIGS:
        return CONFIGS[model]
    shipped = files("lightning_weave.plan") / "configs" / f"{model.replace('/', '--')}.json"
    return json.loads(shipped.read_text(encoding="utf-8"))


def measure(settings: Sequence[Setting], lengths: Sequence[int]) -> Iterator[Measured]:
    """Measure in a process of its own, and give each setting when it is measured."""
    asked = {"lengths": lengths, "settings": [asdict(setting) for setting in settings]}
    return map(read, ask(__file__, asked))


def ask(program: str, question: Any) -> Iterator[Any]:
    """Start a program, put a question to it, and give the lines of its answer as they come."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", program]
    pipe = subprocess.PIPE
    with (
        TemporaryFile("w+") as words,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            process.stdin.write(json.dumps(question))
        yield from map(json.loads, process.stdout)
        if process.wait():
            words.seek(0)
            raise AssertionError(words.read())


def read(line: dict[str, Any]) -> Measured:
    """Read a line of what was measured."""
    peaks = {int(tokens): peak for tokens, peak in line["peaks"].items()}
    return Measured(**{**line, "setting": Setting(**line["setting"]), "peaks": peaks})


# What follows runs in the program.


def main() -> None:
    asked = json.load(sys.stdin)
    for setting in asked["settings"]:
        print(json.dumps({"setting": setting, **run(Setting(**setting), asked["lengths"])}), flush=True)


def run(setting: Setting, lengths: Sequence[int]) -> dict[str, Any]:
    """Load a model and put it to work, on ever longer rows."""
    from transformers import masking_utils

    from fake_device import fake_device

    masking_utils.is_tracing = lambda *arguments: False  # it takes tensors without numbers for a compiler's
    with fake_device() as device:
        works = {"train": trainings, "head": _losses}.get(setting.stage, scorings)
        with works(setting, device) as work:
            gc.collect()
            figures = {"loading": device.peak, "ready": device.live, "largest": device.largest, "peaks": {}}
            for tokens in sorted(lengths):
                gc.collect()
                device.peak = device.live
                work(tokens)
                figures["peaks"][tokens] = device.peak
    return figures


def _checkpoint(setting: Setting) -> Any:
    """Return a checkpoint that has no files but a configuration."""
    from lightning_weave.models.checkpoint import Checkpoint

    checkpoint = Checkpoint("no files")
    checkpoint.__dict__.update(config=_config(setting), config_path=Path("no files"))
    return checkpoint


def _config(setting: Setting) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**config_of(setting.model))
    config.num_hidden_layers = setting.layers or config.num_hidden_layers
    return config


def vocabulary(setting: Setting) -> int:
    """Count the rows of the model's output matrix."""
    return int(config_of(setting.model)["vocab_size"])


@contextmanager
def scorings(setting: Setting, device: Any) -> Iterator[Callable[[int], object]]:
    """Load a scorer; give what scores a row."""
    import numpy as np

    from lightning_weave.models.scorer import Scorer, ScoreRow

    scorer = Scorer.from_model(load(setting, device), vocabulary(setting), token_budget=1)

    def reference(tokens: int, rows: int = 1) -> object:
        return scorer.candidates([([0], [0] * tokens)] * rows, CANDIDATES)

    def score(tokens: int, rows: int = 1) -> object:
        ids_TC = np.tile(np.arange(CANDIDATES, dtype=np.int32), (tokens, 1))
        mapped_TC = np.ones_like(ids_TC, dtype=np.bool_)
        return scorer.score([ScoreRow(np.zeros(tokens, np.int32), np.arange(tokens), ids_TC, mapped_TC)] * rows)

    yield reference if setting.stage == "reference" else score


def load(setting: Setting, device: Any) -> Any:
    """Load a model as if for inference."""
    import torch

    from lightning_weave.models.packing import use_efficient_attention

    model = _checkpoint(setting).build_meta().to(getattr(torch, setting.dtype))
    model.to_empty(device=device.device)
    model.tie_weights()
    use_efficient_attention(model)
    device.peak = device.live  # a tied matrix was there twice
    return model.eval().requires_grad_(False)


@contextmanager
def _losses(setting: Setting, device: Any) -> Iterator[Callable[[int], object]]:
    """Make an output matrix; give what computes the loss and both gradients of so many decisions."""
    import torch

    from lightning_weave.heads import fused_log_residual_loss

    def empty(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.empty(*shape, dtype=dtype, device=device.device)

    dtype, width = getattr(torch, setting.dtype), int(config_of(setting.model)["hidden_size"])
    weight_VD = empty(vocabulary(setting), width, dtype=dtype).requires_grad_()

    def loss(tokens: int) -> object:
        hidden_ND = empty(tokens, width, dtype=dtype).requires_grad_()
        ids_NC = empty(tokens, CANDIDATES, dtype=torch.int64)
        log_b_NO, log_q_NO = (empty(tokens, CANDIDATES + 1) for _ in range(2))
        return fused_log_residual_loss(hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO, 2.0, tokens)

    yield loss


@contextmanager
def trainings(setting: Setting, device: Any) -> Iterator[Callable[[int], object]]:
    """Load a student with its optimizer's moments; give what updates it on micro-batches of so many rows per rank."""
    import torch

    from lightning_weave.config import Lora
    from lightning_weave.train import student as student_module
    from lightning_weave.train.loop import Fit, adam
    from lightning_weave.train.parallel import Ranks
    from lightning_weave.train.student import Loss, TrainContext, open_trainee, with_lora

    lora = None if setting.lora is None else Lora(rank=setting.lora)
    section = SimpleNamespace(
        lora=lora,
        gradient_checkpointing=setting.checkpointing,
        token_budget=1,
        compile=False,
        seed=0,
        shard_ranks=setting.world,
    )

    def moved(model: Any) -> Any:  # FSDP2 would move it in a way that only numbers can be moved
        for module in model.modules():
            module._buffers = {name: buffer.to(device.device) for name, buffer in module._buffers.items()}
            for name, weight in module._parameters.items():
                if weight is not None and not weight.is_meta:  # adapters
                    module._parameters[name] = torch.nn.Parameter(weight.data.to(device.device), weight.requires_grad)
        return model

    student = SimpleNamespace(
        layout=None,
        updates={},
        path=Path(),
        dtype=_config(setting).dtype,  # of its files
        vocabulary=vocabulary(setting),
        build_without_weights=lambda dtype: moved(_checkpoint(setting).build_without_weights(dtype)),
    )
    student_module.read_weights = lambda *arguments: None  # there are no files
    student_module.with_lora = lambda *arguments: moved(with_lora(*arguments))
    steps: Any = SimpleNamespace(recipe=SimpleNamespace(train=section), student=student)
    unused: Any = None
    with _fake_ranks(setting.world):
        ranks = Ranks(0, setting.world, device.device)
        trainee = open_trainee(steps, TrainContext(ranks, getattr(torch, setting.dtype), unused))
        optimizer = adam(trainee, 1e-6, (0.9, 0.999), 0.01)

        def update(tokens: int, micro_batches: int = 1, rows: int = 1) -> object:
            if not optimizer.state:  # as after a first update
                for parameter in (each for each in trainee.parameters() if each.requires_grad):
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            fit = Fit(
                trainee=trainee,
                optimizer=optimizer,
                cache=_Rows(tokens),
                loss=Loss("tilted", 2.0),
                clip=1.0,
                token_budget=rows * tokens,
                seed=0,
                ranks=ranks,
                folder=Path(),
            )
            return fit.update(2, range(micro_batches * rows * setting.world))

        yield update


class _Rows:
    """Trajectories of one length, or of `LENGTHS`, valid everywhere."""

    weights = (1.0,)

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def length(self, number: int) -> int:
        return LENGTHS[number % len(LENGTHS)] if LENGTHS else self.tokens

    def block(self, rows: Sequence[int]) -> Any:
        import numpy as np

        from lightning_weave.cache.block import Block
        from lightning_weave.types import Candidates, Ragged, Rollouts

        # The last token is a decision, and nothing is read after it.
        offsets = np.cumsum([0, *(self.length(number) for number in rows)])
        total = int(offsets[-1])

        def each(values: Any) -> Ragged:
            return Ragged(values, offsets)

        counted = np.arange(len(rows), dtype=np.int32)
        prompts = Ragged(np.zeros(len(rows), np.int32), np.arange(len(rows) + 1))
        chance = np.full((total, CANDIDATES), -4.0, np.float32)
        ids_PC = np.tile(np.arange(CANDIDATES, dtype=np.int32), (total, 1))
        return Block(
            number_R=np.array(rows),
            rollouts=Rollouts(counted, counted, counted, prompts, each(np.zeros(total, np.int32))),
            candidates=Candidates(counted, each(ids_PC), each(chance), each(chance[:, 0]), each(chance[:, 0])),
            r_KPC=np.zeros((1, total, CANDIDATES), np.float32),
            mapped_KPC=np.ones((1, total, CANDIDATES), np.bool_),
            valid_KP=np.ones((1, total), np.bool_),
        )


@contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    """Be rank 0 of so many, whose messages nobody answers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lightning_weave.train import parallel

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel.host_group = lambda purpose: None
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
