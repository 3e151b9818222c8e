"""`lweave eval --harness`: other people's tasks by lm-evaluation-harness, one process per policy."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_weave import bench
from lightning_weave.bench.summary import SUMMARY, read_harness
from lightning_weave.checks.findings import Finding, is_pending
from lightning_weave.checks.models import find_lack
from lightning_weave.devices import free_memory, own_gpus
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.worker_process import WorkerProcess, WorkerProgram
from lightning_weave.progress import Progress
from lightning_weave.prompts.render import macro_of_date
from lightning_weave.ranks import is_main_process
from lightning_weave.report.results import track_evaluation
from lightning_weave.run import Run, is_wanted
from lightning_weave.stages.engines import gpus_of
from lightning_weave.stages.merge import make_merge
from lightning_weave.stages.work import set_up
from lightning_weave.store import Stage, write_json
from lightning_weave.store.files import remove
from lightning_weave.store.ledger import measure

BATCH_SIZE = 16
WORKER = Path(bench.__file__).with_name("lm_eval_worker.py")
LM_EVAL = WorkerProgram(WORKER, "lm-evaluation-harness", "'lm_eval[hf]'")


def check_policies(run: Run, only: Sequence[str] | None) -> None:
    """Refuse names that are not policies of this recipe."""
    if unknown := sorted(set(only or ()) - set(run.policies)):
        raise InputError(f"{unknown[0]!r}: no such policy; this recipe has {', '.join(run.policies)}")


def run_tasks(run: Run, progress: Progress, only: Sequence[str] | None = None) -> None:
    """Run the tasks of [harness] that are not complete; what is finished of a policy is kept task by task."""
    check_policies(run, only)
    for name in run.policies if is_main_process() else ():
        if not is_wanted(name, only) or not run.recipe.has_weights(name):
            continue
        stages = {task: run.stage("harness", name, task) for task in run.recipe.harness.tasks}
        waiting = {task: stage for task, stage in stages.items() if not stage.complete}
        for task in stages.keys() - waiting.keys():
            stages[task].settle()
        if waiting and run.recipe.merged(name):
            make_merge(run, name, progress)
        if waiting:
            _run_policy(run, name, waiting, progress)
            track_evaluation(run, name)


def _run_policy(run: Run, policy: str, waiting: dict[str, Stage], progress: Progress) -> None:
    """Start the harness with one policy; it writes its files into each stage's folder, next to our summary of them."""
    section = run.recipe.harness
    device = set_up(run)
    settings = _settings(run, run.policy(policy), device, list(waiting))
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **own_gpus(device, gpus_of(section))}
    process: WorkerProcess | None = None
    try:
        with progress.bar(f"lm-eval {policy}", len(waiting), "task") as bar:
            for task, stage in waiting.items():
                name = f"{policy}/{stage.name}"
                with measure(run.directory, "eval", name, fingerprint=stage.fingerprint):
                    if process is None:
                        free_memory()
                        process = WorkerProcess(settings, section.python, environment, LM_EVAL)
                        for unknown in process.started["unknown"]:
                            near = difflib.get_close_matches(unknown, process.started["known"], n=3)
                            hint = f" Did you mean {' or '.join(near)}?" if near else ""
                            raise InputError(
                                f"harness.tasks: lm-eval {process.started['version']} has no task {unknown!r}.{hint} "
                                "Definitions of your own are in the directory that harness.include names"
                            )
                    stage.begin()
                    if not stage.complete:  # another rank may have finished it
                        for leftover in _harness_files(stage):  # of a run that was killed
                            remove(leftover)
                        process.ask({"task": task, "folder": str(stage.folder.resolve())})
                        result = read_harness(stage.folder, task, f"lm-eval {process.started['version']}")
                        write_json(stage.folder / SUMMARY, asdict(result))
                        stage.record([stage.folder / SUMMARY, *_harness_files(stage)])
                bar.advance()
    finally:
        if process is not None:
            process.close()


def _settings(run: Run, checkpoint: Checkpoint, device: torch.device, tasks: list[str]) -> dict[str, Any]:
    section = run.recipe.harness
    if checkpoint.base is not None:
        raise InputError(
            f"{checkpoint.name}: lm-evaluation-harness is given whole checkpoints, and this is a LoRA adapter. Merge "
            "it into its base with peft, or leave the policy out with --only"
        )
    dtype = str(checkpoint.compute_dtype("auto", device)).removeprefix("torch.")
    own = {"model", "model_args", "batch_size"}  # for the model, which is loaded once
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    return {
        "model": {
            "pretrained": str(checkpoint.path.resolve()),
            "trust_remote_code": checkpoint.trust_remote_code,
            "dtype": dtype,
            **section.options,
        },
        "engine": section.engine,
        "device": device.type,
        "batch_size": section.args.get("batch_size", BATCH_SIZE),
        "tasks": tasks,
        "date_macro": macro_of_date(run.recipe.date),
        "include": section.include and str(Path(section.include).expanduser().resolve()),
        "args": {
            "apply_chat_template": bool(checkpoint.tokenizer.chat_template),
            **dict.fromkeys(seeds, run.recipe.eval.seed),
            **{name: value for name, value in section.args.items() if name not in own},
        },
    }


def _harness_files(stage: Stage) -> list[Path]:
    return [*sorted(stage.folder.glob("results_*.json")), *sorted(stage.folder.glob("samples_*.jsonl"))]


def validate(run: Run) -> Iterator[Finding]:
    """Check that lm-evaluation-harness is installed."""
    section = run.recipe.harness
    policies = [policy for policy in run.policies if run.recipe.has_weights(policy)]
    if not any(is_pending(run, "harness", policy, task) for policy in policies for task in section.tasks):
        return
    if lack := find_lack("harness.python", "lm_eval", section.python):
        text = f"{lack}. Install it (pip install 'lm_eval[hf]'), or set harness.python to the Python of an environment "
        yield Finding("harness.python", "package", "error", f"{text}that has it")
