"""A whole recipe, and what its sections must agree on."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from lightning_weave.config.anchor import STUDENT, Anchor, Side
from lightning_weave.config.composition import DEFAULT_TAG, Composition
from lightning_weave.config.fields import EvalFormat, Name, Strict
from lightning_weave.config.sections import (
    Checks,
    Eval,
    Harness,
    Machine,
    Policy,
    Prompts,
    Reference,
    Report,
    Rollout,
    Score,
    Student,
    Tags,
)
from lightning_weave.config.training import Tracking, Train


class Recipe(Strict):
    """One experiment."""

    name: Name
    runs: str = Field("runs", description="directory that holds run directories")
    rehearsal: bool = Field(
        False, description="with doubles of the models, as `lweave rehearse` makes them: nothing of it is a result"
    )
    student: Student
    anchors: dict[Name, Anchor] = Field({})
    tags: Tags = Tags()
    compositions: dict[Name, Composition] = Field({})
    policies: dict[Name, Policy] = Field({})
    prompts: Prompts = Prompts()
    rollout: Rollout = Rollout()
    reference: Reference = Reference()
    score: Score = Score()
    train: Train = Train()
    tracking: Tracking = Tracking()
    eval: Eval = Eval()
    harness: Harness = Harness()
    report: Report = Report()
    checks: Checks = Checks()
    machine: Machine = Machine()

    @model_validator(mode="before")
    @classmethod
    def _asks_alike(cls, data: Any) -> Any:
        """Write out what is default: [eval] asks as [prompts] does, and for a box where answers are to be graded."""
        sections = [data.get(name, {}) for name in ("prompts", "eval")] if isinstance(data, Mapping) else [data]
        if not all(isinstance(section, Mapping) for section in sections):
            return data
        prompts = dict(sections[0])
        evaluation = dict(sections[1])
        columns = prompts.get("columns")
        answers = isinstance(columns, Mapping) and columns.get("answer") is not None
        form = "template" if "template" in prompts else prompts.get("format", "boxed")
        if not evaluation.keys() & {"format", "template"}:
            evaluation["format"] = form if form in get_args(EvalFormat) else "boxed"
            evaluation |= {"template": prompts["template"]} if form == "template" and "template" in prompts else {}
        evaluation.setdefault("format", "template")
        prompts.setdefault("format", form if answers or form == "template" else "plain")
        inherited = {"chat", "thinking"} | ({"system"} if evaluation.get("chat", True) else set())
        evaluation = {key: prompts[key] for key in inherited & prompts.keys()} | evaluation
        return {**data, "prompts": prompts, "eval": evaluation}

    @property
    def mark(self) -> str:
        """What stands beside everything that a rehearsal makes; nothing beside a result."""
        return "rehearsal with small random models, no result" if self.rehearsal else ""

    @classmethod
    def load(cls, files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> "Recipe":
        """Read a recipe as `load_recipe` does: files that are merged, and `key=value` overrides."""
        recipe: Recipe = import_module("lightning_weave.config.load").load_recipe(
            files, overrides
        )  # it knows this file
        return recipe

    def side(self, anchor: str, role: Literal["post", "pre"]) -> Side:
        """One of the two models of an anchor, and what it reads."""
        section = self.anchors[anchor]
        is_post = role == "post"
        context = section.post_prompt if is_post else section.pre_prompt
        if section.model == STUDENT:
            return Side(self.student.model, self.student.revision, self.student.trust_remote_code, context)
        model = section.model or (section.post if is_post else section.pre)
        revision = section.post_revision if is_post else section.pre_revision
        return Side(model, revision, section.trust_remote_code, context)

    def scored_by(self, anchor: str, role: Literal["post", "pre"]) -> Literal["auto", "hf", "vllm", "server"]:
        """What scores one of the two models of an anchor."""
        section = self.anchors[anchor]
        url = section.post_url if role == "post" else section.pre_url
        return "server" if url is not None else section.engine or self.score.engine

    def asked(self, policy: str) -> Eval:
        """[eval] as one policy is asked: with the system prompt that it has of its own."""
        own = self.policies[policy].system if policy in self.policies else None
        return self.eval if own is None else self.eval.model_copy(update={"system": own})

    @model_validator(mode="after")
    def _contexts_can_be_read(self) -> Self:
        for name, anchor in self.anchors.items():
            has_system = anchor.post_prompt.system or anchor.pre_prompt.system
            if has_system and anchor.prompt == "student" and not self.prompts.chat:
                raise ValueError(
                    f"anchors.{name}: system needs a chat template, but prompts.chat = false. Use prefix, which is "
                    "plain text before the prompt"
                )
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, composition in self.compositions.items():
            if composition.routes and self.tags == Tags():
                raise ValueError(
                    f"compositions.{name}.weights differ by tag, but nothing gives a prompt its tag: add [tags] with "
                    "column or rules"
                )
            known_tags = {*self.tags.rules, DEFAULT_TAG}
            if self.tags.rules and (unknown := [tag for tag in composition.routes if tag not in known_tags]):
                raise ValueError(
                    f"compositions.{name}.weights.{unknown[0]}: no rule of [tags.rules] gives this tag; there is "
                    f"{', '.join(self.tags.rules)}, and {DEFAULT_TAG} for all other prompts"
                )
            for anchor in (*composition.weights, *(one for route in composition.routes.values() for one in route)):
                if anchor not in self.anchors:
                    names = ", ".join(self.anchors) or "none"
                    raise ValueError(f"compositions.{name}.weights names the anchor {anchor!r}; known anchors: {names}")
        owners = {"base": "the student itself", **dict.fromkeys(self.compositions, "a composition")}
        for name in self.policies:
            if name in owners:
                raise ValueError(f"policies.{name} has the name of {owners[name]}; give it another one")
            if self.policies[name].system is not None and not self.eval.chat:
                raise ValueError(f"policies.{name}.system needs a chat template, but eval.chat = false")
        if "base" in self.compositions:
            raise ValueError("compositions.base has the name of the student itself; give it another one")
        return self

    @model_validator(mode="after")
    def _parts_have_rounds(self) -> Self:
        for name, composition in self.compositions.items():
            take = self.prompts.take
            if composition.method != "joint" or take is None or self.rollout.from_ is not None:
                continue
            rounds = (composition.epochs or self.train.epochs) * -(-take // self.train.prompts_per_round)
            if composition.refresh > rounds:
                raise ValueError(
                    f"compositions.{name}.refresh = {composition.refresh}, but {take} prompts make {rounds} rounds at "
                    f"most (train.epochs, train.prompts_per_round), and a part is at least one"
                )
        return self

    @model_validator(mode="after")
    def _batches_come_out_even(self) -> Self:
        rows = self.train.prompts_per_round * self.rollout.responses
        if rows % self.train.updates_per_round:
            raise ValueError(
                f"train.updates_per_round is {self.train.updates_per_round}, which does not divide a round of "
                f"{self.train.prompts_per_round} prompts x {self.rollout.responses} responses = {rows} trajectories"
            )
        return self
