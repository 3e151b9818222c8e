"""`lweave status`: what is complete, what is missing and why, what it cost, and what to type next."""

import json as json_format
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas
from rich.console import Console
from rich.filesize import decimal as file_size
from rich.table import Table
from rich.text import Text

from lightning_weave.directory import kept_threads, size_of, with_others
from lightning_weave.errors import CorruptData, InputError, WeaveError, first_line
from lightning_weave.progress import Progress, duration
from lightning_weave.published import fetchable
from lightning_weave.report.tables import console as console_table
from lightning_weave.report.tables import cost_table, format_costs, student_names
from lightning_weave.run import ENGINES, IDENTITIES, Run, explain_missing
from lightning_weave.stages.costs import costs, read_spent, summary
from lightning_weave.store import BEGUN, MANIFEST, Stage, State, damaged_files, read_checked, read_json, read_manifest
from lightning_weave.train.schedule import complete_checkpoints, make_schedule
from lightning_weave.views.clean import unneeded_folders

CHECKED = (MANIFEST, BEGUN, IDENTITIES)  # files that contain a checksum


def verify(run: Run, progress: Progress, console: Console) -> None:
    """Check every file of every complete stage against its checksum, and whatever else commands read in a run."""
    problems: list[str] = []
    commands: dict[Path, str] = {}
    try:
        commands = {stage.folder: stage.command for stage in with_others(run).everything()}
        unneeded_folders([run])  # reads recipe.toml
        kept_threads(run)
    except WeaveError as error:
        problems.append(str(error))
    folders = sorted(path.parent for path in run.directory.rglob(MANIFEST))
    listed: set[Path] = set()
    with progress.bar("verify", len(folders), "stage") as bar:
        for folder in folders:
            # A student is trained in parts or legs below its own folder: only the whole can be trained again.
            outer = next((parent for parent in folder.parents if parent in commands), None)
            try:
                listed |= {folder / entry["file"] for entry in (read_manifest(folder) or {})["shards"]}
                for path, what in damaged_files(folder).items():
                    remove = outer or path
                    remedy = f"Remove it (rm -r {remove}), then run" if remove.exists() else "Run"
                    problems.append(f"{path} {what}. {remedy}: {commands.get(outer or folder, run.command('run'))}")
            except CorruptData as error:
                problems.append(str(error))
            bar.advance()
    for path in sorted(set(run.directory.rglob("*.json")) - listed):
        try:
            (read_checked if path.name in CHECKED else read_json)(path)
        except CorruptData as error:
            problems.append(str(error))
    if problems:
        raise CorruptData("\n".join(dict.fromkeys(problems)))
    if not folders:
        console.print(f"{run.directory}: no stage is complete yet, so there is nothing to check.", soft_wrap=True)
        return
    console.print(f"{len(listed)} files in {len(folders)} complete stages are as they were written.")


def cost(runs: Sequence[Run], console: Console, json: bool = False) -> None:
    """Print what every stage cost and what sharing the cache saves; of several runs, the paper's table."""
    runs = [with_others(run) for run in runs]
    spent = [read_spent(run.directory) for run in runs]
    for run, one in zip(runs, spent, strict=True):
        if not one.kept and not one.discarded:
            raise InputError(f"{run.directory}: nothing measured yet. Start with: {run.command('run')}")
    if len(runs) > 1:
        tables = [cost_table(run, one.kept, *student_names([[run]])) for run, one in zip(runs, spent, strict=True)]
        tables = [table for table in tables if not table.empty]
        if not tables:
            raise InputError("no composition is trained in any of these runs, so there is nothing to compare")
        table = pandas.concat(tables)
        if not json:
            console.print(console_table(format_costs(table), title="Cost of one composition, device time"))
            return
        totals = ("student", "anchors", "online", "ratio")
        columns = []
        for row in table.astype(object).where(table.notna(), None).to_dict("records"):
            parts = {key: value for key, value in row.items() if key not in (*totals, "offline")}
            columns.append({**{key: row[key] for key in totals}, "parts": parts})
        print(json_format.dumps(columns, indent=2))
        return
    kept, discarded = spent[0].kept, spent[0].discarded
    if not json:
        console.print(_cost_table(kept, "Cost"))
        if discarded:
            console.print(_cost_table(discarded, "Not counted: of other recipes, or removed since"))
        for line in summary(runs[0], kept):
            console.print(line, soft_wrap=True)
        return
    document: dict[str, Any] = {"run": str(runs[0].directory)}
    for key, rows in (("stages", kept), ("discarded", discarded)):
        by_name = costs(rows, "stage", "name").items()
        document[key] = [{"stage": it, "name": name, **asdict(one), "idle": one.idle} for (it, name), one in by_name]
        document["seconds" if rows is kept else "discarded_seconds"] = float(sum(row["device_seconds"] for row in rows))
    print(json_format.dumps({**document, "summary": summary(runs[0], kept)}, indent=2))


def _cost_table(rows: list[dict[str, Any]], title: str) -> Table:
    by_name = costs(rows, "stage", "name")
    engines = ["engine"] if any(cost.idle is not None for cost in by_name.values()) else []
    columns = ("stage", "what", "device time", "tokens", "tokens/s", "written", "peak memory", *engines)
    table = Table(*columns, title=title, box=None)
    table.columns[1].overflow = "fold"  # names are never cut off
    for (stage, name), cost in by_name.items():
        rate = f"{cost.tokens / cost.seconds:,.0f}" if cost.tokens and cost.seconds else ""
        size = file_size(cost.written) if cost.written else ""
        memory = f"{cost.peak_memory / 1e9:.2f} GB"
        cells = [stage, name, duration(cost.seconds), f"{cost.tokens:,}", rate, size, memory]
        engine = "" if cost.idle is None else f"idle {cost.idle:.0%}, start {duration(cost.starting)}"
        table.add_row(*cells, *([engine] if engines else []))
    table.add_row("total", "", duration(sum(row["device_seconds"] for row in rows)), style="bold")
    return table


@dataclass(frozen=True)
class Status:
    """The state of one stage, and its size or the reason why it is not complete."""

    path: str
    state: State
    why: str


def run(run: Run, console: Console, json: bool = False) -> list[Status]:
    """Print the state of every stage, and what the directory holds that this recipe does not need."""
    statuses = look(run)
    pending = [status for status in statuses if status.state != "complete"]
    unneeded = {path.relative_to(run.directory): size_of(path) for path in unneeded_folders([run])}
    engines = {name: getattr(run.recipe.engine, name) for name in ENGINES}
    if json:
        document = {
            "run": str(run.directory),
            "engines": engines,
            "stages": [{"stage": one.path, "state": one.state, "why": one.why} for one in statuses],
            "unneeded": {str(path): size for path, size in unneeded.items()},
            "next": run.command("run") if pending else None,
        }
        print(json_format.dumps(document, indent=2))
        return statuses
    table = Table("stage", "state", "", title=Text(str(run.directory)), title_justify="left", box=None)
    for status in statuses:
        table.add_row(status.path, status.state, Text(status.why))
    console.print(table)
    lines = []
    if "vllm" in engines.values():
        names = ", ".join(name for name, engine in engines.items() if engine == "vllm")
        lines.append(f"vLLM computes {names}, transformers the rest.")
    if unneeded:
        lines.append(f"Not needed by this recipe ({file_size(sum(unneeded.values()))}):")
        lines += [f"  {path}  {file_size(size)}" for path, size in unneeded.items()]
        lines.append(f"Show them: {run.command('report')}. Remove them: {run.command('clean')}")
    if pending:
        lines.append(f"{len(pending)} of {len(statuses)} to do, first {pending[0].path}. Next: {run.command('run')}")
    else:
        lines.append("Everything is up to date.")
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    return statuses


def overview(runs: Sequence[Run], console: Console, json: bool = False) -> None:
    """Print one line for each run: how far it is, by the last recipe of its directory."""
    lines = []
    for run in runs:
        try:
            states = Counter(status.state for status in look(run))
            stages = ", ".join(f"{count} {state}" for state, count in states.items())
        except WeaveError as error:  # a model or a file is missing, and stages cannot be named without it
            stages = first_line(error)
        last = datetime.fromtimestamp(max((path.stat().st_mtime for path in run.directory.iterdir()), default=0.0))
        about = {"run": os.path.relpath(run.directory), "student": run.recipe.student.model}
        lines.append({**about, "stages": stages, "last written": last.strftime("%Y-%m-%d %H:%M")})
    if json:
        print(json_format.dumps(lines, indent=2))
        return
    table = Table(*lines[0], box=None)
    for line in lines:
        table.add_row(*map(Text, line.values()))
    console.print(table)
    console.print("Stages of one run: lweave status RUN. Its report: lweave report RUN", markup=False, highlight=False)


def look(run: Run) -> list[Status]:
    """List every stage with its state."""
    statuses = []
    published = fetchable(run)
    for stage in run.everything():
        state = stage.state()
        if state == "complete":
            manifest = stage.manifest() or {}
            counts = [f"{manifest[name]:,} {name}" for name in ("rows", "positions") if name in manifest]
            size = sum(entry["bytes"] for entry in manifest.get("shards", []))
            why = ", ".join([*counts, file_size(size)])
            if len(engines := manifest.get("engines", [])) > 1:
                why += f"; made with {' and with '.join(engines)}"
        elif anchor := published.get(stage.path):
            why = f"to be fetched with anchors.{anchor}"
        else:
            unfinished = [inner.path for inner in stage.inputs if not inner.complete]
            waits = f"waits for {', '.join(unfinished)}" if unfinished else ""
            why = "; ".join(filter(None, [_progress(stage, run), explain_missing(stage), waits]))
        statuses.append(Status(stage.path, state, why))
    return statuses


def _progress(stage: Stage, run: Run) -> str:
    """What there is of an unfinished stage: updates, shards, blocks or legs; or what a finished one has lost."""
    if manifest := stage.manifest():
        files = [entry["file"] for entry in manifest["shards"]]
        lost = [name for name in files if not (stage.folder / name).exists()]
        folders = {name.split("/")[0] for name in lost if "/" in name}
        if gone := [f"{folder}/" for folder in sorted(folders) if not (stage.folder / folder).exists()]:
            return f"was finished, but {', '.join(gone)} has been deleted"
        if lost:
            return f"was finished, but {len(lost)} of {len(files)} files have been deleted, {lost[0]} among them"
        return "was finished, but a file is truncated"
    if saved := complete_checkpoints(stage.folder / "checkpoints", stage.fingerprint):
        updates = int(saved[-1].name)
        try:
            groups = run.stage("prompts").require()["rows"]
            schedule = make_schedule(run.recipe, groups, stage.path.removeprefix("train/"))
            return f"{updates} of {len(schedule)} updates"
        except WeaveError:  # the prompts have been deleted
            return f"{updates} updates"
    for kind, folder, pattern in (
        ("block", f"blocks-{stage.fingerprint}", "[0-9]*.jsonl"),
        ("shard", ".", "*.safetensors"),
    ):
        if count := len(list((stage.folder / folder).glob(pattern))):
            return f"{count} {kind}{'s' * (count != 1)} so far"
    legs = len(list(stage.folder.glob("leg-*")))
    return f"in leg {legs}" if legs else ""
