"""Run lm-evaluation-harness in a process of its own, so that it may live in another environment than this package.

A program, not a module: it needs Python and lm_eval and nothing else. JSON lines come in on stdin, one answer goes out
per line: first the model and how to ask it, then one task after another. An error is an answer too.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Load the model once all its tasks are known, then run the tasks until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed must not be taken for an answer
    # This file's own directory would be searched first, and it has a statistics.py that is not Python's.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    settings = json.loads(sys.stdin.readline())
    try:
        tasks = importlib.import_module("lm_eval.tasks").TaskManager(include_path=settings["include"])
        unknown = [name for name in settings["tasks"] if name not in tasks.all_tasks]
        model = None if unknown else load(settings)
        answer(answers, {"version": version(), "unknown": unknown, "known": tasks.all_tasks if unknown else []})
        for line in sys.stdin:
            answer(answers, evaluate(settings, model, tasks, **json.loads(line)))
    except ModuleNotFoundError as error:
        missing = {"missing": error.name} if (error.name or "").startswith("lm_eval") else {}
        answer(answers, {"error": str(error), **missing})
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def version() -> str:
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def load(settings: dict[str, Any]) -> Any:
    """Load a checkpoint with one of the harness's own models."""
    importlib.import_module("lm_eval.models")
    kind = importlib.import_module("lm_eval.api.registry").get_model(settings["engine"])
    others = {"batch_size": settings["batch_size"], "device": settings["device"]}
    return kind.create_from_arg_obj(settings["model"], others)


def evaluate(settings: dict[str, Any], model: Any, tasks: Any, task: str, folder: str) -> dict[str, Any]:
    """Run one task, or one group of tasks, and let the harness write its own result files."""
    seed = settings["seed"]
    results = importlib.import_module("lm_eval").simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=tasks,
        num_fewshot=settings["fewshot"],
        limit=settings["limit"],
        gen_kwargs=settings["generation"] or None,
        apply_chat_template=settings["chat"],
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=True,
    )
    samples = results.pop("samples")
    loggers = importlib.import_module("lm_eval.loggers")
    tracker = loggers.EvaluationTracker(output_path=str(Path(folder) / "results.json"))
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    return {"done": task}


def answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
