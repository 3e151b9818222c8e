"""The loom in a real browser: its numbers are those of `lightning_weave.maths`, and hostile text stays text."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pandas import DataFrame, Index
from tokenizers import Tokenizer, decoders, models

from lightning_weave.cache.block import Block
from lightning_weave.maths import compose_shifts, expected_kl, tilted_target, with_other
from lightning_weave.report.page import Page, RunView, render
from lightning_weave.report.survey import Vocabulary, pack, pack_forecasts
from lightning_weave.stages.forecast import ForecastPoint
from report.chromium import Opened, browsing, needs_chromium, open_page
from rows import decisions_block

pytestmark = [pytest.mark.slow, needs_chromium]

HOSTILE = [
    "<script>window.pwned=1</script>",
    '<img src=x onerror="window.pwned=2">',
    "</textarea>",
    "</script>",
    "\u2028",
    "\u202eevil",
    "<!--",
]
WORDS = [*HOSTILE, "7", " the", "\n", "+", " wait", "done", "x", "=", "1", "0", " so"]
POSITIONS, CANDIDATES = 30, 5
SILENT = [8, 15]


def view(seed: int) -> Block:
    """Random decisions, some masked for either anchor, one whose candidates hold all but 1e-12 of the mass.

    One anchor is silent at two of them, at one of these both are.
    """
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(len(WORDS))[:CANDIDATES] for _ in range(POSITIONS)]).astype(np.int32)
    logits = 2 * rng.normal(size=(POSITIONS, CANDIDATES + 1))
    logits[3, -1] = -28.0
    logp = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    mapped = rng.random((2, POSITIONS, CANDIDATES)) < 0.96
    mapped[0, 15] = mapped[1, SILENT] = False
    rest = rng.integers(0, len(WORDS), POSITIONS - len(HOSTILE))
    return decisions_block(
        np.concatenate([np.arange(len(HOSTILE)), rest]).astype(np.int32),
        ids,
        logp,
        mapped,
        r_KPC=np.where(mapped, 2 * rng.normal(size=mapped.shape), 0).astype(np.float32),
        valid_KP=mapped.all(axis=2) | ~mapped.any(axis=2),
    )


VIEWS = [view(1), view(2)]
TRAINED = (np.log(np.full((POSITIONS, CANDIDATES), 0.125, np.float32)), np.full(POSITIONS, 0.625, np.float32))
CLIPPED, GATED, SILENCED = (np.isin(np.arange(POSITIONS), places) for places in ([6, 9, 20], [9, 11], SILENT))
GET_IN = "one = document.createElement('script'); one.textContent = 'window.pwned = 3'; document.body.append(one)"


def forecast_point(
    policy: str, weights: dict[str, float], alpha: float, accuracy: float, tokens: float
) -> ForecastPoint:
    intervals = accuracy - 5, accuracy + 4, tokens, tokens - 10, tokens + 12
    return ForecastPoint(policy, weights, alpha, accuracy, *intervals, 0.5, 0.3, 0.7, 0.1, 40 * alpha, alpha >= 1, True)


FORECASTS = [
    forecast_point("acc-only", {"acc": 1.0}, 2.0, 90, 120),
    forecast_point("brief-only", {"brief": 1.0}, 2.0, 60, 40),
    forecast_point("both", {"acc": 0.5, "brief": 0.5}, 2.0, 80, 80),
    forecast_point("both-alpha-0.5", {"acc": 0.5, "brief": 0.5}, 0.5, 85, 60),
    forecast_point("by-tag", {"code": {"acc": 1.0}}, 2.0, 50, 50),  # no slider reaches it
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as started:
        yield started


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    rules = {"acc": {"clip = 2": [CLIPPED] * 2}, "brief": {"only_above = 0.1": [GATED] * 2}}
    rules["brief"]["where = { first = 8 }"] = [SILENCED] * 2
    shared = {"prompt": HOSTILE[1] + HOSTILE[2], "finish": "stop", "shown": POSITIONS}
    threads = [{"name": f"{HOSTILE[0]}, {n}", "tokens": POSITIONS + 60 * n, **shared} for n in range(len(VIEWS))]
    settings = [
        {"name": "acc-only", "policy": "acc-only", "weights": [1.0, 0.0], "alpha": 2.00000001},
        {"name": "both", "policy": "both", "weights": [0.5, 0.5], "alpha": 2.0},
    ]
    loom = pack(threads, VIEWS, Vocabulary.from_tokenizer(tokenizer, []), {"both": [TRAINED] * 2}, rules)
    loom |= {"settings": settings, "start": "both", "forecasts": pack_forecasts(FORECASTS, ["acc", "brief"])}
    realised = DataFrame({"both": ["72%", "as forecast"]}, Index(["all", HOSTILE[0]], name="KL to the target closed"))
    run = RunView("r", loom=loom, realised=realised, realised_lines=[HOSTILE[1]])
    page = Page("t", "both", "weaves.", "", [run])
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(render(page), encoding="utf-8")
    return path


def expected(one: Block, weights: list[float], alpha: float) -> tuple[torch.Tensor, ...]:
    """What the maths says of every decision: behaviour, target, KL and whether it is kept."""
    r_NC, valid_N = compose_shifts(torch.tensor(one.r_KPC).double(), torch.tensor(one.valid_KP), weights)
    log_b_NO = with_other(
        torch.tensor(one.candidates.logp.flat).double(), torch.tensor(one.candidates.other_logp.flat).double()
    )
    log_q_NO = tilted_target(log_b_NO, r_NC, alpha)
    valid_N &= torch.tensor(one.kept(weights) if any(weights) else np.ones(POSITIONS, np.bool_))
    return log_b_NO.exp(), log_q_NO.exp(), expected_kl(log_q_NO, log_b_NO), valid_N


def column(opened: Opened, kind: str) -> list[float]:
    texts = opened.page.locator(f".decision td.{kind}").all_inner_texts()
    return [float(text) / 100 for text in texts]


def slide(page: Any, name: str, value: str) -> None:
    """Move a slider, and let the page draw the frame for which it has planned to weave anew."""
    page.locator(f"input[data-name={name}]").fill(value)
    page.evaluate("new Promise(requestAnimationFrame)")


def check_screen(opened: Opened, one: Block, weights: list[float], alpha: float) -> None:
    """Compare the readout and a few decisions with the maths."""
    b_NO, q_NO, kl_N, valid_N = expected(one, weights, alpha)
    shown = float(opened.page.locator(".mean-kl").inner_text())
    assert shown == pytest.approx(kl_N[valid_N].mean().item(), abs=1e-4)
    assert opened.page.locator(".kept").inner_text() == f"{int(valid_N.sum())} of {POSITIONS}"
    everything = [expected(other, weights, alpha) for other in VIEWS]
    overall = torch.cat([kl[valid] for _, _, kl, valid in everything]).mean().item()
    assert float(opened.page.locator(".all-kl").inner_text()) == pytest.approx(overall, abs=1e-4)
    for place in (0, 3, 8, 15, 20):
        opened.page.locator(".weave .t").nth(place).click()
        assert column(opened, "p") == pytest.approx(b_NO[place].tolist(), abs=1e-4)
        if valid_N[place]:
            assert column(opened, "q") == pytest.approx(q_NO[place].tolist(), abs=1e-4)
            badge = opened.page.locator(".badges .kl").inner_text()
            assert float(badge.split()[1]) == pytest.approx(kl_N[place].item(), abs=1e-4)
        else:
            assert opened.page.locator(".decision td.q").first.inner_text() == "–"
    most = [float(text.split()[-1]) for text in opened.page.locator(".changed button").all_inner_texts()]
    assert most == pytest.approx(sorted(kl_N[valid_N].tolist(), reverse=True)[: len(most)], abs=1e-4)


def test_numbers_on_screen_are_those_of_the_maths(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        page, one = opened.page, VIEWS[0]
        check_screen(opened, one, [0.5, 0.5], 2.0)
        assert column(opened, "s") == pytest.approx([0.125] * CANDIDATES + [0.375], abs=1e-4)
        slide(page, "brief", "0.2")  # the sum stays 1
        check_screen(opened, one, [0.8, 0.2], 2.0)
        slide(page, "alpha", "-1")
        check_screen(opened, one, [0.8, 0.2], 0.5)
        slide(page, "brief", "0")  # weight 0 takes no part in the mask
        check_screen(opened, one, [1.0, 0.0], 0.5)
        page.get_by_label("keep the sum").uncheck()
        slide(page, "acc", "0")
        check_screen(opened, one, [0.0, 0.0], 0.5)
        assert page.locator("select.setting option").first.text_content() == "acc-only · 1 acc, alpha 2"
        page.locator("select.setting").select_option("acc-only")
        page.get_by_label("next trajectory").click()
        check_screen(opened, VIEWS[1], [1.0, 0.0], 2.0)
        assert opened.complaints == []


def test_sliders_move_the_forecast_with_its_interval(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        page = opened.page
        line, mark = page.locator(".forecast-line"), page.locator(".forecast .here")
        assert page.locator(".forecast .hollow").count() == 4
        assert page.locator(".forecast .untrusted").count() == 1
        assert line.inner_text() == "80.0 [75.0, 84.0] % in 80.0 [70.0, 92.0] tokens"
        middle = float(mark.get_attribute("cx"))
        slide(page, "brief", "0")
        assert line.inner_text() == "90.0 [85.0, 94.0] % in 120.0 [110.0, 132.0] tokens"
        assert float(mark.get_attribute("cx")) > middle
        bars = page.locator(".forecast .bar")
        assert float(bars.nth(0).get_attribute("x1")) < float(mark.get_attribute("cx"))
        assert float(bars.nth(1).get_attribute("y1")) > float(mark.get_attribute("cy"))
        slide(page, "brief", "0.25")  # between two of them
        accuracy, tokens = (float(part.split()[0]) for part in line.inner_text().split("% in "))
        assert 80 < accuracy < 90
        assert 80 < tokens < 120
        slide(page, "brief", "0.5")
        slide(page, "alpha", "-1")
        assert line.inner_text() == "85.0 [80.0, 89.0] % in 60.0 [50.0, 72.0] tokens (not trusted)"
        slide(page, "brief", "0")
        slide(page, "alpha", "-3")  # far from all of them
        assert line.inner_text() == "no forecast near these weights"
        assert not mark.is_visible()
        assert "alpha = 0.125" in page.locator("pre.composition").inner_text()
        assert page.locator("#realised-1 td").all_inner_texts() == ["72%", "as forecast"]
        assert opened.complaints == []


def test_a_slider_recolours_the_text(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        colours = "[...document.querySelectorAll('.weave .t')].map((token) => token.style.backgroundColor)"
        before = opened.page.evaluate(colours)
        slider = opened.page.locator("input[data-name=alpha]")
        slider.focus()
        opened.page.keyboard.press("ArrowLeft")
        opened.page.wait_for_function(f"({colours})[20] !== {before[20]!r}")
        after = opened.page.evaluate(colours)
        _, _, _, valid_N = expected(VIEWS[0], [0.5, 0.5], 2.0)
        assert [bool(colour) for colour in after] == valid_N.tolist()


def test_conflicts_are_marked_where_the_anchors_pull_apart(browser: Any, page_path: Path) -> None:
    one = VIEWS[0]
    log_b_NO = with_other(torch.tensor(one.candidates.logp.flat), torch.tensor(one.candidates.other_logp.flat))
    b_NO = torch.softmax(log_b_NO.double(), dim=-1).numpy()
    marks = []
    for p in range(POSITIONS):
        ids = one.candidates.ids.flat[p].tolist()
        place = ids.index(one.sampled_P[p]) if one.sampled_P[p] in ids else CANDIDATES
        shifts = [[*one.r_KPC[k, p].tolist(), 0.0] for k in range(2)]
        sizes = [shift[place] - float(np.dot(b_NO[p], shift)) for shift in shifts]
        decided = one.valid_KP[:, p].all() and min(map(abs, sizes)) >= 0.05
        marks.append("" if not decided else "agree" if sizes[0] * sizes[1] > 0 else "conflict")
    assert {"agree", "conflict"} <= set(marks)
    with open_page(browser, page_path) as opened:
        classes = opened.page.evaluate("[...document.querySelectorAll('.weave .t')].map((token) => token.className)")
    found = ["agree" if "agree" in name else "conflict" if "conflict" in name else "" for name in classes]
    assert found == marks


def test_decisions_that_a_rule_changes_are_marked_and_say_which(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        page = opened.page
        marked = "[...document.querySelectorAll('.weave .t')].map((token) => token.classList.contains('ruled'))"
        assert page.evaluate(marked) == (CLIPPED | GATED | SILENCED).tolist()
        assert page.locator("output.ruled").inner_text() == f"6 of {POSITIONS}"
        page.locator(".weave .t").nth(8).click()
        assert page.locator(".badges .ruled").all_inner_texts() == ["brief: silenced by where = { first = 8 }"]
        page.locator(".weave .t").nth(9).click()
        said = page.locator(".badges .ruled").all_inner_texts()
        what = ["changed" if valid else "masked" for valid in VIEWS[0].valid_KP[:, 9]]
        assert said == [f"acc: {what[0]} by clip = 2", f"brief: {what[1]} by only_above = 0.1"]
        page.locator("select.setting").select_option("acc-only")  # the rules of an anchor without weight do nothing
        assert page.evaluate(marked) == CLIPPED.tolist()


def test_hostile_tokens_are_text_and_nothing_is_fetched(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        page = opened.page
        tokens = page.locator(".weave .t")
        assert [tokens.nth(n).evaluate("one => one.textContent") for n in range(4)] == HOSTILE[:4]
        for n in range(len(HOSTILE)):
            tokens.nth(n).click()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img, iframe, textarea").count() == 0
        assert HOSTILE[1] in page.locator(".prompt pre").inner_text()
        page.evaluate(f"() => {{ let {GET_IN} }}")
        assert page.evaluate("window.pwned") is None  # even a script that did get in may not run
        assert opened.requests == [page_path.as_uri()]
        assert [line for line in opened.complaints if "Content Security Policy" not in line] == []


def test_keys_move_from_token_to_token(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        page = opened.page
        page.locator(".weave .t").nth(9).click()
        page.locator(".weave").focus()
        title = page.locator(".decision h3")
        for key, place in (
            ("ArrowRight", 11),
            ("ArrowLeft", 10),
            ("Home", 1),
            ("End", POSITIONS),
            ("ArrowRight", POSITIONS),
        ):
            page.keyboard.press(key)
            assert title.inner_text().startswith(f"Decision {place} of")
        assert page.locator(".weave .t[aria-selected=true]").count() == 1
        page.keyboard.press("ArrowUp")
        box, last = (page.locator(f".weave .t{part}").last.bounding_box() for part in ("[aria-selected=true]", ""))
        assert box["y"] < last["y"]


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out(browser: Any, page_path: Path, width: int, scheme: str) -> None:
    with open_page(browser, page_path, width, scheme) as opened:
        assert opened.overflow() <= 0
        assert opened.complaints == []


def test_the_sliders_give_the_lines_of_a_recipe(browser: Any, page_path: Path) -> None:
    with open_page(browser, page_path) as opened:
        lines = opened.page.locator("pre.composition")
        assert tomllib.loads(lines.inner_text())["compositions"]["NAME"] == {
            "weights": {"acc": 0.5, "brief": 0.5},
            "alpha": 2.0,
        }
        opened.page.locator(".sum input").uncheck()
        opened.page.locator("input[data-name=acc]").fill("0.25")
        composition = tomllib.loads(lines.inner_text())["compositions"]["NAME"]
        assert (composition["weights"], composition["normalize"]) == ({"acc": 0.25, "brief": 0.5}, False)
        opened.page.locator("button.copy").click()
        assert opened.page.locator("button.copy").inner_text() == "Copied"
        assert opened.page.evaluate("getSelection().toString()").strip() == lines.inner_text().strip()
