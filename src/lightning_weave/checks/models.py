"""What stages need: usable checkpoints, engines, packages, benchmarks. No weights are loaded."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark, load_eval_benchmark
from lightning_weave.checks.findings import Finding, is_pending
from lightning_weave.config import EngineStage
from lightning_weave.errors import InputError
from lightning_weave.grading.sandbox import open_sandbox
from lightning_weave.heads import describe_head
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import check_adapter, check_weights, checkpoint_json, indexed_files
from lightning_weave.models.weights import check_shapes
from lightning_weave.run import Run
from lightning_weave.stages.engines import refuse_adapter
from lightning_weave.store.files import TOKENIZER_FILES

SOURCE = "Give the directory or hub name of the checkpoint that it was converted from (safetensors)"


def attempt(about: str, check: str, rule: Callable[..., object], *arguments: Any) -> Iterator[Finding]:
    """Call a rule that a stage itself enforces, and report what it raises."""
    try:
        rule(*arguments)
    except InputError as error:
        yield Finding(about, check, "error", str(error))


def find_fault(checkpoint: Checkpoint, scored: bool = False) -> str | None:
    """Explain why a checkpoint cannot be loaded as a causal language model, or be `scored`; None if it can."""
    try:
        path = Path(checkpoint.name).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return f"{path}: a GGUF file, for llama.cpp. {SOURCE}"
        if path.is_file():
            return f"{path}: a file. Give the directory of the checkpoint, with config.json, weights and tokenizer"
        if checkpoint.base is not None and (fault := find_fault(checkpoint.base)):
            return f"{checkpoint.name}: a LoRA adapter whose base cannot be used: {fault}"
        if checkpoint.is_downloaded:  # else its weights are still on the hub
            if fault := directory_fault(checkpoint.path):
                return fault
            check_weights(checkpoint.path)
            if checkpoint.base is not None:
                check_adapter(checkpoint.adapter_path)
        assert checkpoint.config is not None
        assert checkpoint.tokenizer is not None
        model = checkpoint.build_meta()
        if checkpoint.is_downloaded:
            check_shapes(checkpoint.path, model)
        assert checkpoint.stop_ids is not None
    except InputError as error:
        return str(error)
    try:
        if scored:
            describe_head(model, checkpoint.vocabulary)
    except InputError as error:  # the output layer needs a row for every token
        return f"{checkpoint.name}: {error}"
    return None


known_fault = lru_cache(find_fault)  # for one preflight, in which several stages ask about the same models


def directory_fault(path: Path) -> str | None:
    """Explain what a directory is instead of a checkpoint, with the remedy; None if it looks like a checkpoint."""
    has_config = (path / "config.json").is_file()
    if (path / "adapter_config.json").is_file() and not has_config:
        base = checkpoint_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        return (
            f"{path}: a LoRA adapter of {base}, but a full model is needed. Merge it with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(OUT), copy the "
            "tokenizer to OUT, and give OUT"
        )
    if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        return f"{path}: holds GGUF weights, for llama.cpp. {SOURCE}"
    if not has_config:
        saved = [file for file in path.glob("checkpoint-*") if file.name.removeprefix("checkpoint-").isdigit()]
        if saved:
            last = max(saved, key=lambda file: int(file.name.removeprefix("checkpoint-")))
            return (
                f"{path}: the output directory of a Trainer. Give one of its {len(saved)} checkpoints: {last} is the "
                "last"
            )
        if not any(path.iterdir()):
            return f"{path}: an empty directory. Download or export the checkpoint again"
        inside = sorted(file.parent for file in path.glob("*/config.json"))
        hint = f"did you mean {inside[0]}?" if inside else "give the directory that has it"
        return f"{path}: not a checkpoint (no config.json); {hint}"
    parts = indexed_files(path)
    if absent := [part for part in parts if not (path / part).is_file()]:
        count = f"{len(absent)} of {len(parts)} weight files"
        return f"{path}: {count} are missing, {absent[0]} among them. Download it again"
    if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return (
            f"{path}: weights without a tokenizer. Copy tokenizer.json and tokenizer_config.json of the model that it "
            "was trained from into it"
        )
    return None


def check_model(
    about: str, checkpoint: Checkpoint, stage: EngineStage, engine: str = "hf", scored: bool = True
) -> Iterator[Finding]:
    """Check that a stage can use a checkpoint with its engine. The key of a finding is `about`."""
    if fault := known_fault(checkpoint, scored):
        yield Finding(about, "checkpoint", "error", fault)
    elif engine not in ("hf", "auto"):
        yield from attempt(about, "checkpoint", refuse_adapter, checkpoint, stage)


def check_student(run: Run, stage: EngineStage, engine: str = "hf") -> list[Finding]:
    """Check that the student can be used; where it cannot, nothing else of a stage can be checked."""
    return list(check_model("student", run.student, stage, engine))


def check_engine(run: Run, stage: EngineStage, engine: str | None = None) -> Iterator[Finding]:
    """Check that the engine of a stage is installed."""
    engine = engine or getattr(run.recipe.engine, stage)
    python = run.recipe.engine.python
    if engine not in ("hf", "server") and (lack := find_lack("engine.python", engine, python)):
        remedy = f'Install it, set engine.python to the Python of an environment that has it, or engine.{stage} = "hf"'
        text = f"engine.{stage} = {engine!r}: {lack}. {remedy}"
        yield Finding(f"engine.{stage}", "package", "error", text)


def check_package(about: str, package: str, name: str = "") -> Iterator[Finding]:
    """Check that a package which only some recipes need is installed."""
    if find_spec(package) is None:
        text = f"{about}{name and f': {name}'} needs the package {package}, which is not installed: pip install "
        yield Finding(about, "package", "error", f"{text}{package.replace('_', '-')}")


def find_lack(key: str, package: str, python: str | None) -> str | None:
    """Ask a Python whether it has a package, without importing it; None if it has."""
    if python is None or shutil.which(python) == sys.executable:
        found = find_spec(package) is not None
    elif shutil.which(python) is None:
        return f"{key} = {python!r}: no such executable"
    else:
        ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        found = subprocess.run([python, "-c", ask], capture_output=True, check=False).returncode == 0
    return None if found else f"{python or 'this environment'} has no package {package}"


def check_room(checkpoint: Checkpoint, what: str, tokens: int, remedy: str) -> None:
    """Refuse a prompt that leaves no room for a response."""
    limit = checkpoint.context_limit
    if limit is not None and tokens >= limit:
        raise InputError(
            f"{what} has {tokens} tokens, which leaves no room in the {limit} of {checkpoint.config_path}. {remedy}"
        )


@lru_cache(maxsize=1)  # for one preflight
def open_benchmarks(run: Run) -> tuple[list[Benchmark], list[Finding]]:
    """Read the benchmarks that some policy has still to be evaluated on, and report those that cannot be read."""
    section = run.recipe.eval
    benchmarks: list[Benchmark] = []
    findings: list[Finding] = []
    for name in section.benchmarks:
        if any(is_pending(run, "eval", policy, name) for policy in run.policies):
            try:
                benchmark = load_eval_benchmark(run.recipe, name)
                if benchmark.kind == "code":
                    with open_sandbox(section.unsafe_local):
                        pass
                benchmarks.append(benchmark)
            except InputError as error:
                findings.append(Finding("eval.benchmarks", "benchmark", "error", str(error)))
    return benchmarks, findings
