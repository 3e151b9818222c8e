"""Run lm-evaluation-harness in a separate process, which may use another environment than this package.

A program, not a module: it needs Python and lm_eval and nothing else. It reads JSON lines from stdin and writes one
answer per line: first for the model and its settings, then for one task after another. An error is an answer too.
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
    # This file's directory would be searched first, and it has a statistics.py that is not Python's.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    settings = json.loads(sys.stdin.readline())
    try:
        tasks = importlib.import_module("lm_eval.tasks").TaskManager(include_path=settings["include"])
        unknown = [name for name in settings["tasks"] if name not in tasks.all_tasks]
        model = None
        if not unknown:
            importlib.import_module("lm_eval.models")
            kind = importlib.import_module("lm_eval.api.registry").get_model(settings["engine"])
            others = {"batch_size": settings["batch_size"], "device": settings["device"]}
            model = kind.create_from_arg_obj(settings["model"], others)
            use_plain_decoding(model)
            fix_date(model, settings["date_macro"])
        try:
            version = importlib.metadata.version("lm_eval")
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        answer(answers, {"version": version, "unknown": unknown, "known": tasks.all_tasks if unknown else []})
        for line in sys.stdin:
            answer(answers, evaluate(settings, model, tasks, **json.loads(line)))
    except ModuleNotFoundError as error:
        missing = {"missing": error.name} if (error.name or "").startswith("lm_eval") else {}
        answer(answers, {"error": str(error), **missing})
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def use_plain_decoding(model: Any) -> None:
    """Ignore a checkpoint's own decoding (top_k, repetition_penalty, ...): the task decides, the same for all policies.

    transformers takes what a call to `generate` leaves open from generation_config.json.
    """
    inner = getattr(model, "model", None)
    own = getattr(inner, "generation_config", None)
    if inner is not None and own is not None:
        kept = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        inner.generation_config = type(own)(**kept, top_k=0)


def fix_date(model: Any, macro: str) -> None:
    """Let a chat template that writes today's date write that of the run: `macro` defines strftime_now for it."""
    tokenizer = getattr(model, "tokenizer", None)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and "strftime_now" in template:
        tokenizer.chat_template = macro + template  # type: ignore[union-attr]


def evaluate(settings: dict[str, Any], model: Any, tasks: Any, task: str, folder: str) -> dict[str, Any]:
    """Run one task, or one group of tasks, and let the harness write its result files."""
    results = importlib.import_module("lm_eval").simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=tasks,
        log_samples=True,
        **settings["args"],
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
