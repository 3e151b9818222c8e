"""`lweave init`: write a recipe from a few names, with the reason for every value.

Reads configurations, tokenizers and data, but no weights. What cannot be known must be given.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_weave.bench.definitions import KNOWN, benchmark_name, load_benchmark
from lightning_weave.checks.models import find_fault
from lightning_weave.checks.pairs import find_alias
from lightning_weave.checks.preflight import as_computed, this_machine
from lightning_weave.config import HELD_OUT, Lora, Recipe, check_recipe, merge_overrides, slug
from lightning_weave.errors import InputError
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import MemoryPlan, make_plan
from lightning_weave.prompts import CHAT_MODES, build_prompts, detect_chat_mode, guess_columns, read_rows
from lightning_weave.run import ROLES, Run
from lightning_weave.stages.forecast import suggest_alpha
from lightning_weave.stages.train import PAPER_UPDATES, count_updates
from lightning_weave.store import write_atomic
from lightning_weave.store.tables import Row
from lightning_weave.views.keys import annotated_toml, dotted_key

LOOKED_AT = 200  # rows of the prompts, to find their columns
# What is lowered for each stage, one after the other, until it fits.
SAVINGS: dict[tuple[str, ...], list[tuple[tuple[str, Any], ...]]] = {
    ("rollout",): [(("rollout.batch_size", size),) for size in (32, 16, 8, 4, 2, 1)],
    ("reference", "score"): [(("score.token_budget", size),) for size in (8192, 4096, 2048)],
    ("train",): [
        (("train.gradient_checkpointing", True),),
        (("train.token_budget", 4096),),
        (("train.lora.rank", 16),),
    ],
}


@dataclass
class Draft:
    """A recipe in the making. Values of the user stay; each value of ours comes with its reason."""

    tables: dict[str, Any]
    remarks: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by the key that it is about, or by itself

    def put(self, *path: str, value: Any, why: str = "") -> None:
        """Set a value unless the user has set it; a value of ours with a reason may be set again."""
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
        """Add a remark that belongs to no key."""
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
    anchors: Mapping[str, Mapping[str, Any]],
    prompts: str,
    benchmarks: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    machine: PlannedMachine | None = None,
    trust: bool = False,
    console: Console,
) -> Draft:
    """Write a recipe and print what was assumed. Nothing is written if something is missing.

    `anchors` are tables of the recipe, by name.
    """
    if out.exists():
        raise InputError(f"{out} exists already. Give another name, or remove it")
    draft = Draft(merge_overrides({}, overrides))
    draft.put("name", value=slug(out.stem))
    draft.put("student", "model", value=student)
    for name, table in anchors.items():
        for key, value in table.items():
            draft.put("anchors", name, key, value=value)
        if "pre" in table:
            draft.remarks[dotted_key("anchors", name, "pre")] = "what it was trained from"
        elif "post" in table:
            draft.remarks[dotted_key("anchors", name, "post")] = "an adapter: it was trained from its base"
    if "compositions" not in draft.tables and "anchors" in draft.tables:
        first, *others = draft.tables["anchors"]
        shares = dict.fromkeys(others, round(1 / (len(others) + 1), 4))
        weights = {first: round(1 - sum(shares.values()), 4), **shares}
        why = "equal shares; lweave sweep tries others on the same cache" if others else ""
        draft.put("compositions", "even" if others else first, "weights", value=weights, why=why)
    run = Run(draft.recipe(), str(out), trust)
    models = {"--student": lambda: run.student}
    models |= {
        f"--anchor {name}, {role}": partial(run.anchor, name, role) for name in run.recipe.anchors for role in ROLES
    }
    for option, load in models.items():
        try:
            fault = find_fault(load())
        except InputError as error:
            raise InputError(f"{option}: {error}") from None
        if fault:
            raise InputError(f"{option}: {fault}")
    if benchmarks:
        draft.put("eval", "benchmarks", value=[benchmark_name(name) for name in benchmarks])
    count = _choose_prompts(draft, run, prompts)
    _choose_evaluation(draft, run)
    for name in run.recipe.anchors:
        alias = find_alias(Run(draft.recipe(str(out)), str(out), trust), name)
        if alias is not None and alias.is_untrained:
            draft.note(f"anchors.{name}: the row of its end of turn looks untrained in pre, so it has no alias")
        elif alias is not None:
            why = "the end of a turn, so that stopping is supervised"
            draft.put("anchors", name, "aliases", value=alias.aliases, why=why)
    _fit_memory(draft, run, machine or this_machine(draft.recipe()))
    recipe = draft.recipe(str(out))
    used = min(count, recipe.prompts.take or count)
    if (updates := count_updates(recipe, used)) < PAPER_UPDATES // 4:
        draft.note(
            f"{used:,} prompts make {updates:,} updates, the paper's make {PAPER_UPDATES}: give more prompts, or raise "
            "train.epochs or train.learning_rate"
        )
    write_atomic(out, draft.text.encode())
    if text := suggest_alpha(Run(recipe, str(out), trust)):  # this run has a cache already
        draft.note(text)
    lines = [f"{out} is written. Assumptions, also noted in it:", *(f"- {text}" for text in draft.assumed), "Next:"]
    lines += [f"  lweave {verb} {shlex.quote(str(out))}" for verb in ("doctor", "rehearse", "run", "report")]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
    return draft


def _choose_prompts(draft: Draft, run: Run, source: str) -> int:
    """Choose columns, format and lengths of the prompts as the student needs them; returns how many there are."""
    kind = detect_chat_mode(run.student.tokenizer)
    draft.remarks[dotted_key("student", "model")] = CHAT_MODES[kind]
    draft.note(f"the student is {CHAT_MODES[kind]}")
    draft.put("prompts", "source", value=source)
    section = draft.tables["prompts"]
    if kind == "base":
        draft.put("prompts", "chat", value=False, why="the student has no chat template")
    elif slug(run.student.name).lower().endswith("base"):
        draft.note("the student's name ends with base, but it has a chat template: chat = false prompts it without")
    where = {key: section[key] for key in ("name", "split") if key in section}
    rows = list(islice(read_rows(section["source"], **{"split": "train", **where}), LOOKED_AT))
    columns = guess_columns(rows, section["source"], section.get("columns", {}).get("prompt"))
    values = [row.values for row in rows if isinstance(row, Row)]
    draft.put("prompts", "columns", "prompt", value=columns.prompt, why=f"of {', '.join(values[0])}")
    if columns.id:
        draft.put("prompts", "columns", "id", value=columns.id)
    if all({"question_content", "starter_code"} <= row.keys() for row in values):
        draft.put("prompts", "format", value="livecodebench", why="its rows are LiveCodeBench's")
    elif answer := section["columns"].get("answer", columns.answer):
        draft.put("prompts", "columns", "answer", value=answer, why="answers are asked for in a box")
    else:
        why = "no column has answers: rollouts are not graded, and no box is asked for"
        draft.put("prompts", "format", value="plain", why=why)

    recipe = draft.recipe()
    every = recipe.prompts.model_copy(update={"max_tokens": None, "take": None})
    holds_out = HELD_OUT in recipe.eval.benchmarks
    prompts, report = build_prompts(run.student.tokenizer, every, holds_out=holds_out)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if report.bad:
        bad = report.bad[0]
        draft.note(f"{len(report.bad):,} of {report.read:,} rows cannot be used; the first: {bad.where}: {bad.why}")
    take = Recipe.model_fields["prompts"].default.take
    if len(prompts) < take:
        why = f"all {'that are not held out' if holds_out else 'of them'}; the paper takes {take:,}"
        draft.put("prompts", "take", value=len(prompts), why=why)
    if holds_out:
        why = f"none was given: {report.held_out:,} of your {report.read:,} rows, which are not trained on"
        draft.put("eval", "benchmarks", value=[HELD_OUT], why=why)
    elif not recipe.eval.benchmarks:
        draft.note("no benchmark was given and no prompts can be held out, so nothing will be evaluated: --bench FILE")
    recipe = draft.recipe()
    limit = run.student.context_limit
    if limit is not None and recipe.prompts.max_tokens + recipe.rollout.max_tokens > limit:
        room = max(1, min(longest, limit // 2, recipe.prompts.max_tokens))
        draft.put("prompts", "max_tokens", value=room, why=f"the context of the student is {limit:,} tokens")
        rest = min(recipe.rollout.max_tokens, limit - draft.recipe().prompts.max_tokens)
        draft.put("rollout", "max_tokens", value=max(1, rest), why="what the context leaves for a response")
    if longest > (most := draft.recipe().prompts.max_tokens):
        draft.note(f"the longest prompt has {longest:,} tokens; those with more than {most:,} are left out")
    return len(prompts)


def _choose_evaluation(draft: Draft, run: Run) -> None:
    """Read the benchmarks that are files, and choose how all are sampled."""
    recipe = draft.recipe()
    for name in recipe.eval.benchmarks:
        if name not in KNOWN and name != HELD_OUT:
            try:
                load_benchmark(name, columns=recipe.eval.columns)
            except InputError:
                load_benchmark(name, columns=recipe.prompts.columns)  # named as the prompts' are
                draft.put("eval", "columns", value=draft.tables["prompts"]["columns"], why="as the prompts'")
    thinks = recipe.prompts.chat and recipe.prompts.thinking and detect_chat_mode(run.student.tokenizer) != "chat"
    length = 32_768 if thinks else 4096
    limit = run.student.context_limit
    room = length if limit is None else max(1, min(length, limit - recipe.prompts.max_tokens))
    why = "as in the paper: it thinks before it answers" if thinks else "it does not think first; the paper has 32,768"
    draft.put("eval", "max_tokens", value=room, why=why if room == length else "what the context leaves")
    if any(name not in KNOWN for name in recipe.eval.benchmarks):
        draft.put("eval", "samples", value=4, why="per problem; the paper draws 64 for each of its 30 problems")


def _fit_memory(draft: Draft, run: Run, machine: PlannedMachine) -> None:
    """Lower what costs memory until every stage fits, and note what never does."""
    memory = f"{machine.gpu.memory / 1e9:.0f} GB"
    saved = str(run.student.dtype).removeprefix("torch.")
    draft.note(f"dtype = auto: float32 on a CPU, else as saved; the student is saved in {saved}")

    def too_large() -> list[MemoryPlan]:
        return [row for row in make_plan(as_computed(draft.recipe()), machine).memory if not row.fits]

    try:
        for stages, savings in SAVINGS.items():
            for saving in savings:
                wrong = [row for row in too_large() if row.stage in stages]
                if not wrong:
                    break
                size = f"{max(row.weights + row.working for row in wrong) / 1e9:.1f} GB"
                for key, value in saving:
                    why = f"{wrong[0].stage} would need {size}; {machine.gpu.name} has {memory}"
                    draft.put(*key.split("."), value=value, why=why)
        for row in too_large():
            size = f"{(row.weights + row.working) / 1e9:.1f} GB"
            draft.note(
                f"{row.stage} ({row.what}) does not fit: {size} of {memory}. Use more or larger GPUs (lweave plan), or "
                "a smaller model"
            )
    except InputError as error:
        draft.note(f"memory was not checked ({error})")
    if "lora" in draft.tables.get("train", {}):
        draft.put("train", "learning_rate", value=1e-4, why="usual for LoRA; the paper's 1e-6 is for full training")
        names = {name.rpartition(".")[2] for name, _ in run.student.build_meta().named_modules()}
        if not names & set(Lora().targets):
            why = "its layers have other names than usual"
            draft.put("train", "lora", "targets", value="all-linear", why=why)
