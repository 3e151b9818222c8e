"""Rows of every kind of file; what cannot be read is named."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_weave.errors import InputError
from lightning_weave.store.tables import BadRow, Row, checked_rows, reference_answer, table_rows

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "tests": "x" * n} for n in range(600)]


def values(rows: Iterable[Row | BadRow]) -> list[dict[str, Any]]:
    return [row.values for row in rows if isinstance(row, Row)]


def test_jsonl_names_every_broken_line_and_keeps_the_others(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"prompt": "one"}',
        b'{"prompt": "caf\xe9"}',
        b"",
        b'{"prompt": "two"',
        b'["prompt"]',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        '{"prompt": "\u2028 drei"}'.encode(),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = list(table_rows(path))
    assert [row.where for row in rows] == [f"{path}:{n}" for n in (1, 2, 4, 5, 6, 7, 8)]
    assert values(rows) == [{"prompt": "one"}, {"prompt": "\u2028 drei"}]
    whys = [row.why for row in rows if isinstance(row, BadRow)]
    assert whys[0] == "not UTF-8 (0xe9 at byte 16)"
    assert whys[1] == "not JSON (Expecting ',' delimiter at character 17)"
    assert whys[2] == "not a JSON object but a list"
    assert all(why.startswith("not readable as JSON") for why in whys[3:])
    assert len(whys) == 5


def test_a_file_without_one_readable_line_is_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'[\n{"prompt": 1},\n]\n')
    with pytest.raises(InputError, match=re.escape(f"{path}:1") + ".*one JSON object per line"):
        list(table_rows(path))


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nhello\n")
    with pytest.raises(InputError, match=r"unknown kind of file '\.csv'.*\.jsonl or \.parquet"):
        table_rows(tmp_path / "rows.csv")


def test_parquet_is_read_in_order_over_many_batches_and_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=170)
    assert values(table_rows(path)) == ROWS
    assert [row.where for row in table_rows(path)][599] == f"{path} row 600"
    only = values(table_rows(path, columns={"prompt", "answer", "absent"}))
    assert only == [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]


def test_parquet_with_broken_text_names_the_row(tmp_path: Path) -> None:
    text = pa.array([b"fine", b"caf\xe9", b"fine too"], pa.binary())
    array = pa.Array.from_buffers(pa.string(), 3, text.buffers())
    pq.write_table(pa.table({"prompt": array}), tmp_path / "rows.parquet")
    rows = list(table_rows(tmp_path / "rows.parquet"))
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert rows[1].where.endswith("row 2")
    assert "not UTF-8" in rows[1].why


def test_a_truncated_parquet_file_is_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="broken Parquet"):
        list(table_rows(path))


def test_a_corrupt_page_says_after_which_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=300, compression="gzip")
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start + 40 : start + 400] = bytes(360)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken Parquet after row (256|300)"):
        list(table_rows(path))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_json_file_is_a_list_of_objects_or_has_one_per_line(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "rows.json"
    for text in (json.dumps(ROWS[:3], indent=1), "".join(json.dumps(row) + "\n" for row in ROWS[:3])):
        path.write_text(mark + text, encoding="utf-8")
        assert values(table_rows(path)) == ROWS[:3]
    path.write_text(f"{mark}[{json.dumps(ROWS[0])}, 7]", encoding="utf-8")
    assert list(table_rows(path)) == [Row(f"{path}[0]", ROWS[0]), BadRow(f"{path}[1]", "not a JSON object but a int")]


def test_a_broken_list_and_a_missing_file_are_the_users_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"prompt": 1},')
    with pytest.raises(InputError, match=r"rows\.json: not JSON \(Expecting value at character 16\)"):
        list(table_rows(path))
    for missing in ("rows.jsonl", "rows"):
        with pytest.raises(InputError, match=f"{missing}: cannot be read \\(No such file or directory\\)"):
            list(table_rows(tmp_path / missing))


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "rows.jsonl:2: not JSON"),
        ("rows.json", b'[{"a": 1}, []]', r"rows.json\[1\]: not a JSON object but a list"),
    ],
)
def test_a_bad_row_is_an_error_where_every_row_counts(tmp_path: Path, name: str, content: bytes, where: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=where + ".*Fix or remove this row"):
        list(checked_rows(tmp_path / name))


@pytest.mark.parametrize("value", [None, True, "", " ", [], [None], {"is": 4}, [{"is": 4}], '[""]'])
def test_what_is_neither_a_number_nor_text_is_no_answer(value: object) -> None:
    assert reference_answer(value) is None
