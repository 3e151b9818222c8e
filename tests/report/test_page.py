"""The page as text: nothing that a model wrote is markup in it, and only its own script may run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_weave.checks.findings import Bounds, Finding
from lightning_weave.config import check_recipe
from lightning_weave.report.cases import Excerpt, Panel, Shown
from lightning_weave.report.loom import longest_that_fits
from lightning_weave.report.page import (
    AnchorPushes,
    CaseGroup,
    Fact,
    Page,
    Push,
    RunView,
    embed,
    render,
    token,
    visible,
)
from lightning_weave.report.setup import KeyValue, Model, Setup, StageRun, Trained, setup
from lightning_weave.report.tables import BenchmarkScore, PolicyRow
from lightning_weave.runs.steps import Steps

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


def hostile_setup() -> Setup:
    return Setup(
        models=[Model(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        compositions=[Trained(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 2)],
        settings={"rollout": [KeyValue(HOSTILE, HOSTILE, own=True)]},
        stages=[StageRun(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        commands=[(HOSTILE, HOSTILE)],
        recipe=HOSTILE,
    )


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
    found = setup(Steps(check_recipe(recipe)), [])
    reads = {model.role: model.reads for model in found.models if model.reads}
    assert reads == dict.fromkeys(["brief, post", "long, pre", "asked"], "system: Be brief.")
    assert [one.weights for one in found.compositions] == [
        "brief 0.333, long 0.667",
        "sums: brief 1; default: long 1",
    ]


def hostile_page() -> Page:
    shown = Shown(HOSTILE, False, HOSTILE, 9, Excerpt(HOSTILE, HOSTILE, 9))
    scores = (BenchmarkScore(HOSTILE, 1.0, 2.0), BenchmarkScore("two", 1.0, 2.0))
    return Page(
        title=HOSTILE,
        subject=HOSTILE,
        headline=HOSTILE,
        lead=HOSTILE,
        facts=[Fact(HOSTILE, HOSTILE, HOSTILE)],
        rows=[PolicyRow(HOSTILE, scores, 1.0, 2.0, -0.5, -1.0, 0.0)],
        by_tag=[PolicyRow(HOSTILE, scores, 1.0, 2.0, None)],
        results=[],
        runs=[RunView(HOSTILE, {"texts": [HOSTILE]}, pushes=[AnchorPushes(HOSTILE, [Push(HOSTILE, 1.0, 1.0)], [])],
                      notes=[HOSTILE], cost_lines=[HOSTILE], setup=hostile_setup(),
                      findings=[Finding(HOSTILE, HOSTILE, "warning", HOSTILE, bounds=Bounds(0.5, False))],
                      examples=[CaseGroup(HOSTILE, HOSTILE, [Panel("better", "b", "p", 0, HOSTILE, "", (shown,))])])],
        cases=[CaseGroup(HOSTILE, HOSTILE, [Panel("c", HOSTILE, HOSTILE, 0, HOSTILE, HOSTILE, (shown,))])],
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
