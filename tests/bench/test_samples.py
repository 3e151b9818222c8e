import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lightning_weave.bench.samples import (
    Sample,
    block_path,
    blocks,
    cut_points,
    merge_blocks,
    pending_blocks,
    read_samples,
    to_line,
    write_block,
)
from lightning_weave.errors import CorruptData

SAMPLE = Sample("p1", 3, 17, 42, "stop", "so \\boxed{7}", "7", True, "equal", {16: 3})


@given(st.integers(0, 12), st.integers(1, 7), st.integers(1, 9))
def test_blocks_hold_every_pair_once_in_order(n_problems, n_samples, size):
    made = blocks(n_problems, n_samples, size)
    assert [pair for block in made for pair in block] == [(p, s) for p in range(n_problems) for s in range(n_samples)]
    assert all(len(block) == size for block in made[:-1])
    assert all(made)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))), st.none() | st.just("ä\u2028{}"))
@settings(max_examples=50)
def test_lines_round_trip(tmp_path_factory, text, answer):
    sample = replace(SAMPLE, text=text, answer=answer)
    line = to_line(sample)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    path.write_text(line, encoding="utf-8")
    assert list(read_samples(path)) == [sample]


def test_samples_without_a_word_on_the_official_runner_are_read(tmp_path):
    line = to_line(replace(SAMPLE, official="open(0)"))
    fields = {key: value for key, value in json.loads(line).items() if key != "official"}
    path = tmp_path / "samples.jsonl"
    path.write_text(line + json.dumps(fields) + "\n", encoding="utf-8")
    first, second = read_samples(path)
    assert first.official == "open(0)"
    assert second == SAMPLE


def test_files_round_trip_with_every_line_separator(tmp_path):
    texts = ["a\u2028b\u2029c\x85d\x0be\x1cf", "r\rn\r\nx", "plain", "😀"]
    write_block(tmp_path, 0, [replace(SAMPLE, text=text) for text in texts])
    assert [sample.text for sample in read_samples(block_path(tmp_path, 0))] == texts


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(to_line(SAMPLE) + to_line(SAMPLE)[:40], encoding="utf-8")
    with pytest.raises(CorruptData, match=r"samples.jsonl:2: not a sample"):
        list(read_samples(path))


def fake(pair: tuple[int, int]) -> Sample:
    problem, number = pair
    return Sample(f"p{problem}", number, 10 * problem + number, 5, "stop", f"text {pair} ä", None, False, "no answer")


def evaluate(folder: Path, die_at: int | None = None) -> None:
    made = blocks(5, 3, 4)
    for number in pending_blocks(folder / "blocks", len(made)):
        if number == die_at:  # in the middle of writing this block
            folder.joinpath("blocks").mkdir(parents=True, exist_ok=True)
            (folder / "blocks" / f".tmp-1-{number:05d}.jsonl").write_text(to_line(fake((0, 0)))[:20])
            os.kill(os.getpid(), signal.SIGKILL)
        write_block(folder / "blocks", number, map(fake, made[number]))
    merge_blocks(folder / "blocks", len(made), folder / "samples.jsonl")


def test_killed_and_resumed_is_byte_identical(tmp_path):
    evaluate(tmp_path / "whole")
    for die_at in (0, 2):
        code = "import pathlib, runpy, sys; _, file, folder, die_at = sys.argv; "
        code += "runpy.run_path(file)['evaluate'](pathlib.Path(folder), int(die_at))"
        killed = subprocess.run([sys.executable, "-c", code, __file__, tmp_path / "killed", str(die_at)])
        assert killed.returncode == -signal.SIGKILL
        assert pending_blocks(tmp_path / "killed" / "blocks", 4) == list(range(die_at, 4))
    evaluate(tmp_path / "killed")
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert (tmp_path / "killed" / "samples.jsonl").read_bytes() == whole
    assert [(s.problem, s.sample) for s in read_samples(tmp_path / "whole" / "samples.jsonl")] == [
        (f"p{problem}", number) for problem in range(5) for number in range(3)
    ]


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_budget_never_cuts_a_character_in_half():
    tokenizer = byte_tokenizer()  # one token per byte, so é and 😀 are two and four tokens
    text = "aé😀b"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 8
    cuts = cut_points(ids, tokenizer.decode, [8, 7, 6, 4, 3, 2, 1, 100])
    assert cuts == {1: 1, 2: 1, 3: 2, 4: 2, 6: 2, 7: 3}  # 8 and 100 pay for everything
    for budget, cut in cuts.items():
        assert text.encode()[:budget].decode(errors="ignore") == text[:cut]
