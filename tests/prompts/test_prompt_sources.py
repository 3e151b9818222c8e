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
from lightning_weave.prompts import BadRow, Row, read_rows

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "tests": "x" * n} for n in range(600)]


def values(rows):
    return [row.values for row in rows]


def test_jsonl_names_every_broken_line_and_keeps_the_others(jsonl):
    path = jsonl(
        [
            b'\xef\xbb\xbf{"prompt": "one"}',
            b'{"prompt": "caf\xe9"}',
            b"",
            b'{"prompt": "two"',
            b'["prompt"]',
            b"[" * 100_000,
            b'{"prompt": ' + b"9" * 5000 + b"}",
            '{"prompt": "\u2028 drei"}'.encode(),
        ]
    )
    rows = list(read_rows(path))
    assert [row.where for row in rows] == [f"{path}:{n}" for n in (1, 2, 4, 5, 6, 7, 8)]
    assert values(row for row in rows if isinstance(row, Row)) == [{"prompt": "one"}, {"prompt": "\u2028 drei"}]
    whys = [row.why for row in rows if isinstance(row, BadRow)]
    assert whys[0] == "not UTF-8 (byte 0xe9 at column 16)"
    assert whys[1] == "not JSON (Expecting ',' delimiter at column 17)"
    assert whys[2] == "not a JSON object but a list"
    assert all(why.startswith("not readable as JSON") for why in whys[3:])
    assert len(whys) == 5


def test_a_file_without_one_readable_line_is_the_users_error(jsonl):
    path = jsonl([b"[", b'{"prompt": 1},', b"]"])
    with pytest.raises(InputError, match=re.escape(f"{path}:1") + ".*one JSON object per line"):
        list(read_rows(path))


@pytest.mark.parametrize("source", ["missing.jsonl", "some/where/deep/file", "/no/such/dir", "~/nothing.parquet"])
def test_a_missing_file_is_named(source):
    with pytest.raises(InputError, match=f"{re.escape(source)}: no such file"):
        read_rows(source)


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\nhello\n")
    with pytest.raises(InputError, match=r"unknown kind of file '\.csv'.*\.jsonl or \.parquet"):
        read_rows(tmp_path / "rows.csv")


def test_parquet_is_read_in_order_over_many_batches_and_row_groups(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=170)
    assert values(read_rows(path)) == ROWS
    assert [row.where for row in read_rows(path)][599] == f"{path} row 600"
    only = values(read_rows(path, columns={"prompt", "answer", "absent"}))
    assert only == [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]


def test_parquet_with_broken_text_names_the_row(tmp_path):
    text = pa.array([b"fine", b"caf\xe9", b"fine too"], pa.binary())
    array = pa.Array.from_buffers(pa.string(), 3, text.buffers())
    pq.write_table(pa.table({"prompt": array}), tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert rows[1].where.endswith("row 2")
    assert "not UTF-8" in rows[1].why


def test_a_truncated_parquet_file_is_the_users_error(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="broken Parquet"):
        list(read_rows(path))


def test_a_corrupt_page_says_after_which_row(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=300, compression="gzip")
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start + 40 : start + 400] = bytes(360)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken Parquet after row (256|300)"):
        list(read_rows(path))


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
