"""A package that stands in for lm_eval: the calls that our program makes of it, on questions about a model's name.

`Policy answers question n` is right where n is even, and for a model in a directory called `final` everywhere but at 0.
"""

import json
from pathlib import Path
from typing import Any

from lm_eval.api.registry import Model

QUESTIONS = 6


def simple_evaluate(model: Model, tasks: list[str], **settings: Any) -> dict[str, Any]:
    (task,) = tasks
    if task == "breaks":
        raise RuntimeError("the data are gone")
    count = settings.get("limit") or QUESTIONS
    trained = Path(model.arguments["pretrained"]).name == "final"
    right = [float(n > 0 if trained else n % 2 == 0) for n in range(count)]
    samples = [
        {"doc_id": n, "doc_hash": f"hash{n}", "filter": "strict", "exact_match": value} for n, value in enumerate(right)
    ]
    mean = sum(right) / count
    scores = {"alias": task, "exact_match,strict": mean, "exact_match_stderr,strict": 0.2, "perplexity,none": 7.5}
    return {
        "results": {task: {**scores, "perplexity_stderr,none": "N/A"}},
        "configs": {task: {}},
        "higher_is_better": {task: {"exact_match": True, "perplexity": False}},
        "samples": {task: samples},
        "asked": json.loads(json.dumps({**settings, "task_manager": None, "model": model.arguments})),
        "rendered": model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        if settings["apply_chat_template"]
        else "Hi",
    }
