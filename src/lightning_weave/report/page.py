"""One self-contained page: it makes no network requests, and model output is always text in it, never markup.

Three safeguards: Jinja escapes everything by default; data for the script is JSON that cannot close its element; and
the page's content security policy only lets the one script run whose hash it names.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from pandas import DataFrame

from lightning_weave.checks.findings import Finding
from lightning_weave.report.cases import CaseGroup
from lightning_weave.report.figures import Figure, Hue, Hues, crowd
from lightning_weave.report.setup import Setup
from lightning_weave.report.tables import AVERAGE, MISSING, benchmarks_of, format_results, html, legend

TEMPLATES = files("lightning_weave.report") / "templates"
ESCAPES = {"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "\u2028": r"\u2028", "\u2029": r"\u2029"}


@dataclass(frozen=True)
class RunView:
    """The parts of the page about one run."""

    name: str
    loom: dict[str, Any] | None = None
    agreement: DataFrame = field(default_factory=DataFrame)  # of every two anchors
    anchors: Sequence[str] = ()
    pushes: DataFrame = field(default_factory=DataFrame)
    anchor_figures: Sequence[Figure] = ()
    training_and_cost: Sequence[Figure] = ()
    cost_lines: Sequence[str] = ()
    notes: Sequence[str] = ()  # what is missing, and the command that computes it
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
    runs: Sequence[RunView]
    facts: Sequence[tuple[str, str, str]] = ()  # name, value, note
    results: DataFrame = field(default_factory=DataFrame)
    figures: Sequence[Figure] = ()
    cases: Sequence[CaseGroup] = ()
    by_tag: DataFrame = field(default_factory=DataFrame)  # its parts are tags, not benchmarks
    notes: Sequence[str] = ()
    footer: Sequence[str] = ()
    hues: Hues = field(default_factory=dict)


def render(page: Page) -> str:
    """Write the page as one HTML file."""

    def read(name: str) -> str:
        return (TEMPLATES / name).read_text(encoding="utf-8")

    def hue(policy: str) -> str:
        return page.hues.get(policy, Hue("grey")).css

    results = tagged = Markup("")
    benchmarks = [] if page.results.empty else benchmarks_of(page.results)
    if not page.results.empty:
        table = format_results(page.results)
        first = table.index.get_level_values(0)[0]
        names = [(group, policy) for group, policy in page.results.index]
        best = names.index((first, page.subject)) if (first, page.subject) in names else None
        count = 2 * len(benchmarks)  # the averages and tasks come first, then each of several benchmarks
        order = [*range(count, len(table.columns)), *(range(count) if len(benchmarks) > 1 else ())]
        table = table.iloc[:, order]
        if len(benchmarks) == 1:
            table = table.rename(columns={AVERAGE: benchmarks[0]}, level=0)
        results = html(table, "Table of results", "results", hue, best)
    if not page.by_tag.empty:
        table = format_results(page.by_tag)
        tagged = html(table.drop(columns=AVERAGE, level=0).droplevel(0), "Results by tag", "tags", hue)
    environment = Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "embed": embed,
        "visible": visible,
        "token": token,
        "percent": lambda value: MISSING if math.isnan(value) else f"{100 * value:.0f} %",
        "signed": lambda value: MISSING if math.isnan(value) else f"{value:+.2f}".replace("-", "−"),
        "svg": Markup,  # our own drawing; matplotlib escaped the names in it
    }
    script = read("loom.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    largest = 0 if page.results.empty else page.results.groupby(level="group").size().max()
    text = environment.get_template("page.html.j2").render(
        page=page,
        results=results,
        tagged=tagged,
        wide=len(benchmarks) > 1,
        crowd=round(crowd(largest), 2),
        hue=hue,
        table=html,
        legend="" if page.results.empty else legend(page.results).replace("#Tok.", "Tokens"),  # as on the page
        style=Markup(read("page.css")),
        script=Markup(script),
        script_hash=Markup(f"'sha256-{digest}'"),
    )
    return visible(text)


def embed(value: Any) -> Markup:
    """Write JSON that can neither close its element nor open a comment.

    >>> print(embed("</script><!--"))
    "\\u003c/script\\u003e\\u003c!--"
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup("".join(ESCAPES.get(char, char) for char in text))


def visible(text: str) -> str:
    """Replace what is not shown as it is: control characters, changes of direction, and unpaired surrogates.

    >>> visible("a\\x1b[31m\\u202eb\\n")
    'a␛[31m�b\\n'
    """
    text = text.replace("\r\n", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda hit: chr(0x2400 + ord(hit[0])) if hit[0] < " " else "␡", text)
    return re.sub(r"[\x80-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)


def token(text: str) -> str:
    """Make the spaces and line breaks of a token visible."""
    return visible(text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥"))
