"""The page as text: nothing that a model wrote is markup in it, and only its own script may run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

from lightning_weave.bench.samples import Sample
from lightning_weave.checks.findings import Bounds, Finding
from lightning_weave.config import check_recipe
from lightning_weave.report.cases import CaseGroup, Panel
from lightning_weave.report.page import Page, RunView, embed, render, setup, token, visible
from lightning_weave.report.survey import longest_that_fits
from lightning_weave.run import Run
from report.evaluated import result_row, results_of

HOSTILE = '</script></textarea><!--<script>alert(1)</script><img src=x onerror="alert(2)">\u2028&lt;{{ 7*7 }}'


class Elements(HTMLParser):
    """Collect the elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def hostile_setup() -> dict[str, Any]:
    def table(*columns: str) -> DataFrame:
        return DataFrame({name: [HOSTILE] for name in columns}, index=[HOSTILE]).rename_axis("Name")

    return {
        "models": table("Model", "Content", "Context"),
        "compositions": table("Method", "Weights", "Alpha", "Objective"),
        "settings": {"rollout": [(HOSTILE, HOSTILE, True)]},
        "stages": table("When (UTC)", "Device time", "Device", "Versions"),
        "commands": [(HOSTILE, HOSTILE)],
        "recipe": HOSTILE,
    }


def test_setup_says_what_each_side_reads_and_the_weights_of_every_tag(tmp_path: Path) -> None:
    student = str(tmp_path / "nowhere")
    told = {"system": "Be brief."}
    recipe = {
        "name": "told",
        "runs": str(tmp_path),
        "student": {"model": student},
        "anchors": {
            "brief": {"model": "student", "post_prompt": told},
            "long": {"model": "student", "pre_prompt": told},
        },
        "tags": {"column": "kind"},
        "compositions": {
            "thirds": {"weights": {"brief": 1 / 3, "long": 2 / 3}},
            "routed": {"weights": {"sums": {"brief": 1.0}, "default": {"long": 1.0}}},
        },
        "policies": {"asked": {"model": student, **told}},
    }
    found = setup(Run(check_recipe(recipe)), [])
    reads = found["models"]["Context"]
    assert reads[reads != ""].to_dict() == dict.fromkeys(["brief, post", "long, pre", "asked"], "system: Be brief.")
    assert found["compositions"]["Weights"].tolist() == [
        "brief 0.333, long 0.667",
        "sums: brief 1; default: long 1",
    ]
    set_by_the_user = {key for rows in found["settings"].values() for key, _, is_set in rows if is_set}
    assert {"engine.rollout", "engine.eval"}.isdisjoint(set_by_the_user), "auto was resolved, nobody set it"


def hostile_page() -> Page:
    text = HOSTILE + "x" * 900 + HOSTILE
    shown = {HOSTILE: Sample("p", 0, 1, 9, "stop", text, HOSTILE, False, "")}
    scores = {HOSTILE: (1.0, 2.0), "two": (1.0, 2.0)}
    pushes = DataFrame({"anchor": [HOSTILE], "side": ["up"], "text": [HOSTILE], "amount": [1.0], "share": [1.0]})
    return Page(
        title=HOSTILE,
        subject=HOSTILE,
        headline=HOSTILE,
        lead=HOSTILE,
        facts=[(HOSTILE, HOSTILE, HOSTILE)],
        results=results_of(result_row(HOSTILE, scores, (1.0, 2.0, -0.5, -1.0, 0.0), group=HOSTILE)),
        by_tag=results_of(result_row(HOSTILE, scores, (1.0, 2.0))),
        runs=[RunView(HOSTILE, loom={"texts": [HOSTILE]}, anchors=[HOSTILE], pushes=pushes,
                      notes=[HOSTILE], cost_lines=[HOSTILE], setup=hostile_setup(),
                      findings=[Finding(HOSTILE, HOSTILE, "warning", HOSTILE, bounds=Bounds(0.5, False))],
                      examples=[CaseGroup(HOSTILE, HOSTILE, [Panel("better", "b", "p", 0, HOSTILE, "", shown)])])],
        cases=[CaseGroup(HOSTILE, HOSTILE, [Panel("c", HOSTILE, HOSTILE, 0, HOSTILE, HOSTILE, shown)])],
        notes=[HOSTILE],
        footer=[HOSTILE],
    )  # fmt: skip


def test_what_a_model_wrote_is_text() -> None:
    elements = Elements(render(hostile_page()))
    assert [attrs for tag, attrs in elements.tags if tag in ("img", "textarea", "iframe", "link", "object")] == []
    scripts = [attrs for tag, attrs in elements.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "loom-data-1"}, {}]
    assert not [attrs for _, attrs in elements.tags if any(name.startswith("on") for name in attrs)]
    assert elements.text.count(HOSTILE) >= 30
    assert "49" not in "".join(text for text in elements.text if "7*7" in text)


def test_data_survives_and_cannot_leave_its_element() -> None:
    page = render(hostile_page())
    data = re.search(r'<script type="application/json" id="loom-data-1">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == {"texts": [HOSTILE]}


@pytest.mark.parametrize("text", [HOSTILE, "\u2028\u2029", "<!--", "]]>", "\ud800", "\x00\x07"])
def test_embedded_text_comes_back_whole(text: str) -> None:
    written = embed([text])
    assert json.loads(written) == [text]
    assert not re.search("[<>&\u2028\u2029]", written)


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embed(float("nan"))


def test_only_the_pages_own_script_may_run_and_nothing_may_be_fetched() -> None:
    page = render(hostile_page())
    policy = next(attrs["content"] for tag, attrs in Elements(page).tags if attrs.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "innerHTML" not in page
    assert "http" not in script[1]


def test_control_characters_are_shown() -> None:
    assert visible("a\x00b\x1b[31m\r\nc\td\x7f\ud800") == "a␀b␛[31m\nc\td␡\ufffd"
    assert token(" a\n") == "·a↵"


@pytest.mark.parametrize("lengths", [[], [3], [3, 10, 10], [5] * 7, [1, 100, 2, 50]])
@pytest.mark.parametrize("room", [1, 15, 40, 1000])
def test_rows_are_cut_to_the_longest_that_fits(lengths: list[int], room: int) -> None:
    longest = longest_that_fits(lengths, room)
    held = [sum(min(length, limit) for length in lengths) for limit in range(max(lengths, default=0) + 2)]
    assert held[longest] <= room or longest <= 1
    assert longest == max(lengths, default=0) or held[longest + 1] > room


def test_control_characters_of_names_are_shown_as_symbols() -> None:
    name = "a\x1b[31m\x00\u202eb\x9b"
    page = Page(name, name, name, name, [RunView(name, notes=[name])], facts=[(name, name, name)], notes=[name])
    text = render(page)
    assert "a␛[31m␀\ufffdb\ufffd" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
