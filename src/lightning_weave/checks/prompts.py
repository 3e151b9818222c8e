"""Before a run: do its prompts fit the student, the benchmarks, the anchors' contexts, the weights and the disk?"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from math import ceil

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.checks.disk import check_disk
from lightning_weave.checks.findings import Finding, listed
from lightning_weave.checks.todo import Todo, is_pending
from lightning_weave.config import Prompts, Recipe
from lightning_weave.errors import InputError
from lightning_weave.prompts import Screen, build_prompts, read_prompts
from lightning_weave.prompts.formats import ask
from lightning_weave.prompts.normal import normalise
from lightning_weave.runs.alignment import own_prompts
from lightning_weave.runs.caches import routed_weights
from lightning_weave.runs.prompts import asked_prompts, own_trajectories, tag_columns, tag_of
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.types import Prompt

PAPER_UPDATES = 400
FEW_UPDATES = 10
GIVEN_AWAY = 0.05  # share of prompts that may contain their own answer by chance


def check_prompts(steps: Steps, todo: Todo, benchmarks: list[Benchmark]) -> Iterator[Finding]:
    """Build the prompts as the run will, and see whether they fit, overlap with benchmarks, and fill the disk."""
    recipe = steps.recipe
    tokenizer = steps.student.tokenizer
    try:
        if not is_pending(steps, lambda: steps.prompts):
            prompts = read_prompts(steps.prompts_file)
        elif recipe.rollout.from_ is not None:
            prompts = [group.as_prompt(tokenizer) for group in own_trajectories(steps)]
        else:
            assert steps.prompts is not None  # its files are there
            prompts, report = build_prompts(tokenizer, **recipe.prompts.model_dump())
            if report.bad:
                first = report.bad[0]
                text = (
                    f"{len(report.bad):,} of {report.read:,} rows cannot be used; the first: {first.where}: {first.why}"
                )
                yield Finding("prompts", "rows", "warning", text, {"bad": len(report.bad), "read": report.read})
    except InputError as error:
        key = "rollout.from" if recipe.rollout.from_ is not None else "prompts"
        yield Finding(key, "prompts", "error", str(error))
        return
    limit = steps.student.context_limit
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if limit is not None and len(longest.token_ids) >= limit and recipe.rollout.from_ is None:
        text = (
            f"prompt {longest.id!r} has {len(longest.token_ids)} tokens, which leaves no room in the {limit} of "
            f"{steps.student.light_path}. Set prompts.max_tokens to {limit - 1} at most; it is "
            f"{recipe.prompts.max_tokens}"
        )
        yield Finding("prompts", "context", "error", text)
    elif limit is not None and recipe.rollout.from_ is None and recipe.rollout.max_tokens >= limit:
        text = f"rollout.max_tokens is {recipe.rollout.max_tokens:,}, but the context of {steps.student.name} has "
        text += f"{limit:,} tokens: a response is cut off where prompt and response fill it"
        yield Finding("rollout", "context", "warning", text, {"context": limit})
    yield from _check_updates(recipe, len(prompts)) if todo.compositions else ()
    yield from _check_overlap(prompts, benchmarks, recipe.prompts)
    yield from _check_answers(prompts, recipe.prompts.columns.answer)
    yield from check_contexts(steps, todo, prompts)
    yield from check_routes(steps, todo, prompts)
    with suppress(InputError):  # an anchor whose base is not known, which is said already
        yield check_disk(steps, len(prompts), trainings=todo.compositions)


def count_updates(recipe: Recipe, prompts: int) -> int:
    """How many updates so many prompts make."""
    rounds = prompts * recipe.train.epochs / recipe.train.prompts_per_round
    return ceil(rounds * recipe.train.updates_per_round)


def _check_updates(recipe: Recipe, prompts: int) -> Iterator[Finding]:
    """Warn where training would end before it has begun."""
    updates = count_updates(recipe, prompts)
    if updates < FEW_UPDATES and not recipe.rehearsal:
        text = f"{prompts:,} prompts make {updates:,} updates, the paper's make {PAPER_UPDATES}: a student hardly "
        text += "moves in so few. Give more prompts, or more train.epochs"
        yield Finding("prompts", "updates", "warning", text, {"updates": updates})


def check_routes(steps: Steps, todo: Todo, prompts: list[Prompt]) -> Iterator[Finding]:
    """Count the prompts of every tag, and see whether each has weights."""
    routed = [name for name in todo.compositions if steps.recipe.compositions[name].routes]
    if not routed:
        return
    try:
        rows = asked_prompts(steps, tag_columns(steps.recipe), prompts)
        counts = Counter(tag_of(steps.recipe, one) for one in rows)
        words = listed(f"{tag} {count:,}" for tag, count in counts.most_common())
        yield Finding("tags", "prompts", "note", f"prompts by tag: {words}", {"tags": dict(counts)})
        for name in routed:
            routed_weights(steps, name, rows)
            for tag in steps.recipe.compositions[name].routes:
                if tag not in counts:
                    text = f"no prompt has the tag {tag!r}, so its weights are never used"
                    yield Finding(f"compositions.{name}.weights.{tag}", "routes", "warning", text)
    except InputError as error:
        yield Finding("tags", "routes", "error", str(error))


def check_contexts(steps: Steps, todo: Todo, prompts: list[Prompt]) -> Iterator[Finding]:
    """Render every prompt in the contexts of the anchors: does each row have the columns that they name?"""
    for name in todo.anchors:
        for role in ROLES:
            side = steps.side(name, role)
            if side.context:
                try:
                    own_prompts(steps, side, asked_prompts(steps, side.context.columns, prompts))
                except InputError as error:
                    yield Finding(f"anchors.{name}.{role}_prompt", "context", "error", str(error))


def _check_answers(prompts: list[Prompt], column: str | None) -> Iterator[Finding]:
    """Look for prompts without an answer, and for those that say their own: then there is nothing but it to learn."""
    answered = [prompt for prompt in prompts if prompt.answer]
    if column and len(answered) < len(prompts) / 2:
        text = f"{len(prompts) - len(answered):,} of {len(prompts):,} prompts have no answer (prompts.columns.answer = "
        text += f"{column!r} is null there): whether responses to them are right cannot be checked"
        yield Finding("prompts", "no answers", "warning", text, {"answered": len(answered), "prompts": len(prompts)})
    given = [prompt.id for prompt in answered if says_answer(prompt.text, prompt.answer or "")]
    if len(given) > GIVEN_AWAY * len(answered):
        text = (
            f"{len(given):,} of {len(answered):,} prompts contain their own answer: {listed(given, most=3)}. Name the "
        )
        text += "column that holds the problem alone (prompts.columns)"
        yield Finding("prompts", "answers", "warning", text, {"given": len(given), "answered": len(answered)})


def says_answer(text: str, answer: str) -> bool:
    r"""Say whether a text states this answer as one: in a box, or after the word.

    >>> says_answer("3 + 4? Answer: 7", "7"), says_answer(r"It is \boxed{7}.", "7"), says_answer("3 + 7? Answer:", "7")
    (True, True, False)
    """
    value = re.escape(answer.strip())
    return re.search(rf"\\boxed\{{\s*{value}\s*\}}|\banswer\W+(is\W+)?{value}(?!\w)", text, re.IGNORECASE) is not None


def _check_overlap(prompts: list[Prompt], benchmarks: list[Benchmark], section: Prompts) -> Iterator[Finding]:
    """Look for benchmark problems among the prompts: short ones by the whole turn, in the prompts' own words."""
    problems = [(f"{one.name}: {problem.id}", problem) for one in benchmarks for problem in one.problems]
    screen = Screen((where, problem.question) for where, problem in problems)
    turns = {normalise(_as_asked(problem, section)): where for where, problem in problems}
    overlaps = []
    for prompt in prompts:
        for turn in [turn["content"] for turn in prompt.messages if turn["role"] == "user"] or [prompt.text]:
            overlap = screen.find(prompt.id, turn)
            if where := turns.get(normalise(turn)) or (overlap and overlap.problem):
                overlaps.append(f"{prompt.id} with {where}")
    if overlaps:
        text = (
            f"{len(overlaps):,} of {len(prompts):,} prompts overlap with benchmark problems, which inflates results: "
        )
        text += listed(overlaps, most=3)
        text += ". prompts.screen_against leaves out prompts that overlap with a file of problems"
        yield Finding("prompts", "overlap", "warning", text, {"overlaps": len(overlaps), "prompts": len(prompts)})


def _as_asked(problem: Problem, section: Prompts) -> str:
    """Put a benchmark's problem as the prompts put theirs."""
    turn = [{"role": "user", "content": problem.question}]
    try:
        return ask(section.format, turn, template=section.template, columns=problem.columns)[-1]["content"]
    except InputError:  # the template names a column that this benchmark has not
        return problem.question
