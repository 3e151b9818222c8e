"""Rows from every kind of source; what cannot be read is named."""

import json
import os
import re
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_weave.errors import InputError
from lightning_weave.prompts import read_rows

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "tests": "x" * n} for n in range(600)]


def values(rows):
    return [row.values for row in rows]


@pytest.mark.parametrize("source", ["missing.jsonl", "some/where/deep/file", "/no/such/dir", "~/nothing.parquet"])
def test_a_missing_file_is_named(source):
    with pytest.raises(InputError, match=f"{re.escape(source)}: no such file"):
        read_rows(source)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    math, code = datasets.Dataset.from_list(ROWS[:5]), datasets.Dataset.from_list(ROWS[5:8])
    math.save_to_disk(str(root / "one"))
    datasets.DatasetDict({"math": math, "code": code}).save_to_disk(str(root / "two"))
    files = root / "files" / "data"
    files.mkdir(parents=True)
    (files / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    pq.write_table(pa.Table.from_pylist(ROWS[5:8]), root / "parquet-only.parquet")
    (root / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[5:8]), root / "folder" / "test-00000-of-00001.parquet")
    return root


def test_saved_datasets_are_read(saved):
    assert values(read_rows(saved / "one")) == ROWS[:5]
    assert values(read_rows(saved / "one", split="train")) == ROWS[:5]  # one saved split has no name
    assert values(read_rows(saved / "two", split="code")) == ROWS[5:8]
    assert values(read_rows(saved / "two", split="math", columns=["answer"])) == [
        {"answer": r["answer"]} for r in ROWS[:5]
    ]


def test_directories_of_data_files_are_read(saved):
    assert values(read_rows(saved / "files")) == ROWS[:5]
    assert values(read_rows(saved / "folder", columns={"prompt"})) == [{"prompt": r["prompt"]} for r in ROWS[5:8]]


@pytest.mark.slow
def test_directories_are_read_without_a_copy_in_the_cache(saved, tmp_path):
    script = f"from lightning_weave.prompts import read_rows\nprint(len(list(read_rows({str(saved / 'files')!r}))))"
    home = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=home, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_split_that_is_not_there_lists_those_that_are(saved):
    with pytest.raises(InputError, match="no split 'maths'; there are code, math"):
        read_rows(saved / "two", split="maths")
    with pytest.raises(InputError, match="several splits; there are code, math"):
        read_rows(saved / "two")


def test_a_directory_without_data_and_one_with_a_broken_file_are_the_users_errors(tmp_path):
    with pytest.raises(InputError, match="cannot be opened as a Hugging Face dataset"):
        read_rows(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(b'{"prompt": "one"}\n{"prompt": \n')
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        list(read_rows(tmp_path))


@pytest.mark.slow
def test_a_hub_name_that_cannot_be_reached_is_the_users_error(tmp_path):
    script = "from lightning_weave.prompts import read_rows\nread_rows('nobody/no-such-dataset', split='train')"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=offline, capture_output=True, text=True, check=False)
    assert "lightning_weave.errors.InputError: nobody/no-such-dataset: cannot be opened" in done.stderr


def test_files_are_read_without_importing_datasets_or_torch(jsonl):
    path = jsonl([{"prompt": "one"}])
    script = (
        "import sys\nfrom lightning_weave.prompts import read_rows\n"
        f"assert [row.values for row in read_rows({str(path)!r})] == [{{'prompt': 'one'}}]\n"
        "assert not {'datasets', 'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
