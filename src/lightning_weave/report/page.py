"""One self-contained page: it makes no network requests, and model output is always text in it, never markup.

Three safeguards: Jinja escapes everything by default; data for the script is JSON that cannot close its element; and
the page's content security policy only lets the one script run whose hash it names.
"""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lightning_weave.checks.findings import Finding
from lightning_weave.report.cases import Panel
from lightning_weave.report.colours import Hue, Hues
from lightning_weave.report.figures import crowd
from lightning_weave.report.setup import Setup
from lightning_weave.report.tables import MISSING, Cell, PolicyRow, cells
from lightning_weave.report.tables import legend as table_legend

TEMPLATES = files("lightning_weave.report") / "templates"
ESCAPES = {"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "\u2028": r"\u2028", "\u2029": r"\u2029"}


@dataclass(frozen=True)
class Figure:
    """A drawing with its text: `alt` describes it to readers who cannot see it."""

    name: str
    svg: str
    title: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Fact:
    """One number in the header."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Push:
    """A token that an anchor makes more or less likely."""

    text: str
    amount: float
    share: float  # of the largest in its list


@dataclass(frozen=True)
class AnchorPushes:
    """The tokens that one anchor pushes up and down most."""

    anchor: str
    up: Sequence[Push]
    down: Sequence[Push]


@dataclass(frozen=True)
class PairView:
    """The agreement of two anchors."""

    one: str
    two: str
    decisions: int
    sampled: float
    top: float
    correlation: float


@dataclass(frozen=True)
class CaseGroup:
    """A rule for choosing samples, and the panels that it chose."""

    name: str
    rule: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class RunView:
    """The parts of the page about one run."""

    name: str
    loom: dict[str, Any] | None = None
    pairs: Sequence[PairView] = ()
    pushes: Sequence[AnchorPushes] = ()
    anchor_figures: Sequence[Figure] = ()
    training_and_cost: Sequence[Figure] = ()
    cost_lines: Sequence[str] = ()
    notes: Sequence[str] = ()  # what is missing, and the command that makes it
    setup: Setup | None = None
    findings: Sequence[Finding] = ()
    examples: Sequence[CaseGroup] = ()  # by policy


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    title: str
    subject: str  # of the headline: a policy
    headline: str
    lead: str
    facts: Sequence[Fact]
    rows: Sequence[PolicyRow]
    results: Sequence[Figure]
    runs: Sequence[RunView]
    cases: Sequence[CaseGroup] = ()
    by_tag: Sequence[PolicyRow] = ()  # their scores are of tags, not of benchmarks
    notes: Sequence[str] = ()
    footer: Sequence[str] = field(default_factory=list)
    hues: Hues = field(default_factory=dict)


def render(page: Page) -> str:
    """Write the page as one HTML file."""
    script = _read("loom.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            lines=list(zip(page.rows, cells(page.rows), strict=True)) if page.rows else [],
            tagged=list(zip(page.by_tag, cells(page.by_tag), strict=True)) if page.by_tag else [],
            wide=bool(page.rows) and len(page.rows[0].scores) > 1,
            tasks=page.rows[0].tasks if page.rows else (),
            crowd=round(crowd(max(Counter(row.group for row in page.rows).values(), default=0)), 2),
            hue=lambda policy: page.hues.get(policy, Hue("grey")).css,
            legend=table_legend(page.rows).replace("#Tok.", "Tokens"),  # as its columns are called
            style=Markup(_read("page.css")),
            script=Markup(script),
            script_hash=Markup(f"'sha256-{digest}'"),
        )
    )


def embed(value: Any) -> Markup:
    """Write JSON that can neither close its element nor open a comment.

    >>> print(embed("</script><!--"))
    "\\u003c/script\\u003e\\u003c!--"
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup("".join(ESCAPES.get(char, char) for char in text))


def visible(text: str) -> str:
    """Replace control characters by symbols for them, and unpaired surrogates, which UTF-8 cannot encode."""
    text = text.replace("\r\n", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda hit: chr(0x2400 + ord(hit[0])) if hit[0] < " " else "␡", text)
    return re.sub(r"[\ud800-\udfff]", "\ufffd", text)


def token(text: str) -> str:
    """Make the spaces and line breaks of a token visible."""
    return visible(text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥"))


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = {
        "embed": embed,
        "visible": visible,
        "token": token,
        "percent": lambda value: MISSING if math.isnan(value) else f"{100 * value:.0f} %",
        "signed": lambda value: MISSING if math.isnan(value) else f"{value:+.2f}".replace("-", "−"),
        "mark": _mark,
        "svg": Markup,  # our own drawing; matplotlib escaped the names in it
    }
    environment.filters |= filters
    return environment


def _mark(cell: Cell) -> Markup:
    tag = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}[cell.mark]
    return Markup(tag).format(cell.text.replace("-", "−"))


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
