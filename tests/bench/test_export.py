import hashlib
import json
from datetime import datetime

import pyarrow.json
import pytest

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.bench.samples import Sample, export_samples
from lightning_weave.errors import Mismatch

# What lm-evaluation-harness logs for a generation task, in its own order; metric values follow.
FIELDS = [
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics",
    "doc_hash", "prompt_hash", "target_hash",
]  # fmt: skip
WHEN = datetime(2026, 1, 2, 3, 4, 5)
SETTINGS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 100}


def sample(problem: str, number: int, correct: bool, answer: str | None) -> Sample:
    return Sample(problem, number, 0, 10 + number, "stop", f"ä text {number}", answer, correct, "")


def test_mathematics(tmp_path):
    problems = (Problem("p0", "q0", "7"), Problem("p1", "q1", "8"))
    bench = Benchmark("aime-2024", "AIME 2024", "math", problems, 2, 100)
    samples = [sample(p, n, p == "p0" and n == 1, "7" if n else None) for p in ("p0", "p1") for n in range(2)]
    path = export_samples(tmp_path, bench, ["prompt 0", "prompt 1"], samples, SETTINGS, WHEN)
    assert path.name == "samples_aime-2024_2026-01-02T03-04-05.jsonl"
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert list(first) == [*FIELDS, "exact_match", "tokens"]
    assert (first["doc_id"], second["doc_id"]) == (0, 1)
    assert first["doc"] == {"id": "p0", "problem": "q0", "answer": "7"}
    assert first["arguments"]["gen_args_0"] == {
        "arg_0": "prompt 0",
        "arg_1": {"until": [], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 100},
    }
    assert first["resps"] == [["ä text 0", "ä text 1"]]
    assert first["filtered_resps"] == [["", "7"]]
    assert first["metrics"] == ["exact_match", "tokens"]
    assert [line["exact_match"] for line in (first, second)] == [0.5, 0.0]
    assert first["tokens"] == 10.5
    assert first["prompt_hash"] == hashlib.sha256(b"prompt 0").hexdigest()
    assert first["target_hash"] == hashlib.sha256(b"7").hexdigest()
    # The harness makes every line alike so that tables can be read from it.
    assert pyarrow.json.read_json(path).num_rows == 2


def test_code_leaves_hidden_tests_out(tmp_path):
    row = {"question_id": "a", "question_content": "do", "public_test_cases": "[]", "private_test_cases": "secret"}
    bench = Benchmark("file:x/My code.jsonl", "code", "code", (Problem("a", "do", row=row),), 1, 100)
    path = export_samples(tmp_path, bench, ["prompt"], [sample("a", 0, True, "print(1)")], {"temperature": 0.0}, WHEN)
    assert path.name.startswith("samples_My-code_2026")
    assert "secret" not in path.read_text()
    line = json.loads(path.read_text())
    assert line["pass@1"] == 1.0
    assert line["doc"]["question_content"] == "do"
    assert line["target"] == ""
    assert line["arguments"]["gen_args_0"]["arg_1"]["do_sample"] is False


def test_foreign_samples_are_refused(tmp_path):
    bench = Benchmark("x", "X", "math", (Problem("p0", "q", "1"),), 1, 100)
    with pytest.raises(Mismatch, match="sample of 'p9', which is not a problem"):
        export_samples(tmp_path, bench, ["prompt"], [sample("p9", 0, True, "1")], SETTINGS, WHEN)
