"""Result files, named as lm_eval names them."""

import json
from pathlib import Path
from typing import Any


class EvaluationTracker:
    def __init__(self, output_path: str) -> None:
        self.folder = Path(output_path).parent

    def save_results_aggregated(self, results: dict[str, Any], samples: dict[str, Any]) -> None:
        (self.folder / "results_2026-01-01.json").write_text(json.dumps(results))

    def save_results_samples(self, task_name: str, samples: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (self.folder / f"samples_{task_name}_2026-01-01.jsonl").write_text(lines)
