"""`lweave eval --harness`: other people's tasks by lm-evaluation-harness, one process per policy."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_weave.bench.harness import WORKER, summarise, write_result
from lightning_weave.devices import own_gpus
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.engine_process import EngineProcess, EngineProgram
from lightning_weave.models.memory import free_memory
from lightning_weave.own import check_trust
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_first
from lightning_weave.report.results import track_evaluation
from lightning_weave.runs.engines import gpus_of
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.files import remove
from lightning_weave.store.ledger import measure

LM_EVAL = EngineProgram(WORKER, "lm-evaluation-harness", "'lm_eval[hf]'")


def run_tasks(steps: Steps, progress: Progress, only: Sequence[str] | None = None) -> None:
    """Run the tasks of [harness] that are not up to date; what is finished of a policy is kept task by task."""
    for name in steps.policies if is_first() else ():
        if only is not None and name not in only:
            continue
        stages = {task: steps.store.stage(steps.harness(name, task)) for task in steps.recipe.harness.tasks}
        waiting = {task: stage for task, stage in stages.items() if stage.state() != "done"}
        if waiting:
            _run_policy(steps, name, waiting, progress)
            track_evaluation(steps, name)


def _run_policy(steps: Steps, policy: str, waiting: dict[str, Stage], progress: Progress) -> None:
    section = steps.recipe.harness
    if section.include is not None:  # definitions of tasks can name functions of theirs
        check_trust(f"harness.include = {section.include!r}", steps.trust)
    device = set_up(steps.recipe, steps.store)
    settings = _settings(steps, steps.policy(policy), device, list(waiting))
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **own_gpus(device, gpus_of(section))}
    process: EngineProcess | None = None
    try:
        with progress.bar(f"lm-eval {policy}", len(waiting), "task") as bar:
            for task, stage in waiting.items():
                name = f"{policy}/{stage.folder.name}"
                with measure(steps.store.run_dir, "eval", name, fingerprint=stage.step.fingerprint):
                    if process is None:
                        free_memory()
                        process = EngineProcess(settings, section.python, environment, LM_EVAL)
                        _refuse_unknown(process.hello)
                    stage.begin()
                    if stage.state() != "done":  # it had been set aside
                        _run_task(process, task, stage)
                bar.advance()
    finally:
        if process is not None:
            process.close()


def _run_task(process: EngineProcess, task: str, stage: Stage) -> None:
    """Let the harness write its files into the stage's folder, beside our summary of them."""
    for leftover in (*stage.folder.glob("results_*.json"), *stage.folder.glob("samples_*.jsonl")):
        remove(leftover)  # of a run that was killed
    process.ask({"task": task, "folder": str(stage.folder.resolve())})
    result = summarise(stage.folder, task, f"lm-eval {process.hello['version']}")
    summary = write_result(stage.folder, result)
    stage.record([summary, *sorted(stage.folder.glob("results_*.json")), *sorted(stage.folder.glob("samples_*.jsonl"))])


def _settings(steps: Steps, checkpoint: Checkpoint, device: torch.device, tasks: list[str]) -> dict[str, Any]:
    section = steps.recipe.harness
    if checkpoint.base is not None:
        raise InputError(
            f"{checkpoint.name}: lm-evaluation-harness is given whole checkpoints, and this is a LoRA adapter. Merge "
            "it into its base with peft, or leave the policy out with --only"
        )
    dtype = str(checkpoint.compute_dtype(section.dtype, device)).removeprefix("torch.")
    return {
        "model": {**checkpoint.as_arguments(), "dtype": dtype, **section.options},
        "engine": section.engine,
        "device": device.type,
        "batch_size": section.batch_size,
        "tasks": tasks,
        "include": section.include and str(Path(section.include).expanduser().resolve()),
        "fewshot": section.fewshot,
        "limit": section.limit,
        "generation": dict(section.generation),
        "chat": section.chat and bool(checkpoint.tokenizer.chat_template),
        "seed": section.seed,
    }


def _refuse_unknown(hello: dict[str, Any]) -> None:
    for task in hello["unknown"]:
        near = difflib.get_close_matches(task, hello["known"], n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(
            f"harness.tasks: lm-eval {hello['version']} has no task {task!r}.{hint} Definitions of your own are in the "
            "directory that harness.include names"
        )
