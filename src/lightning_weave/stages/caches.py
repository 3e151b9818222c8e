"""Open the cache of a run with the sources of shifts that a composition is trained on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Cache, Levels, Rules
from lightning_weave.cache.budgets import solve_budgets
from lightning_weave.cache.shifts import (
    PairSource,
    SharpenedSource,
    ShiftRules,
    ShiftSource,
    TeacherSource,
    assign_groups,
)
from lightning_weave.cache.where import WhereRule
from lightning_weave.config import ALPHA, Distilled, Joint, LevelSlot, SelfDistilled
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.prompts import encode, render_at_level
from lightning_weave.run import Run
from lightning_weave.stages.grades import grade_rows
from lightning_weave.stages.prompts import load_prompts, tag_columns, tag_of
from lightning_weave.tokens.spelling import Spelling
from lightning_weave.types import Prompt


def anchor_pair(run: Run, anchor: str, weight: float = 1.0) -> PairSource:
    """Find the two scored models of one anchor, and its rules; responses are graded if those ask for it."""
    section = run.recipe.anchors[anchor]
    rules = ShiftRules.from_anchor(section)
    if section.where is not None:
        grade_R = grade_rows(run, Progress(quiet=True)) if section.where.answers else None
        if section.where.answers and grade_R is None:
            raise InputError(f"anchors.{anchor}.where.answers: no prompt has a known answer. Remove it, or add answers")
        spelling = Spelling.from_tokenizer(run.student.tokenizer)
        where = WhereRule.from_section(section.where, run.recipe.delimiters(anchor), spelling, grade_R)
        rules = replace(rules, where=where)
    return PairSource(anchor, *run.scores_of(anchor), weight, rules)


def open_scored(run: Run) -> Cache | None:
    """Open the cache with every anchor whose two models are scored; None before the reference is done."""
    if not run.recipe.anchors:
        return None
    stages = [run.stage("rollout"), run.stage("reference")]
    if any(not stage.complete for stage in stages):
        return None
    pairs = [anchor_pair(run, name) for name in run.recipe.anchors]
    scored = [pair for pair in pairs if all(stage.complete for stage in pair.stages)]
    return Cache(stages[0], stages[1], scored)


def open_cache(run: Run, name: str) -> Cache:
    """Open what a composition is trained on: the shifts of its anchors, a teacher, or the student sharpened."""
    composition = run.recipe.compositions[name]
    pairs = [anchor_pair(run, anchor, weight) for anchor, weight in sorted(composition.used.items())]
    sources: Sequence[ShiftSource]
    match composition:
        case Distilled():
            sources = [TeacherSource(pair.name, pair.post, composition.alpha, pair.rules) for pair in pairs]
        case SelfDistilled():
            sources = [SharpenedSource(composition.sharpen, composition.alpha)]
        case _:
            sources = pairs
    reference = run.stage("reference")
    weight_GK = None  # of each prompt; None: the same for all
    if composition.method == "mixture":
        groups = reference.require()["rows"] // run.recipe.rollout.responses
        dealt = assign_groups(groups, [source.weight for source in sources], run.recipe.train_section(name).seed)
        weight_GK = np.eye(len(sources), dtype=np.float32)[dealt]  # one source alone
    elif composition.routes:
        weight_GK = routed_weights(run, name, load_prompts(run, tag_columns(run.recipe)))
    weight_RK = None if weight_GK is None else np.repeat(weight_GK, run.recipe.rollout.responses, axis=0)
    levels = open_levels(run, name) if composition.slots else None
    proposal = run.stage("proposal") if run.sampler else None
    rules = Rules(**composition.rules)
    cache = Cache(run.stage("rollout"), reference, sources, weight_RK, proposal, levels, rules)
    if (budgets := run.recipe.budgets(name)) and isinstance(composition, Joint) and not run.sampler:
        run.recipe.refuse_rules(name)
        tags = [""] * (len(cache) // run.recipe.rollout.responses)
        if composition.routes:
            tags = [tag_of(run.recipe, one) for one in load_prompts(run, tag_columns(run.recipe))]
        of_rows = np.repeat(tags, run.recipe.rollout.responses).tolist()
        alpha = composition.alpha or (ALPHA if run.recipe.rehearsal else None)
        solve_budgets(cache, of_rows, budgets, alpha, composition.kl_budget or 0.0)
    return cache


def open_levels(run: Run, name: str, prompts: Sequence[Prompt] | None = None) -> Levels:
    """Open the effort levels of a composition, and check that the student reads each of them differently.

    Weights are such that dividing by the alpha of the composition gives weight / alpha of the level. A level with a KL
    budget has its own weights until `find_dose`, in training, solves for its alpha.
    """
    composition = run.recipe.compositions[name]
    assert isinstance(composition, Joint), composition.method
    assert composition.control is not None, "levels have a control"
    control, slots = composition.control, composition.slots
    student, day = run.student.tokenizer, run.recipe.date
    asked = load_prompts(run, ()) if prompts is None else prompts

    @lru_cache(maxsize=1 << 14)
    def read(slot: int, prompt: int) -> list[int]:
        one, level = asked[prompt], slots[slot].level
        if level is None:
            return one.token_ids
        if not one.messages or one.form is None:
            raise InputError(
                f"compositions.{name}.control: the prompt {one.id} of rollout.from has no messages that render to its "
                "token ids, so no level can be added. Add its messages, or remove levels"
            )
        text = render_at_level(one.messages, student, one.form, day, control, level)
        return encode([text], student, one.form.style == "chat")[0]

    kinds = {  # one prompt of each: chat or code, with a system turn or not, without messages
        (one.form and one.form.style, *(turn["role"] for turn in one.messages[:1])): number
        for number, one in enumerate(asked)
    }
    for number in kinds.values():
        seen: dict[tuple[int, ...], LevelSlot] = {}
        for slot, one in enumerate(slots):
            same = seen.setdefault(tuple(read(slot, number)), one)
            is_default = same.level is None and one[1:] == same[1:] and control.variable is not None
            if same is not one and not is_default:
                other = "without a level" if same.level is None else f"at the level {same.level!r}"
                raise InputError(
                    f"compositions.{name}.control = {{ {control} }}: at the level {one.level!r} the student reads the "
                    f"same as {other}, but learns another target. Its chat template drops the "
                    f"{control.variable or 'system turn'}, or has another default. Use prefix instead"
                )
    anchors = sorted(composition.used)
    common = composition.alpha or ALPHA
    trained = run.stage("train", name)
    solved = trained.require().get("levels", {}) if trained.complete else {}
    alphas = [one.alpha or solved.get(one.level or "", common) for one in slots]
    weights = [
        [one.weights.get(each, 0.0) * common / alpha for each in anchors]
        for one, alpha in zip(slots, alphas, strict=True)
    ]
    return Levels(read, np.array(weights, np.float32), run.student.context_limit)


def routed_weights(run: Run, name: str, asked: Sequence[Prompt]) -> NDArray[np.float32]:
    """The weights of each prompt over the anchors of a composition, in the order of their names."""
    composition = run.recipe.compositions[name]
    anchors = sorted(composition.used)
    budgets = run.recipe.budgets(name)
    weights = []
    for one in asked:
        tag = tag_of(run.recipe, one)
        shares = composition.shares(tag) if composition.method != "self" else {}
        if shares is None:
            raise InputError(
                f"prompt {one.id} has the tag {tag!r}, for which compositions.{name}.weights has no table. Add "
                f"{tag} = {{ ... }} or default = {{ ... }} to them"
            )
        for anchor, budget in budgets.items():
            if isinstance(budget, dict) and shares.get(anchor) and tag not in budget:
                raise InputError(
                    f"anchors.{anchor}.kl_budget has no value for the tag {tag!r} of prompt {one.id}. Add {tag} = ... "
                    "to it"
                )
        weights.append([shares.get(anchor, 0.0) for anchor in anchors])
    return np.array(weights, np.float32).reshape(len(asked), len(anchors))
