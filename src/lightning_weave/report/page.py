"""One self-contained page: it makes no network requests, and model output is always text in it, never markup.

First what a run was: models, compositions, hyperparameters, dates, versions and commands. Then the page.

Three safeguards: Jinja escapes everything by default; data for the script is JSON that cannot close its element; and
the page's content security policy only lets the one script run whose hash it names.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from pandas import DataFrame

from lightning_weave.cache.budgets import AnchorShare
from lightning_weave.checks.findings import Finding
from lightning_weave.config import PromptContext, dump_recipe
from lightning_weave.config.fields import is_execution
from lightning_weave.errors import InputError
from lightning_weave.progress import duration
from lightning_weave.report import tables
from lightning_weave.report.cases import CaseGroup, excerpt
from lightning_weave.report.figures import Figure, Hue, Hues, crowd
from lightning_weave.report.tables import AVERAGE, MISSING
from lightning_weave.run import ROLES, Run

TEMPLATES = files("lightning_weave.report") / "templates"
ESCAPES = {"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "\u2028": r"\u2028", "\u2029": r"\u2029"}

SECTIONS = ("prompts", "engine", "rollout", "reference", "score", "train", "eval")
ELSEWHERE = {"objective", "benchmarks", "sources"}  # by composition, and in the table of results


@dataclass(frozen=True)
class RunView:
    """The parts of the page about one run."""

    name: str
    facts: Sequence[tuple[str, str, str]] = ()  # in the header: name, value, note
    loom: dict[str, Any] | None = None
    agreement: DataFrame = field(default_factory=DataFrame)  # of every two anchors
    anchors: Sequence[str] = ()
    pushes: DataFrame = field(default_factory=DataFrame)
    anchor_figures: Sequence[Figure] = ()
    steps: DataFrame = field(default_factory=DataFrame)  # between effort levels
    realised: DataFrame = field(default_factory=DataFrame)  # of the targets, by policy
    realised_lines: Sequence[str] = ()
    training_and_cost: Sequence[Figure] = ()
    cost_lines: Sequence[str] = ()
    notes: Sequence[str] = ()  # what is missing, and the command that computes it
    setup: Mapping[str, Any] | None = None  # as `setup` collects it
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


def setup(run: Run, ledger: list[dict[str, Any]]) -> dict[str, Any]:
    """Collect what someone needs to reproduce a run, from the recipe, the ledger and the log.

    models, compositions and stages are tables; settings are by section: key, value, whether it is not the default.
    """
    settings = {}
    for section in SECTIONS:
        part = getattr(run.recipe, section)
        fields = type(part).model_fields
        left_out = ELSEWHERE | {key for key, field in fields.items() if is_execution(field)}
        defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
        # A run records the engine that "auto" chose, so whether the user set it is not known.
        chosen = {"rollout", "eval"} if section == "engine" else set()
        settings[section] = [
            (f"{section}.{key.rstrip('_')}", _value_text(value), value != defaults[key] and key not in chosen)
            for key, value in part
            if (key not in left_out or (key == "seeds" and value > 1)) and value not in (None, [], {})
        ]
    compositions = []
    for name, composition in run.recipe.written.items():
        alpha, budget = run.alpha(name), getattr(composition, "kl_budget", None)
        words = ("" if alpha is None else f"{alpha:.4g}", "" if budget is None else f"for {budget:g} nats")
        by_level = {str(slot.level): slot.weights for slot in composition.slots if slot.level}
        by_tag = composition.by_tag or by_level or {"": composition.used}
        weights = "; ".join(
            (f"{tag}: " if tag else "") + ", ".join(f"{anchor} {weight:.3g}" for anchor, weight in shares.items())
            for tag, shares in by_tag.items()
        )
        with suppress(InputError):  # not trained, or its models are gone and unknown
            if shares := run.stage("train", name).require().get("budgets", ()):
                weights += f"; dose {'; '.join(str(AnchorShare(**share)) for share in shares)}"
        row = (name, composition.method, weights, " ".join(words).strip(), run.objective(name))
        compositions.append((*row, run.recipe.train_section(name).epochs))
    stages = []  # when and on what every stage was computed
    kinds = {"time": float | int, "versions": dict, "device": str}
    whole = [row for row in ledger if all(isinstance(row.get(name), kind) for name, kind in kinds.items())]
    for stage in dict.fromkeys(row["stage"] for row in whole):
        rows = [row for row in whole if row["stage"] == stage]
        first = datetime.fromtimestamp(min(row["time"] - row["device_seconds"] for row in rows), UTC)
        last = datetime.fromtimestamp(max(row["time"] for row in rows), UTC)
        end = f"{last:{'%H:%M' if first.date() == last.date() else '%Y-%m-%d %H:%M'}}"
        versions = (", ".join(f"{name} {version}" for name, version in row["versions"].items()) for row in rows)
        seconds = sum(row["device_seconds"] for row in rows)
        devices = _distinct(row["device"] for row in rows)
        stages.append((stage, f"{first:%Y-%m-%d %H:%M} to {end}", duration(seconds), devices, _distinct(versions)))
    log = run.directory / "log.txt"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def table(rows: list[tuple[Any, ...]], *columns: str) -> DataFrame:
        return DataFrame(rows, columns=columns).set_index(columns[0])

    return {
        "models": _models(run),
        "compositions": table(compositions, "Policy", "Method", "Weights", "Alpha", "Objective", "Epochs"),
        "settings": settings,
        "stages": table(stages, "Stage", "When (UTC)", "Device time", "Device", "Versions"),
        "commands": re.findall(r"^(\S+ \S+) \$ (.*)$", text, flags=re.MULTILINE),  # time, command
        "recipe": re.sub(r"^runs = .*\n", "", dump_recipe(run.recipe), flags=re.MULTILINE),  # where, not what
    }


def _models(run: Run) -> DataFrame:
    """Every checkpoint with its role, the beginning of its content's hash, and what it reads besides the prompt."""
    recipe = run.recipe
    named = [("student", run.student, PromptContext())]
    for anchor in recipe.anchors:
        for role in ROLES:
            named.append((f"{anchor}, {role}", run.anchor(anchor, role), recipe.anchors[anchor].context(role)))
    for policy, section in recipe.policies.items():
        if section.model or section.system:
            named.append((policy, run.asked_model(policy), PromptContext(system=section.system)))
    rows = []
    for name, checkpoint, context in named:
        try:
            identity = run.identity_of(checkpoint)[:12]
        except InputError:  # it was never scored here and is not available now
            identity = ""
        reads = "; ".join(f"{part}: {text}" for part, text in context.model_dump(exclude_none=True).items())
        model = f"{checkpoint.name}@{checkpoint.revision}" if checkpoint.revision else checkpoint.name
        rows.append((name, model, identity, reads))
    table = DataFrame(rows, columns=["Role", "Model", "Content", "Context"]).set_index("Role")
    return table if table["Context"].any() else table.drop(columns="Context")


def hyperparameters(runs: Mapping[str, Run]) -> DataFrame:
    """Tabulate them as the paper does (tab. appendix-training-hyperparameters): a column for each run that differs.

    Where the compositions of a run differ, every value is given.
    """
    columns = {}
    for name, run in runs.items():
        recipe, train, rollout = run.recipe, run.recipe.train, run.recipe.rollout
        round_size = train.prompts_per_round * rollout.responses
        manifests = [run.stage("train", one).manifest() or {} for one in recipe.compositions]
        updates = [manifest["updates"] for manifest in manifests if "updates" in manifest]
        alphas = [run.alpha(one) for one in recipe.written]
        columns[name] = {
            "Replay rounds": _distinct(str(-(-count // train.updates_per_round)) for count in updates) or MISSING,
            "Cached trajectories per round": f"{round_size:,}",
            "Training epochs": _distinct(str(recipe.train_section(one).epochs) for one in recipe.written),
            "Maximum response length": f"{rollout.max_tokens:,}",
            "Rollout temperature": f"{rollout.temperature:g}",
            "Rollout top-p": "1",
            "alpha": _distinct(f"{alpha:.4g}" for alpha in alphas if alpha is not None) or MISSING,
            "Global batch size": str(round_size // train.updates_per_round),
            "Learning rate": f"{train.learning_rate:g}",
            "LR schedule": train.decay + (f", {train.warmup} updates of warm-up" if train.warmup else ""),
            "Optimizer": "AdamW",
            "Adam betas": ", ".join(f"{beta:g}" for beta in train.optimizer.betas),
            "Weight decay": f"{train.optimizer.weight_decay:g}",
            "Gradient clipping": f"{train.optimizer.clip:g}",
        }
    values = list(columns.values())
    if all(one == values[0] for one in values):
        columns = {"Value": values[0]}
    mark = next(iter(runs.values())).recipe.mark
    return DataFrame(columns).rename_axis(f"Hyperparameter ({mark})" if mark else "Hyperparameter")


def _value_text(value: Any) -> str:
    """Write a value as people read it.

    >>> _value_text(0.0005), _value_text(True), _value_text([0.9, 0.999]), _value_text("hf")
    ('0.0005', 'true', '0.9, 0.999', 'hf')
    """
    match value:
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(_value_text, value))
        case dict():
            return ", ".join(f"{key} = {_value_text(item)}" for key, item in value.items())
        case float():
            return f"{value:g}"
        case _ if hasattr(value, "model_dump"):
            return _value_text(value.model_dump(exclude_none=True))
        case _:
            return str(value)


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def render(page: Page) -> str:
    """Write the page as one HTML file."""

    def read(name: str) -> str:
        return (TEMPLATES / name).read_text(encoding="utf-8")

    def hue(policy: str) -> str:
        return page.hues.get(policy, Hue("grey")).css

    results, tagged, benchmarks = DataFrame(), DataFrame(), []
    first, largest = "", 0
    if not page.results.empty:
        benchmarks = tables.benchmarks_of(page.results)
        results = tables.format_results(page.results)
        first, largest = page.results.index[0][0], page.results.groupby(level="group").size().max()
        count = 2 * len(benchmarks)  # the averages and tasks come first, then each of several benchmarks
        results = results.iloc[:, [*range(count, results.shape[1]), *(range(count) if len(benchmarks) > 1 else ())]]
        if len(benchmarks) == 1:
            results = results.rename(columns={AVERAGE: benchmarks[0]}, level=0)
    if not page.by_tag.empty:
        tagged = tables.format_results(page.by_tag).drop(columns=AVERAGE, level=0).droplevel(0)
    environment = Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"hue": hue, "grouped_rows": tables.grouped_rows, "spans": tables.spans}
    environment.filters |= {
        "embed": embed,
        "visible": visible,
        "token": token,
        "excerpt": excerpt,
        "percent": lambda value: MISSING if math.isnan(value) else f"{100 * value:.0f} %",
        "signed": lambda value: MISSING if math.isnan(value) else f"{value:+.2f}".replace("-", "−"),
        "svg": Markup,  # our own drawing; matplotlib escaped the names in it
    }
    script = read("loom.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("page.html.j2").render(
        page=page,
        results=results,
        tagged=tagged,
        best=(first, page.subject),
        wide=len(benchmarks) > 1,
        crowd=round(crowd(largest), 2),
        legend="" if page.results.empty else tables.legend(page.results).replace("#Tok.", "Tokens"),  # as on the page
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
