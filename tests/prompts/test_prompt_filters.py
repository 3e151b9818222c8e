"""Normal form, duplicates, the draw, and the report."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_weave.config import Prompts
from lightning_weave.prompts.build import PromptReport, duplicate_key, read_questions, take_by_seed
from lightning_weave.prompts.decontaminate import Overlap, normalise, words
from lightning_weave.prompts.sources import Question
from lightning_weave.store.tables import BadRow


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find  x.", "find X"),
        ("What is\n$a+b$?", "what is a + b"),
        ("“Let” us – go", '"Let" us - go'),
        ("ﬁnd １２ cafés", "find 12 cafe\u0301s"),
        ("Find m+n.", "Find m + n!".removesuffix("!")),
        ("STRASSE", "straße"),
    ],
)
def test_form_does_not_count(one, other):
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Compute 3-2", "Compute 3+2"),
        ("Compute 9!", "Compute 9"),
        ("Compute 10²", "Compute 102"),
        ("Compute 3½", "Compute 31/2"),
        ("The mean of 1.5", "The mean of 1, 5"),
        ("Compute 2*(3+4)", "Compute (2*3)+4"),
        ("x_1", "x1"),
        ("a₁ + b", "a1 + b"),
        ("?", "!?"),
        ("Is 3 < 4", "Is 3 > 4"),
    ],
)
def test_meaning_counts(one, other):
    assert normalise(one) != normalise(other)


@settings(deadline=None)
@given(st.text())
def test_the_normal_form_is_its_own_normal_form(text):
    assert words(" ".join(words(text))) == words(text)


@pytest.mark.parametrize(("dedup", "kept"), [("none", [0, 1, 2, 3, 4]), ("exact", [0, 1, 3]), ("normalised", [0, 3])])
def test_duplicates_keep_the_first(jsonl, dedup, kept):
    starters = [("Find x.", ""), ("find  X", ""), ("Find x.", ""), ("Find x.", "pass"), ("Find x.", "pass")]
    path = jsonl([{"prompt": text, "starter_code": starter} for text, starter in starters])
    section, report = Prompts(source=str(path), dedup=dedup, format="livecodebench"), PromptReport()
    questions = list(read_questions(section, (), report))
    assert [question.where for question in questions] == [f"{path}:{number + 1}" for number in kept]
    assert report.duplicates == 5 - len(kept)


def test_the_duplicate_key_sees_roles_starters_and_columns():
    one = Question("a", [{"role": "user", "content": "Find x."}])
    others = [
        Question("a", [{"role": "system", "content": "Find x."}]),
        Question("a", one.messages, starter="pass"),
        Question("a", one.messages, columns={"unit": "km"}),
    ]
    assert len({duplicate_key(question, "normalised", {"unit"}) for question in [one, *others]}) == 4
    assert duplicate_key(one, "exact", ()) == duplicate_key(Question("b", one.messages, "7", "id"), "exact", ())
    assert duplicate_key(one, "exact", ()) == duplicate_key(others[-1], "exact", ()), (
        "only what the prompt shows counts"
    )


def test_the_draw_is_by_seed_alone_and_grows():
    keys = [f"p{n}" for n in range(200)]
    drawn = take_by_seed(keys, str, 50, seed=42)
    assert drawn[:4] == ["p2", "p64", "p157", "p142"]  # for good: runs are resumed years later
    assert take_by_seed(keys[::-1], str, 50, seed=42) == drawn
    assert take_by_seed(keys, str, 80, seed=42)[:50] == drawn
    assert set(take_by_seed(keys, str, 50, seed=43)) != set(drawn)
    assert take_by_seed(keys, str, None, seed=42) == keys
    assert sorted(take_by_seed(keys, str, 500, seed=42)) == sorted(keys)


def test_the_draw_does_not_hang_on_pythons_hash():
    script = (
        "from lightning_weave.prompts.build import take_by_seed\n"
        "print(take_by_seed([f'p{n}' for n in range(200)], str, 5, seed=1))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


def test_the_draw_is_even():
    counts = [0] * 40
    for seed in range(500):
        for n in take_by_seed(range(40), str, 10, seed):
            counts[n] += 1
    expected = 500 * 10 / 40
    assert sum((count - expected) ** 2 / expected for count in counts) < 72  # chi-square, 39 degrees, p = 0.001


def test_the_report_tells_what_happened_and_nothing_else():
    report = PromptReport(
        read=12,
        bad=[BadRow(f"a.jsonl:{n}", "empty") for n in range(7)],
        overlaps=[
            Overlap("a.jsonl:9", "b.jsonl:1", 0.914, same=False),
            Overlap("a.jsonl:8", "b.jsonl:2", 1.0, same=True),
        ],
        too_long=1,
        kept=2,
        notes=["mind this"],
    )
    assert str(report).splitlines() == [
        "2 prompts from 12 rows",
        "  7 cannot be used:",
        *(f"    a.jsonl:{n}: empty" for n in range(5)),
        "    and 2 more",
        "  2 overlap with a benchmark:",
        "    a.jsonl:9: shares 91% with b.jsonl:1",
        "    a.jsonl:8: same as b.jsonl:2",
        "  1 too long",
        "  note: mind this",
    ]
    dumped = json.loads(json.dumps(asdict(report)))
    assert len(dumped["bad"]) == 7
    assert dumped["overlaps"][0] == {"where": "a.jsonl:9", "problem": "b.jsonl:1", "share": 0.914, "same": False}
