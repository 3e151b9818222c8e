"""`lweave init`: write a recipe from a few names, and say beside every value why it is there.

Looks at configurations, tokenizers and data; no weights are loaded. What cannot be known is asked for.
"""

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_weave.bench.definitions import KNOWN, load_benchmark
from lightning_weave.checks.checkpoints import check_usable
from lightning_weave.checks.end_of_turn import alias_line
from lightning_weave.checks.memory import this_machine
from lightning_weave.checks.prompts import PAPER_UPDATES, count_updates
from lightning_weave.config import Lora, Recipe, check_recipe, merge_overrides, slug
from lightning_weave.config.annotate import annotated_toml, dotted_key
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.recipe import MemoryPlan, make_plan
from lightning_weave.prompts import EXPECTS, build_prompts, expected_of, guess_columns, read_rows
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic
from lightning_weave.store.tables import Row

LOOKED_AT = 200  # rows of the prompts, to find their columns
# What each stage gives up, one after the other, until it fits.
LORA = (("train.lora.rank", 16), ("train.learning_rate", 1e-4))
SAVINGS: dict[str, list[tuple[tuple[str, Any], ...]]] = {
    "rollout": [(("rollout.batch_size", size),) for size in (32, 16, 8, 4, 2, 1)],
    "reference": [(("reference.token_budget", size),) for size in (8192, 4096, 2048)],
    "score": [(("score.token_budget", size),) for size in (8192, 4096, 2048)],
    "train": [(("train.gradient_checkpointing", True),), (("train.token_budget", 4096),), LORA],
}


@dataclass
class Draft:
    """A recipe in the making. What the user has said stays; each value of ours comes with its reason."""

    tables: dict[str, Any]
    remarks: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by the key that it is about, or by itself

    def put(self, *path: str, value: Any, why: str = "") -> None:
        """Set a value unless the user has; a value of ours with a reason may be set again."""
        table = self.tables
        for part in path[:-1]:
            table = table.setdefault(part, {})
        key = dotted_key(*path)
        if path[-1] not in table or key in self.notes:
            table[path[-1]] = value
            if why:
                self.remarks[key] = why
                self.notes[key] = f"{key} = {json.dumps(value, ensure_ascii=False)}: {why}"

    def note(self, text: str) -> None:
        """Say something that belongs to no key."""
        self.notes[text] = text

    @property
    def assumed(self) -> list[str]:
        return list(self.notes.values())

    def recipe(self, where: str = "init") -> Recipe:
        return check_recipe(self.tables, where)

    @property
    def text(self) -> str:
        """The recipe as TOML, its sections in their usual order."""
        order = {name: self.tables[name] for name in Recipe.model_fields if name in self.tables}
        return annotated_toml(order, self.remarks)


def run(
    out: Path,
    student: str,
    anchors: Mapping[str, tuple[str, str | None]],
    prompts: str,
    benchmarks: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    machine: PlannedMachine | None = None,
    console: Console,
) -> Draft:
    """Write a recipe and say what was assumed. Nothing is written where something is missing."""
    if out.exists():
        raise InputError(f"{out} is there already. Give another name, or remove it")
    draft = Draft(merge_overrides({}, overrides))
    draft.put("name", value=slug(out.stem))
    draft.put("student", "model", value=student)
    for name, (post, pre) in anchors.items():
        draft.put("anchors", name, "post", value=post)
        if pre is None:
            draft.remarks[dotted_key("anchors", name, "post")] = "an adapter: what it was trained from is its base"
            continue
        draft.put("anchors", name, "pre", value=pre)
        draft.remarks[dotted_key("anchors", name, "pre")] = "what it was trained from"
    _compose(draft, list(anchors))
    _check_models(draft.recipe())
    steps = Steps(draft.recipe(), str(out))
    _ask(draft, steps, prompts)
    _examine(draft, list(benchmarks))
    count, longest = _measure(draft, steps)
    _fit_context(draft, steps, longest)
    _evaluate(draft, steps)
    _align(draft, str(out))
    _fit_memory(draft, steps, machine)
    _count_updates(draft, count)
    draft.recipe(str(out))
    write_atomic(out, draft.text.encode())
    _tell(draft, out, console)
    return draft


def _compose(draft: Draft, anchors: list[str]) -> None:
    if "compositions" in draft.tables or not anchors:
        return
    name = anchors[0] if len(anchors) == 1 else "even"
    share = round(1 / len(anchors), 4)
    shares = dict.fromkeys(anchors[1:], share)
    weights = {anchors[0]: round(1 - sum(shares.values()), 4), **shares}
    why = "" if len(anchors) == 1 else "equal shares; lweave sweep tries others on the same cache"
    draft.put("compositions", name, "weights", value=weights, why=why)


def _check_models(recipe: Recipe) -> None:
    steps = Steps(recipe, "")
    models = {"--student": steps.student}
    models |= {f"--anchor {name}, {role}": steps.anchor(name, role) for name in recipe.anchors for role in ROLES}
    for about, checkpoint in models.items():
        if finding := check_usable(about, checkpoint):
            raise InputError(f"{about}: {finding.text}")


def _ask(draft: Draft, steps: Steps, source: str) -> None:
    """Find out how the student wants to be asked, and which columns hold what."""
    kind = expected_of(steps.student.tokenizer)
    draft.remarks[dotted_key("student", "model")] = EXPECTS[kind]
    draft.note(f"the student is {EXPECTS[kind]}")
    draft.put("prompts", "source", value=source)
    section = draft.tables["prompts"]
    if kind == "base":
        draft.put("prompts", "chat", value=False, why="the student has no chat template")
    elif slug(steps.student.name).lower().endswith("base"):
        draft.note("the student's name says base, but it has a chat template: chat = false asks it without")
    where = {key: section[key] for key in ("name", "split", "revision") if key in section}
    rows = list(islice(read_rows(section["source"], **{"split": "train", **where}), LOOKED_AT))
    columns = guess_columns(rows, section["source"], section.get("columns", {}).get("prompt"))
    values = [row.values for row in rows if isinstance(row, Row)]
    is_code = all({"question_content", "starter_code"} <= row.keys() for row in values)
    draft.put("prompts", "columns", "prompt", value=columns.prompt, why=f"of {', '.join(values[0])}")
    if columns.id:
        draft.put("prompts", "columns", "id", value=columns.id)
    if is_code:
        draft.put("prompts", "format", value="livecodebench", why="its rows are LiveCodeBench's")
    elif columns.answer:
        draft.put("prompts", "columns", "answer", value=columns.answer, why="answers are asked for in a box")
    else:
        why = "no column has answers: whether rollouts are right is not known, and no box is asked for"
        draft.put("prompts", "format", value="plain", why=why)


def _examine(draft: Draft, benchmarks: list[str]) -> None:
    """Choose the benchmarks, and read those that are files."""
    named = [f"file:{name}" if name not in KNOWN and Path(name).exists() else name for name in benchmarks]
    for name in named:
        if name not in KNOWN:
            load_benchmark(name)
    code = draft.tables["prompts"].get("format") == "livecodebench"
    own = [name for name, benchmark in KNOWN.items() if (benchmark.kind == "code") == code]
    why = "" if named else "none was given: the paper's, from the hub; of your own: file:PATH"
    draft.put("eval", "benchmarks", value=named or own, why=why)


def _measure(draft: Draft, steps: Steps) -> tuple[int, int]:
    """Build the prompts as the run will; returns how many are left and the tokens of the longest."""
    section = draft.recipe().prompts.model_dump() | {"max_tokens": None, "take": None}
    prompts, report = build_prompts(steps.student.tokenizer, **section)
    if report.bad:
        first = report.bad[0]
        draft.note(f"{len(report.bad):,} of {report.read:,} rows cannot be used; the first: {first.where}: {first.why}")
    take = Recipe.model_fields["prompts"].default.take
    if len(prompts) < take:
        draft.put("prompts", "take", value=len(prompts), why=f"all that there are; the paper takes {take:,}")
    return len(prompts), max(len(prompt.token_ids) for prompt in prompts)


def _fit_context(draft: Draft, steps: Steps, longest: int) -> None:
    """Make prompt and response fit into the student's context."""
    recipe = draft.recipe()
    limit = steps.student.context_limit
    if limit is not None and recipe.prompts.max_tokens + recipe.rollout.max_tokens > limit:
        room = max(1, min(longest, limit // 2, recipe.prompts.max_tokens))
        draft.put("prompts", "max_tokens", value=room, why=f"the context of the student is {limit:,} tokens")
        rest = min(recipe.rollout.max_tokens, limit - draft.recipe().prompts.max_tokens)
        draft.put("rollout", "max_tokens", value=max(1, rest), why="what the context leaves for a response")
    most = draft.recipe().prompts.max_tokens
    if longest > most:
        draft.note(f"the longest prompt has {longest:,} tokens; those with more than {most:,} are left out")


def _evaluate(draft: Draft, steps: Steps) -> None:
    recipe = draft.recipe()
    thinks = recipe.prompts.chat and recipe.prompts.thinking and expected_of(steps.student.tokenizer) != "chat"
    length = 32_768 if thinks else 4096
    limit = steps.student.context_limit
    room = length if limit is None else max(1, min(length, limit - recipe.prompts.max_tokens))
    why = "as in the paper: it thinks before it answers" if thinks else "it does not think first; the paper has 32,768"
    draft.put("eval", "max_tokens", value=room, why=why if room == length else "what the context leaves")
    if any(name.startswith("file:") for name in recipe.eval.benchmarks):
        draft.put("eval", "samples", value=4, why="per problem; the paper draws 64 for each of its 30 problems")


def _align(draft: Draft, where: str) -> None:
    """Give the student's end of turn a counterpart in anchors with another tokenizer."""
    steps = Steps(draft.recipe(where), where)
    for name in steps.recipe.anchors:
        line, _ = alias_line(steps, name, [])
        table = tomllib.loads(line or "")
        if "untrained" in table:
            draft.note(f"anchors.{name}: the row of its end of turn looks untrained in pre, so it has no alias")
        elif table:
            why = "the end of a turn, so that stopping is supervised"
            draft.put("anchors", name, "aliases", value=table["aliases"], why=why)


def _fit_memory(draft: Draft, steps: Steps, machine: PlannedMachine | None) -> None:
    """Give up what costs memory until every stage fits, and say what never does."""
    machine = machine or this_machine(draft.recipe())
    saved = str(steps.student.dtype).removeprefix("torch.")
    draft.note(f"dtype = auto: float32 on a CPU, else as saved; the student is saved in {saved}")
    try:
        for stage, savings in SAVINGS.items():
            for saving in savings:
                if not (wrong := _too_large(draft, machine, stage)):
                    break
                size = f"{max(row.weights + row.working for row in wrong) / 1e9:.1f} GB"
                for key, value in saving:
                    why = f"{stage} would need {size}; {machine.gpu.name} has {machine.gpu.memory / 1e9:.0f} GB"
                    draft.put(*key.split("."), value=value, why=why)
        for row in _too_large(draft, machine):
            size = f"{(row.weights + row.working) / 1e9:.1f} GB"
            draft.note(
                f"{row.stage} ({row.what}) does not fit: {size} of {machine.gpu.memory / 1e9:.0f} GB. Use more or "
                "larger GPUs (lweave plan), or a smaller model"
            )
    except InputError as error:
        draft.note(f"whether it fits into memory is not known ({error})")
    if "lora" in draft.tables.get("train", {}):
        _target(draft, steps.student)


def _too_large(draft: Draft, machine: PlannedMachine, stage: str | None = None) -> list[MemoryPlan]:
    rows = make_plan(draft.recipe(), machine).memory
    return [row for row in rows if not row.fits and stage in (None, row.stage)]


def _target(draft: Draft, student: Checkpoint) -> None:
    """Update all linear layers where the student has none of the usual names."""
    names = {name.rpartition(".")[2] for name, _ in student.skeleton().named_modules()}
    if not names & set(Lora().targets):
        why = "its layers have other names than usual"
        draft.put("train", "lora", "targets", value="all-linear", why=why)


def _count_updates(draft: Draft, count: int) -> None:
    recipe = draft.recipe()
    prompts = min(count, recipe.prompts.take or count)
    updates = count_updates(recipe, prompts)
    if updates < PAPER_UPDATES // 4:
        draft.note(
            f"{prompts:,} prompts make {updates:,} updates, the paper's make {PAPER_UPDATES}: give more prompts, more "
            "train.epochs, or a larger train.learning_rate"
        )


def _tell(draft: Draft, out: Path, console: Console) -> None:
    lines = [f"{out} is written. Assumed, and said in it:", *(f"- {text}" for text in draft.assumed), "Next:"]
    lines += [f"  lweave {verb} {shlex.quote(str(out))}" for verb in ("doctor", "rehearse", "run", "report")]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
