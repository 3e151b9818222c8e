import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_weave.bench.definitions import KNOWN, content_digest, ids_digest, load_benchmark
from lightning_weave.config import Columns
from lightning_weave.errors import InputError


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def maths(n: int = 30, names: tuple[str, str, str] = ("id", "problem", "answer")) -> list[dict]:
    return [dict(zip(names, (f"p{k}", f"What is {k}?", str(k)), strict=True)) for k in range(n)]


def lcb(name: str, day: str) -> dict:
    tests = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    return {
        "question_title": name,
        "question_content": f"Solve {name}",
        "platform": "atcoder",
        "question_id": name,
        "contest_id": "c",
        "contest_date": f"{day}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": tests,
        "private_test_cases": tests,
        "metadata": "{}",
    }


def dated(prefix: str, first: str, count: int) -> list[dict]:
    start = datetime.fromisoformat(first)
    return [lcb(f"{prefix}{k:03d}", str((start + timedelta(hours=k)).date())) for k in range(count)]


def lcb_release(folder: Path) -> Path:
    """Files as the release has them: 131 problems in v6's window, 279 in v5's, older and newer ones around."""
    write_jsonl(folder / "test6.jsonl", dated("jan", "2025-01-20", 44) + dated("six", "2025-02-01", 131))
    write_jsonl(folder / "test5.jsonl", dated("five", "2024-10-01", 167))
    write_jsonl(folder / "test4.jsonl", dated("old", "2024-07-01", 20) + dated("four", "2024-08-01", 101))
    write_jsonl(folder / "test3.jsonl", dated("three", "2024-08-01", 11) + dated("older", "2024-06-01", 9))
    (folder / "test2.jsonl").write_text("not to be read\n")
    return folder


@pytest.mark.parametrize(
    "names",
    [("id", "problem", "answer"), ("ID", "Problem", "Answer"), ("problem_idx", "question", "expected_answer")],
)
def test_columns_of_any_aime_set(tmp_path, names):
    path = write_jsonl(tmp_path / "x.jsonl", maths(names=names))
    benchmark = load_benchmark("aime-2024", str(path))
    assert (benchmark.label, benchmark.kind, benchmark.samples, benchmark.max_tokens) == (
        "AIME 2024",
        "math",
        64,
        32768,
    )
    assert (benchmark.temperature, benchmark.top_p) == (0.6, 0.95)
    assert [(p.id, p.question, p.answer) for p in benchmark.problems[:2]] == [
        ("p0", "What is 0?", "0"), ("p1", "What is 1?", "1")
    ]  # fmt: skip


def test_a_directory_of_several_benchmarks(tmp_path):
    write_jsonl(tmp_path / "aime_2024.jsonl", maths())
    write_jsonl(tmp_path / "aime-2025.jsonl", [{**row, "answer": "25"} for row in maths()])
    assert load_benchmark("aime-2024", str(tmp_path)).problems[3].answer == "3"
    assert load_benchmark("aime-2025", str(tmp_path)).problems[3].answer == "25"
    write_jsonl(tmp_path / "aime_2025.jsonl", maths())
    with pytest.raises(InputError, match=r"aime-2025.jsonl and aime_2025.jsonl"):
        load_benchmark("aime-2025", str(tmp_path))


def test_a_dataset_repository_once_downloaded(tmp_path):
    """Two Parquet shards in data/, integer ids and answers: how a hub repository looks on disk."""
    for shard in range(2):
        rows = [{"problem_idx": k, "problem": f"q{k}", "answer": k + 100} for k in range(15 * shard, 15 * shard + 15)]
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"train-0000{shard}-of-00002.parquet")
    benchmark = load_benchmark("hmmt-feb-2025", str(tmp_path))
    assert [problem.id for problem in benchmark.problems] == [str(k) for k in range(30)]
    assert benchmark.problems[29].answer == "129"


def test_answers_that_a_table_made_floats(tmp_path):
    rows = [{"id": 7, "problem": "q", "answer": 204.0}, {"id": 8, "problem": "q", "answer": 0.5}]
    benchmark = load_benchmark(f"file:{write_jsonl(tmp_path / 'f.jsonl', rows)}")
    assert [problem.answer for problem in benchmark.problems] == ["204", "0.5"]


def test_wrong_counts_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", maths(29))
    with pytest.raises(InputError, match=r"benchmark aime-2024: .*x.jsonl has 29 problems, expected 30.*file:PATH"):
        load_benchmark("aime-2024", str(path))


def test_livecodebench_windows_are_locked_by_release_date_and_count(tmp_path):
    folder = lcb_release(tmp_path)
    six = load_benchmark("livecodebench-v6", str(folder))
    assert (six.kind, six.samples, six.max_tokens) == ("code", 4, 40960)
    assert [problem.id for problem in six.problems] == [f"six{k:03d}" for k in range(131)]
    five = load_benchmark("livecodebench-v5", str(folder))
    assert len(five.problems) == 279
    assert {problem.id.rstrip("0123456789") for problem in five.problems} == {"three", "four", "five"}
    assert [problem.id for problem in five.problems] == sorted(problem.id for problem in five.problems)
    (folder / "test5.jsonl").unlink()
    with pytest.raises(InputError, match=r"test2.jsonl:1: not JSON"):  # it has to look further, into the oldest files
        load_benchmark("livecodebench-v5", str(folder))


def test_livecodebench_from_one_file_and_from_timestamps(tmp_path):
    rows = dated("six", "2025-02-01", 131) + dated("jan", "2025-01-20", 44)
    path = tmp_path / "v6.parquet"
    stamped = [{**row, "contest_date": datetime.fromisoformat(row["contest_date"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(stamped), path)
    assert len(load_benchmark("livecodebench-v6", str(path)).problems) == 131
    for name, part in {"a": rows, "b": dated("more", "2025-03-01", 3)}.items():  # not the release's own files: read all
        write_jsonl(tmp_path / "parts" / f"{name}.jsonl", part)
    with pytest.raises(InputError, match="has 134 problems, expected 131"):
        load_benchmark("livecodebench-v6", str(tmp_path / "parts"))
    path = write_jsonl(tmp_path / "short.jsonl", rows[:100])
    with pytest.raises(InputError, match=r"has 100 problems, expected 131 from 2025-02-01 on, of test6.jsonl"):
        load_benchmark("livecodebench-v6", str(path))
    path = write_jsonl(tmp_path / "undated.jsonl", [{**row, "contest_date": "soon"} for row in rows])
    with pytest.raises(InputError, match="contest_date is 'soon'"):
        load_benchmark("livecodebench-v6", str(path))


def test_own_files_are_told_apart_by_their_keys(tmp_path):
    own = load_benchmark(f"file:{write_jsonl(tmp_path / 'My set.jsonl', maths(3))}")
    assert (own.kind, own.label, own.slug, own.samples) == ("math", "My set", "My-set", 4)
    code = load_benchmark(f"file:{write_jsonl(tmp_path / 'code.jsonl', [lcb('a', '2020-01-01')])}")
    assert (code.kind, code.samples, code.problems[0].row["platform"]) == ("code", 4, "atcoder")
    (tmp_path / "list.json").write_text(json.dumps([{"problem": "q", "answer": "1"}, {"problem": "r", "answer": "2"}]))
    assert [p.id for p in load_benchmark(f"file:{tmp_path}/list.json").problems] == ["1", "2"]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"Question": "q", "Target": 3, "unit": "m"}, {"Question": "q", "unit": "m"}),
        ({"prompt": "q", "ground_truth": "3", "label": "x"}, {"prompt": "q", "label": "x"}),
        (
            {"problem": "q", "question": "other", "answer": "3", "gold": "4"},
            {"problem": "q", "question": "other", "gold": "4"},
        ),
    ],
)
def test_columns_are_known_by_their_usual_names(tmp_path, row, columns):
    """As `lweave init` knows those of prompts; a template sees the others, never the answer."""
    (problem,) = load_benchmark(f"file:{write_jsonl(tmp_path / 'f.jsonl', [row])}").problems
    assert (problem.question, problem.answer, problem.columns) == ("q", "3", columns)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "problem": "q"}], "f.jsonl:1: has id, problem; expected problem and answer"),
        ([*maths(1), *maths(1)], "f.jsonl:2: id 'p0' occurs twice"),
        ([*maths(1), lcb("a", "2020-01-01")], "f.jsonl:2: a code problem among math problems"),
        ([], "f.jsonl: the file has no problems"),
        ([["a"]], "f.jsonl:1: not a JSON object but a list"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        load_benchmark(f"file:{write_jsonl(tmp_path / 'f.jsonl', rows)}")


def test_other_broken_sources(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"x\.parquet: broken Parquet after row 0"):
        load_benchmark(f"file:{tmp_path}/x.parquet")
    (tmp_path / "x.csv").write_text("id,problem,answer\n")
    with pytest.raises(InputError, match=r"x\.csv: unknown kind of file '\.csv'\. Convert it to \.jsonl"):
        load_benchmark(f"file:{tmp_path}/x.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no .jsonl, .ndjson, .json, .parquet file"):
        load_benchmark("aime-2024", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="no such file"):
        load_benchmark("aime-2024", "nowhere/aime.jsonl")
    with pytest.raises(InputError, match="Write one problem per line"):
        load_benchmark("file:nowhere.jsonl")
    with pytest.raises(InputError, match=r"unknown benchmark 'aime'\. Use one of aime-2024"):
        load_benchmark("aime")


def test_without_a_network_it_says_how_to_get_each_benchmark(tmp_path):
    code = (
        "from lightning_weave.bench.definitions import KNOWN, load_benchmark\n"
        "from lightning_weave.errors import InputError\n"
        "for args in [*((name,) for name in KNOWN), ('aime-2024', 'some/repo@abc')]:\n"
        "    try: load_benchmark(*args)\n"
        "    except InputError as error: print(error)\n"
        "import sys, lightning_weave.bench.samples, lightning_weave.bench.definitions\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(KNOWN) + 1
    for (name, known), line in zip(KNOWN.items(), lines, strict=False):
        assert f"benchmark {name}: {known.repo} cannot be read from the hub" in line
        assert f"hf download --repo-type dataset {' '.join([known.repo, *known.files])} --local-dir DIR" in line
    assert "hf download --repo-type dataset some/repo --revision abc --local-dir DIR" in lines[-1]


def test_columns_of_a_file_can_be_named(tmp_path):
    name = f"file:{write_jsonl(tmp_path / 'odd.jsonl', [{'q': '1+1?', 'a': '2', 'n': 'x7', 'problem': 'other'}])}"
    (problem,) = load_benchmark(name, columns=Columns(prompt="q", answer="a", id="n")).problems
    assert (problem.id, problem.question, problem.answer) == ("x7", "1+1?", "2")
    assert "a" not in problem.columns  # a template never sees the answer
    with pytest.raises(InputError, match=r"expected frage and a. Correct eval.columns"):
        load_benchmark(name, columns=Columns(prompt="frage", answer="a"))
    with pytest.raises(InputError, match=r"Name the columns: eval.columns = \{ prompt"):
        load_benchmark(name)


@pytest.mark.parametrize("field", ["id", "problem", "answer"])
def test_half_a_surrogate_pair_is_refused_by_its_row(tmp_path, field):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"id": "1", "problem": "p", "answer": "2"}'.replace(f'"{field}": "', f'"{field}": "\\ud800') + "\n"
    )
    with pytest.raises(InputError, match=r"x.jsonl:1: has half a surrogate pair"):
        load_benchmark(f"file:{path}")


def test_digests_see_what_they_should(tmp_path):
    rows = [lcb("b", "2020-01-01"), lcb("a", "2020-01-01")]
    problems = load_benchmark(f"file:{write_jsonl(tmp_path / '1.jsonl', rows)}").problems
    turned = load_benchmark(f"file:{write_jsonl(tmp_path / '2.jsonl', rows[::-1])}").problems
    tested = load_benchmark(
        f"file:{write_jsonl(tmp_path / '3.jsonl', [rows[0], {**rows[1], 'private_test_cases': '[]'}])}"
    ).problems
    assert ids_digest(problems) == ids_digest(turned) == ids_digest(tested)
    assert content_digest(problems) == content_digest(turned) != content_digest(tested)


@pytest.mark.parametrize("answer", ["4", 4, 4.0, ["4"], [4, "four"]])
def test_an_answer_may_be_a_number_or_the_first_of_several(tmp_path: Path, answer: object) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [{"problem": "2 + 2?", "answer": answer}])
    assert load_benchmark(f"file:{path}").problems[0].answer == "4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "2 + 2?", "answer": ""}, "its answer is '', expected a number or text"),
        ({"problem": "2 + 2?", "answer": " "}, "its answer is ' '"),
        ({"problem": "2 + 2?", "answer": []}, r"its answer is \[\]"),
        ({"problem": "2 + 2?", "answer": {"is": 4}}, "its answer is {'is': 4}"),
        ({"problem": "2 + 2?", "answer": True}, "its answer is True"),
        ({"problem": " ", "answer": "4"}, "its problem is ' ', expected text"),
        ({"problem": ["2 + 2?"], "answer": "4"}, "its problem is "),
    ],
)
def test_a_problem_that_nobody_could_solve_is_refused(tmp_path: Path, row: dict, message: str) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [{"problem": "1 + 1?", "answer": "2"}, row])
    with pytest.raises(InputError, match=f"own.jsonl:2: {message}"):
        load_benchmark(f"file:{path}")


@pytest.mark.parametrize(("suffix", "where", "byte"), [("jsonl", "own.jsonl:1", 14), ("json", "own.json", 15)])
def test_other_encodings_are_refused_and_a_byte_order_mark_is_not(
    tmp_path: Path, suffix: str, where: str, byte: int
) -> None:
    row = json.dumps({"problem": "\u00e9?", "answer": "1"}, ensure_ascii=False)
    path = tmp_path / f"own.{suffix}"
    path.write_text(row if suffix == "jsonl" else f"[{row}]", encoding="utf-8-sig")
    assert load_benchmark(f"file:{path}").problems[0].question == "\u00e9?"
    path.write_text(row if suffix == "jsonl" else f"[{row}]", encoding="latin-1")
    with pytest.raises(InputError, match=rf"{where}: not UTF-8 \(0xe9 at byte {byte}\)"):
        load_benchmark(f"file:{path}")
