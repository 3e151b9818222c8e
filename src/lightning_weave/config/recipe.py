"""A whole recipe, what its sections must agree on, and how it is read: TOML files, `--set`, error messages."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import tomli_w
from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from lightning_weave.config.composition import (
    ANSWER,
    DEFAULT_TAG,
    METHODS,
    SPANS,
    STUDENT,
    Anchor,
    Composition,
    Control,
)
from lightning_weave.config.evaluation import Checks, Eval, Harness, Report
from lightning_weave.config.fields import (
    FORMATS,
    HELD_OUT,
    KEPT_CHECKPOINTS,
    Day,
    EngineStage,
    Name,
    Role,
    Source,
    Strict,
    Text,
    code_options,
    execution,
    is_own_function,
    named_columns,
    replicate_of,
    split_revision,
    unlisted,
)
from lightning_weave.config.sections import (
    Engine,
    Machine,
    Policy,
    Prompts,
    Reference,
    Rollout,
    Score,
    StageEngine,
    Student,
    Tags,
    Train,
)
from lightning_weave.errors import InputError, hide_credentials

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
SECRET = re.compile("(?i).*(api_?key|password|secret|(access|api|auth|hf)_?token)")  # a key of the recipe


class EvalAtLevel(Eval):
    """[eval] for a student at one of its effort levels."""

    control: Control
    level: str


class EvalOfPolicy(Eval):
    """[eval] for a policy that is asked in another way."""

    template: dict[str, Any] = Field({})
    budget: int | None = None


class Recipe(Strict):
    """One experiment."""

    name: Name = execution(description="name of the run; its directory is RUNS/NAME", examples=["mine"])
    runs: Source = execution("runs", "directory that holds run directories")
    rehearsal: bool = unlisted(False, "made by `lweave rehearse`: no results", execution=True)
    date: Day | None = unlisted(
        None, "day that chat templates write; default: the day the run began", examples=["2026-01-31"]
    )
    student: Student
    anchors: dict[Name, Anchor] = Field({})
    spans: dict[Name, Annotated[list[Text], Field(min_length=2, max_length=2)]] = unlisted(
        {},
        "spans for anchors.NAME.where: name -> text that opens one, text that closes it",
        examples=[{"plan": ["<plan>", "</plan>"]}],
    )
    tags: Tags = Tags()
    compositions: dict[Name, Composition] = Field({})
    policies: dict[Name, Policy] = Field({})
    prompts: Prompts = Prompts()
    engine: Engine = Engine()
    rollout: Rollout = Rollout()
    reference: Reference = Reference()
    score: Score = Score()
    train: Train = Train()
    tracking: dict[str, Any] = execution(
        {},
        "arguments of wandb.init or trackio.init; name may contain {run} and {policy}",
        examples=[{"project": "mine"}],
    )
    eval: Eval = Eval()
    harness: Harness = Harness()
    report: Report = execution(Report())
    checks: Checks = execution(Checks())
    machine: Machine = Machine()

    @model_validator(mode="before")
    @classmethod
    def _inherit_prompt_settings(cls, data: Any) -> Any:
        """Write out defaults: [eval] asks as [prompts] does, and for a box where answers are to be graded.

        Prompts with answers are a benchmark, too: where none is named, a part of them is held out.
        """
        names = ("prompts", "eval", "rollout")
        sections = [data.get(name, {}) for name in names] if isinstance(data, Mapping) else [data]
        if not all(isinstance(section, Mapping) for section in sections):
            return data
        prompts, evaluation, rollout = map(dict, sections)
        columns = prompts.get("columns")
        has_answers = isinstance(columns, Mapping) and columns.get("answer") is not None
        asked = prompts.get("format", "boxed")
        is_graded = asked in ("plain", "question-answer", "boxed") or asked not in FORMATS
        evaluation.setdefault("format", asked if is_graded else "boxed")
        prompts.setdefault("format", "boxed" if has_answers else "plain")
        inherited = {"chat", "thinking"} | ({"system"} if evaluation.get("chat", True) else set())
        evaluation = {key: prompts[key] for key in inherited & prompts.keys()} | evaluation
        if has_answers and prompts.get("source") and rollout.get("from") is None and asked != "livecodebench":
            evaluation.setdefault("benchmarks", [HELD_OUT])
        if evaluation.get("benchmarks") == [HELD_OUT]:  # as long as responses to the other prompts
            evaluation.setdefault("max_tokens", rollout.get("max_tokens", Rollout().max_tokens))
        return {**data, "prompts": prompts, "eval": evaluation}

    @field_validator("tracking")
    @classmethod
    def _name_can_be_filled(cls, tracking: dict[str, Any]) -> dict[str, Any]:
        if not named_columns(str(tracking.get("name", ""))) <= {"run", "policy"}:
            raise ValueError("name may contain {run} and {policy}, and nothing else in braces")
        return tracking

    @property
    def mark(self) -> str:
        """The label of everything that a rehearsal makes; empty for results."""
        return "rehearsal with small random models, no result" if self.rehearsal else ""

    @classmethod
    def load(cls, files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> "Recipe":
        """Read a recipe as `load_recipe` does: files that are merged, and `key=value` overrides."""
        return load_recipe(files, overrides)

    @property
    def written(self) -> dict[str, Composition]:
        """The compositions without their replicates with further seeds, which no file names."""
        return {name: one for name, one in self.compositions.items() if name == replicate_of(name)}

    @field_serializer("compositions", "policies", mode="wrap")
    def _leave_out_replicates(self, tables: dict[str, Any], write: SerializerFunctionWrapHandler) -> Any:
        return write({name: one for name, one in tables.items() if name == replicate_of(name)})

    def train_section(self, composition: str) -> Train:
        """[train] with the overrides of a composition."""
        section = self.compositions[composition]
        own = {"epochs": section.epochs, "seed": section.seed}
        return self.train.model_copy(update={key: value for key, value in own.items() if value is not None})

    def anchor_model(self, anchor: str, role: Role) -> tuple[str, str | None] | None:
        """Name and revision of one of the two models of an anchor; None for the base of an adapter."""
        section = self.anchors[anchor]
        if section.model == STUDENT:
            return self.student.name, self.student.revision
        model = section.model or (section.post if role == "post" else section.pre)
        return None if model is None else split_revision(model)

    def delimiters(self, anchor: str) -> dict[str, tuple[str, str]]:
        """The texts around the spans that `where` of an anchor names, by span."""
        where = self.anchors[anchor].where
        named = {where.inside, where.outside} if where else set()
        named |= {*SPANS} if ANSWER in named else set()
        known = SPANS | {name: (first, last) for name, (first, last) in self.spans.items()}
        return {name: texts for name, texts in known.items() if name in named}

    def rules_of(self, anchor: str) -> dict[str, Any]:
        """How the scores of an anchor become its shift, without what is as by default."""
        section = self.anchors[anchor]
        rules = {"validity": section.validity, **section.shift.model_dump(mode="json", exclude_defaults=True)}
        if section.where is not None:
            spans = {name: list(texts) for name, texts in self.delimiters(anchor).items()}
            rules["where"] = {**section.where.model_dump(exclude_none=True), **({"spans": spans} if spans else {})}
        return rules | ({} if section.kl_budget is None else {"kl_budget": section.kl_budget})

    def budgets(self, composition: str) -> dict[str, float | dict[str, float]]:
        """The KL budgets of the anchors of a composition that have one."""
        used = self.compositions[composition].used
        found = {anchor: self.anchors[anchor].kl_budget for anchor, weight in used.items() if weight}
        return {anchor: budget for anchor, budget in found.items() if budget is not None}

    def refuse_rules(self, composition: str) -> None:
        """Refuse what the method of a composition cannot do."""
        section, budgets = self.compositions[composition], self.budgets(composition)
        if section.method == "online" and (why := self.needs_cache(composition)):
            raise InputError(f'{why}, and method = "online" has none. Use method = "joint" with refresh')
        if budgets and (section.method != "joint" or section.slots):
            anchor, method = next(iter(budgets)), "levels" if section.slots else f'method = "{section.method}"'
            raise InputError(
                f"anchors.{anchor}.kl_budget is for joint compositions, and this one has {method}: remove it"
            )
        for anchor, budget in budgets.items():
            if isinstance(budget, dict) and not section.routes:
                raise InputError(
                    f"anchors.{anchor}.kl_budget is a table by tag, but compositions.{composition}.weights do not "
                    "differ by tag: give one number"
                )
        if getattr(section, "kl_budget", None) is not None and budgets and len(budgets) == len(section.used):
            raise InputError(
                f"compositions.{composition}.kl_budget: all its anchors have a kl_budget, so nothing is left to solve"
            )

    def needs_cache(self, composition: str, solved: bool = False) -> str:
        """Explain why the target of a composition exists on cached responses only; empty if it does everywhere.

        With `solved`, KL budgets do not count: a cache exists on which they can be solved.
        """
        section = self.compositions[composition]
        for anchor in section.used:
            if self.anchors[anchor].where:
                return f"anchors.{anchor}.where is for whole responses in a cache"
            if self.anchors[anchor].kl_budget is not None and not solved:
                return f"anchors.{anchor}.kl_budget is solved on a cache"
            if named := self.anchors[anchor].run_columns:
                return f"anchors.{anchor} reads {{{min(named)}}} from a cache"
        if getattr(section, "kl_budget", None) is not None and not solved:
            return f"compositions.{composition}.kl_budget is solved on a cache"
        return ""

    def scored_by(self, anchor: str, role: Role) -> Literal["auto", "hf", "vllm", "server"]:
        """What scores one of the two models of an anchor."""
        section = self.anchors[anchor]
        if section.server(role):
            return "server"
        return section.own_engine(role) or self.engine.score

    def engine_of(self, stage: EngineStage) -> StageEngine:
        """The engine of one stage, with its dtype, options, and batch size or token budget."""
        section = self.engine
        batch_size = {"rollout": self.rollout.batch_size, "eval": self.eval.batch_size}.get(stage, 0)
        options = {name: value for name, value in section.options.items() if not isinstance(value, Mapping)}
        own: Any = section.options.get(stage, {})
        return StageEngine(
            stage,
            getattr(section, stage),
            section.dtype if isinstance(section.dtype, str) else section.dtype.get(stage, "auto"),
            section.python,
            section.parity,
            {**options, **own},
            batch_size=batch_size,
            token_budget=0 if batch_size else self.score.token_budget,
        )

    def asked(self, policy: str) -> Eval:
        """[eval] for one policy, with what that policy or its effort level changes."""
        name, _, level = policy.partition("@")
        if level and (control := getattr(self.compositions.get(name), "control", None)):
            return EvalAtLevel.model_construct(**dict(self.eval), control=control, level=level)
        keys = {"system", "thinking", "template", "budget"}
        own = self.policies[policy].model_dump(exclude_none=True, include=keys) if policy in self.policies else {}
        own = {key: value for key, value in own.items() if value != {}}
        return EvalOfPolicy.model_construct(**{**dict(self.eval), **own}) if own else self.eval

    @property
    def policy_names(self) -> list[str]:
        """Everything that can be evaluated: the student, every composition with its levels, every other policy."""
        students = [
            policy
            for name, one in self.compositions.items()
            for policy in (name, *(f"{name}@{level}" for level in getattr(one, "levels", ())))
        ]
        return ["base", *students, *self.policies]

    def has_weights(self, policy: str) -> bool:
        """Whether a policy is a checkpoint that another program can load; not one that is asked in another way."""
        section = self.policies.get(policy)
        return "@" not in policy if section is None else bool(section.model or section.merge)

    def merged(self, policy: str) -> list[str]:
        """The names that a merged policy puts together; none for another policy."""
        section = self.policies.get(policy)
        return [name for name, weight in section.weights.items() if weight] if section else []

    @property
    def code(self) -> dict[str, Any]:
        """The keys by which the recipe starts a program or runs code, with their values. They need --trust."""
        keys: dict[str, Any] = {"student.trust_remote_code": self.student.trust_remote_code}
        for name, anchor in self.anchors.items():
            keys[f"anchors.{name}.trust_remote_code"] = anchor.trust_remote_code
            keys[f"anchors.{name}.options"] = code_options(anchor.options)
        for name, policy in self.policies.items():
            keys[f"policies.{name}.trust_remote_code"] = policy.trust_remote_code
        objectives = {f"compositions.{name}.objective": one.objective for name, one in self.compositions.items()}
        graders = {f"eval.graders.{name}": grader for name, grader in self.eval.graders.items()}
        functions = {"train.objective": self.train.objective, **objectives, **graders}
        keys |= {key: text for key, text in functions.items() if text is not None and is_own_function(text)}
        keys |= {
            "engine.python": self.engine.python,
            "engine.options": code_options(self.engine.options),
            "eval.unsafe_local": self.eval.unsafe_local,
            "harness.python": self.harness.python,
            "harness.include": self.harness.include,
            "harness.args": code_options(self.harness.args),
            "tracking.settings": self.tracking.get("settings"),  # the host that is sent the user's key, for one
        }
        return {key: value for key, value in keys.items() if value}

    def without_remote_code(self) -> "Recipe":
        """This recipe, but no checkpoint may run its own code."""
        off = {"trust_remote_code": False}
        changes = {
            "student": self.student.model_copy(update=off),
            "anchors": {name: one.model_copy(update=off) for name, one in self.anchors.items()},
            "policies": {name: one.model_copy(update=off) for name, one in self.policies.items()},
        }
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _names_fit_together(self) -> Self:
        if self.train.eval_every and not self.eval.benchmarks:
            raise ValueError("train.eval_every evaluates on the first of eval.benchmarks, which is empty; name one")
        if HELD_OUT in self.eval.benchmarks and not (self.prompts.source and self.prompts.columns.answer):
            raise ValueError(
                f'eval.benchmarks names "{HELD_OUT}", a part of the prompts: set prompts.source and '
                "prompts.columns.answer, or remove it"
            )
        if HELD_OUT in self.eval.benchmarks and self.rollout.from_ is not None:
            raise ValueError(f'eval.benchmarks names "{HELD_OUT}", but rollout.from brings its own prompts; remove it')
        if self.train.balance == "tags" and self.tags == Tags():
            raise ValueError('train.balance = "tags", but prompts have no tags: add [tags] with column or rules')
        for name, anchor in self.anchors.items():
            has_system = anchor.post_prompt.system or anchor.pre_prompt.system
            if has_system and anchor.prompt == "student" and not self.prompts.chat:
                raise ValueError(
                    f"anchors.{name}: system needs a chat template, but prompts.chat = false. Use prefix, plain text "
                    "before the prompt"
                )
            self._check_where(name)
        for name, composition in self.compositions.items():
            if composition.routes and self.tags == Tags():
                raise ValueError(
                    f"compositions.{name}.weights differ by tag, but prompts have no tags: add [tags] with "
                    "column or rules"
                )
            known_tags = {*self.tags.rules, DEFAULT_TAG}
            if self.tags.rules and (unknown := [tag for tag in composition.routes if tag not in known_tags]):
                raise ValueError(
                    f"compositions.{name}.weights.{unknown[0]}: no rule of [tags.rules] gives this tag; known: "
                    f"{', '.join(self.tags.rules)}, and {DEFAULT_TAG} for all other prompts"
                )
            tables = [composition.weights, *composition.routes.values(), *(slot.weights for slot in composition.slots)]
            for used in (anchor for table in tables for anchor in table):
                if used not in self.anchors:
                    names = ", ".join(self.anchors) or "none"
                    key = "levels" if composition.slots else "weights"
                    raise ValueError(f"compositions.{name}.{key} names the anchor {used!r}; known anchors: {names}")
            control = getattr(composition, "control", None)
            if control and not control.prefix and not (self.prompts.chat and self.eval.chat):
                raise ValueError(
                    f"compositions.{name}.control: system and variable need a chat template, but chat = false. Use "
                    'prefix, plain text before the prompt: { prefix = "Effort {level}. " }'
                )
        owners = {"base": "the student itself", **dict.fromkeys(self.compositions, "a composition")}
        for name in self.policies:
            if name in owners:
                raise ValueError(f"policies.{name} has the name of {owners[name]}; give it another one")
            self._check_policy(name)
        if "base" in self.compositions:
            raise ValueError("compositions.base has the name of the student itself; give it another one")
        return self

    def _check_policy(self, name: str) -> None:
        """Refuse a policy that names what the recipe does not have, or that has no place to be asked differently."""
        section = self.policies[name]
        for key in ("system", "thinking", "template"):
            if getattr(section, key) not in (None, {}) and not self.eval.chat:
                raise ValueError(f"policies.{name}.{key} needs a chat template, but eval.chat = false")
        if section.budget is not None and section.budget >= (self.eval.max_tokens or math.inf):
            raise ValueError(
                f"policies.{name}.budget = {section.budget} must be less than eval.max_tokens = {self.eval.max_tokens}"
            )
        checkpoints = [*self.compositions, *(one for one, other in self.policies.items() if other.model)]
        known = [*self.anchors, *checkpoints]
        for one in section.weights:
            if one not in known:
                raise ValueError(f"policies.{name}.weights names {one!r}; known: {', '.join(known) or 'none'}")
            if one in self.anchors and self.anchors[one].model is not None:
                raise ValueError(
                    f"policies.{name}.weights names {one!r}, a context: it has no weights to merge. Remove it"
                )
        if section.decode is not None and (why := self.cannot_decode(section.decode)):
            raise ValueError(f"policies.{name}.decode = {section.decode!r}: {why}")

    def cannot_decode(self, composition: str, cached: bool = True) -> str:
        """Explain why a target cannot be sampled from with live anchors; empty if it can. Budgets need the cache."""
        section = self.compositions.get(composition)
        if section is None:
            return "no such composition"
        if section.method != "joint":
            return f"its method is {section.method}; only shifts that act together have a target to sample from"
        if section.is_placebo:
            return "it is a placebo, a control that is compared after training"
        if section.slots:
            return "it has effort levels, whose targets differ"
        return self.needs_cache(composition, solved=cached)

    def _check_where(self, name: str) -> None:
        """Refuse spans that nobody defines, and grades of responses whose answers nobody knows."""
        where = self.anchors[name].where
        if ANSWER in self.spans:
            raise ValueError(f"spans.{ANSWER} is the name of what follows thinking and tool calls; give it another one")
        known = (*SPANS, ANSWER, *self.spans)
        for key in ("inside", "outside"):
            if where and (span := getattr(where, key)) and span not in known:
                raise ValueError(
                    f"anchors.{name}.where.{key} = {span!r}: known spans: {', '.join(dict.fromkeys(known))}"
                )
        has_answers = self.prompts.columns.answer or self.prompts.format == "livecodebench" or self.rollout.from_
        if (graded := self.anchors[name].graded) and not has_answers:
            raise ValueError(f"anchors.{name}.{graded} needs answers to the prompts: set prompts.columns.answer")
        if self.anchors[name].run_columns and self.rollout.responses < 2:
            raise ValueError(f"anchors.{name} reads other responses to a prompt: set rollout.responses to 2 or more")

    @model_validator(mode="after")
    def _rounds_come_out_even(self) -> Self:
        rows = self.train.prompts_per_round * self.rollout.responses
        if rows % self.train.updates_per_round:
            raise ValueError(
                f"train.updates_per_round is {self.train.updates_per_round}, which does not divide a round of "
                f"{self.train.prompts_per_round} prompts x {self.rollout.responses} responses = {rows} trajectories"
            )
        take = self.prompts.take
        for name, composition in self.compositions.items():
            if composition.method != "joint" or take is None or self.rollout.from_ is not None:
                continue
            rounds = (composition.epochs or self.train.epochs) * -(-take // self.train.prompts_per_round)
            if composition.refresh != "auto" and composition.refresh > rounds:
                raise ValueError(
                    f"compositions.{name}.refresh = {composition.refresh}, but {take} prompts make at most {rounds} "
                    "rounds (train.epochs, train.prompts_per_round), and a part has at least one"
                )
        return self

    @model_validator(mode="after")
    def _add_replicates(self) -> Self:
        written = self.written
        merges = {name: one for name, one in self.policies.items() if one.weights.keys() & written.keys()}
        for number in range(1, self.train.seeds):
            mark = f"~{number + 1}"
            for name, one in written.items():
                seed = (self.train.seed if one.seed is None else one.seed) + number
                self.compositions[name + mark] = one.model_copy(update={"seed": seed})
            for name, merge in merges.items():
                weights = {part + mark * (part in written): weight for part, weight in merge.weights.items()}
                self.policies[name + mark] = merge.model_copy(update={"weights": weights})
        return self


Loc = tuple[int | str, ...]
# A later file replaces these tables as a whole: half of one set of weights and half of another is never meant.
WHOLE_TABLES = frozenset({"weights", "levels", "control", "aliases"})
# Keys of earlier recipes, each with the key to write instead, or with what to do. VALUE and NAME are what was written.
_STAGES = get_args(EngineStage)
_REVISION = 'append it to the model: {} = "owner/name@REVISION"'
_CHECKED = [key for key in Checks.model_fields if key != "swapped"]
MOVED: dict[str, str] = {
    **{f"{stage}.{key}": f"engine.{key}" for stage in _STAGES for key in ("python", "parity")},
    **{f"{stage}.engine": f"engine.{stage}" for stage in _STAGES},
    **{f"{stage}.options": f"engine.options.{stage}" for stage in _STAGES},
    **{
        f"{stage}.dtype": f"write engine.dtype = VALUE, or for this stage alone engine.dtype = {{ {stage} = VALUE }}"
        for stage in _STAGES
    },
    "student.revision": _REVISION.format("student.model"),
    "policies.NAME.revision": _REVISION.format("policies.NAME.model"),
    "prompts.revision": _REVISION.replace("model", "data").format("prompts.source"),
    **{f"anchors.NAME.{role}_revision": _REVISION.format(f"anchors.NAME.{role}") for role in get_args(Role)},
    **{
        f"anchors.NAME.{role}_url": f"write anchors.NAME.engine = {{ {role} = VALUE }}, or one URL for post and pre"
        for role in get_args(Role)
    },
    **{f"anchors.NAME.{key}": f"anchors.NAME.shift.{key}" for key in ("temperature", "only_above", "mass_floor")},
    "anchors.NAME.shift_clip": "anchors.NAME.shift.clip",
    "prompts.template": "prompts.format",
    "prompts.seed": "remove it: prompts are always drawn with seed 42",
    "eval.template": "eval.format",
    "rollout.top_p": "remove it: trajectories are sampled from the student's whole distribution (top_p 1)",
    "reference.token_budget": "score.token_budget",
    **{f"train.{key}": f"train.optimizer.{key}" for key in ("betas", "weight_decay", "clip")},
    "train.validate_every": "train.checkpoint_every",
    "train.keep": f"remove it: the newest {KEPT_CHECKPOINTS} checkpoints are kept",
    "train.allow_disagreement": "write train.agreement = false to train in spite of a difference",
    "harness.engine": "harness.args.model",
    "harness.options": "harness.args.model_args",
    "harness.dtype": "harness.args.model_args.dtype",
    "harness.fewshot": "harness.args.num_fewshot",
    "harness.limit": "harness.args.limit",
    "harness.generation": "harness.args.gen_kwargs",
    "harness.batch_size": "harness.args.batch_size",
    "harness.chat": "harness.args.apply_chat_template",
    "harness.seed": "remove it: the seed is eval.seed, unless harness.args has random_seed and its like",
    **{f"report.{key}": "remove it: what the loom shows is fixed" for key in ("trajectories", "seed", "megabytes")},
    **{
        f"report.cases.NAME.{key}": "remove it: how responses are drawn and cut is fixed"
        for key in ("seed", "beginning", "end")
    },
    **{f"checks.{key}_stop": f'write checks.{key} = VALUE, or "warn" where it was false' for key in _CHECKED},
    **{f"checks.{key}_warn": f"remove it: it is fixed; checks.{key} = false warns of nothing" for key in _CHECKED},
    "checks.separation_stop": "checks.swapped",
    "checks.longer_stop": "remove it: it is fixed; checks.swapped = false switches it off",
    **{f"checks.empty_{key}": "remove it: checks.unanswered is also for empty responses" for key in ("stop", "warn")},
}
MOST_BYTES = 10 << 20  # of a recipe file


def load_recipe(files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """Read one recipe file or several, merge them left to right, apply `key=value` overrides, and check the result."""
    files = [files] if isinstance(files, str | Path) else files
    where = " + ".join(str(file) for file in files)
    merged: dict[str, Any] = {}
    try:
        for file in files:
            merged = merge_tables(merged, read_toml(Path(file)))
        return check_recipe(merge_overrides(merged, overrides), where)
    except RecursionError:
        raise InputError(f"{where}: tables or lists are nested too deeply") from None


def check_recipe(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Validate a recipe given as plain data."""
    try:
        if key := _find(data, lambda _, text: bool(CONTROL.search(text))):
            raise InputError(f"{where}: {key} contains a control character or a byte that is not UTF-8; remove it")
        if key := _find(data, _is_credential):  # recipes are logged, published and shown by trackers
            raise InputError(f"{where}: {key} is a password or a token, or a URL with one. Use environment variables")
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise InputError(explain(error, data, where)) from None
    except RecursionError:
        raise InputError(f"{where}: tables or lists are nested too deeply") from None


def _find(value: Any, is_wrong: Callable[[str, str], bool], name: str = "") -> str:
    """Find the key of a text with something wrong, by its name and the text; empty if there is none."""
    if isinstance(value, str):
        return "here" if is_wrong(name, value) else ""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        if found := _find(key, is_wrong) or _find(one, is_wrong, str(key)):
            return f"{key}.{found}".removesuffix(".here")
    return ""


def _is_credential(name: str, text: str) -> bool:
    is_url = not re.search(r"\s", text)  # a prompt may quote one
    return bool(SECRET.fullmatch(name)) or (is_url and hide_credentials(text) != text)


def merge_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` overrides from left to right. One weight (`compositions.x.weights.a=0.7`) keeps the others."""
    merged = dict(data)
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--set {override}: must look like key=value, for example --set train.learning_rate=1e-5")
        try:
            inner: Any = tomllib.loads(f"{key} = 0")
        except ValueError:
            raise InputError(f"--set {override}: {key!r} is not a dotted key such as train.learning_rate") from None
        try:
            parsed = tomllib.loads(f"{key} = {value}")
        except ValueError:  # not a TOML value: a bare string
            parsed = tomllib.loads(f"{key} = {json.dumps(value)}")
        entered: set[str] = set()  # the tables that the dotted key leads into: they are merged, not replaced
        while isinstance(inner, dict):
            ((name, inner),) = inner.items()
            entered |= {name} if isinstance(inner, dict) else set()
        merged = merge_tables(merged, parsed, WHOLE_TABLES - entered)
    return merged


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any], whole: Set[str] = WHOLE_TABLES) -> dict[str, Any]:
    """Lay one recipe over another; tables are merged, except those that only make sense as a whole."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value, whole) if both_tables and key not in whole else value
    return merged


def dump_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as TOML, defaults included."""
    return tomli_w.dumps(recipe.model_dump(mode="json", by_alias=True, exclude_none=True))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MB, so not a recipe")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe. Give the path of a TOML file, absolute or from here") from None
    except IsADirectoryError:
        such = f", such as {path / 'recipe.toml'}" if (path / "recipe.toml").is_file() else ""
        raise InputError(f"{path} is a directory; give the path of a recipe file (TOML){such}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); recipes are TOML") from None
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError; an integer of thousands of digits
        reason = str(error).partition(";")[0].replace("at end of document", f"at line {len(text.splitlines())}")
        at = re.search(r"at line (\d+)", reason)
        line = text.splitlines()[int(at[1]) - 1].strip()[:80] if at else ""
        raise InputError(f"{path}: broken TOML: {reason}" + f": {line}" * bool(line)) from None


def explain(error: ValidationError, data: Mapping[str, Any], where: str) -> str:
    """Explain the first error and name the others. A misspelt key comes before the one that is missing for it."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    details = [detail for detail in details if not _is_filled_in(detail["loc"], data)] or details
    detail = details[0]
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    path = _written(loc, data)
    key = ".".join(map(str, path))
    shown = _show(detail["input"])
    match detail["type"]:
        case "extra_forbidden":
            first = _explain_unknown(loc, shown, data)
        case "missing":
            section, _ = _locate(loc)
            field = section.model_fields.get(str(loc[-1])) if section else None
            first = f"{key} is missing" + (f": {field.description}" if field and field.description else "")
        case "model_type" | "model_attributes_type" | "dict_type":
            first = f"{key} = {shown}: must be a table"
        case "union_tag_invalid":
            *others, last = METHODS
            allowed = f"{', '.join(map(repr, others))} or {last!r}"
            first = f"{key}.method = {_show(detail['input']['method'])}: must be {allowed}"
        case "value_error":
            written: Any = data  # pydantic gives what another validator has made of it
            for part in path:
                written = written[part]
            message = str(detail["ctx"]["error"])
            first = f"{key} = {_show(written)}: {message}" if path else message
        case "string_type" if path[:2] == ("eval", "graders"):
            examples = '"exact", "numeric:0.01", "regex:#### (.*)", "my.py:grade"'
            first = f"{key} = {shown}: must be one text, such as {examples}"
        case _:
            message = detail["msg"].replace("Input should be", "must be")
            same = [other for other in details[1:] if _written(tuple(other["loc"]), data) == path]
            message += "".join(f" or {other['ctx']['expected']}" for other in same if other["type"] == "literal_error")
            first = f"{key} = {shown}: {message[0].lower()}{message[1:]}"
    keys = dict.fromkeys(".".join(map(str, _written(tuple(other["loc"]), data))) for other in details[1:])
    more = [other for other in keys if other not in first]  # the correct spelling of a misspelt key is there already
    return f"{where}: {first}" + f" (also wrong or missing: {', '.join(more)})" * bool(more)


def _explain_unknown(loc: Loc, value: str, data: Mapping[str, Any]) -> str:
    """Answer an unknown key with what to write: its new name, the method that has it, or the nearest key."""
    section, pattern = _locate(loc)
    path = _written(loc, data)
    key = ".".join(map(str, path))
    if new := MOVED.get(pattern):
        name = str(path[pattern.split(".").index("NAME")]) if "NAME" in pattern else ""
        answer = new if " " in new else f"write {new} = VALUE"
        return f"{key} = {value}: {answer.replace('NAME', name).replace('VALUE', value)}"
    keys = [] if section is None else [field.alias or name for name, field in section.model_fields.items()]
    alike = keys
    if section in METHODS.values():
        method, unknown = str(loc[2]), str(loc[-1])
        having = [f'"{other}"' for other, its in METHODS.items() if unknown in its.model_fields]
        if having and method == "joint" and "method" not in data["compositions"][loc[1]]:
            return f"{key} = {value}: add method = {having[0]}"
        if having:
            remedy = "set alpha" if unknown == "kl_budget" else "remove it"
            return f'{key} = {value}: method = "{method}" has no {unknown}, only {" and ".join(having)}: {remedy}'
        alike = [name for its in METHODS.values() for name in its.model_fields]
    close = difflib.get_close_matches(str(loc[-1]), alike, n=1, cutoff=0.6)
    if close:
        return f"unknown key {key}. Did you mean {'.'.join(map(str, (*path[:-1], close[0])))}?"
    return f"unknown key {key}." + (f" Known here: {', '.join(keys)}" if keys else "")


def _is_filled_in(loc: Loc, data: Mapping[str, Any]) -> bool:
    """Whether this is the weights of a composition with levels: those of its default level, which is reported."""
    return loc[:1] == ("compositions",) and loc[3:4] == ("weights",) and "levels" in data["compositions"][loc[1]]


def _written(loc: Loc, data: Any) -> Loc:
    """The key as people write it, without the tags that pydantic adds: methods, and the types that a value may have."""
    if loc[:1] == ("compositions",):
        loc = (*loc[:2], *("weights" if part == "routes" else part for part in loc[3:]))  # weights by tag
    for depth, part in enumerate(loc):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            return loc[:depth]
    return loc


def _locate(loc: Loc) -> tuple[type[BaseModel] | None, str]:
    """Follow a key to the section that holds it; also returns the key with NAME for names that users choose."""
    section: type[BaseModel] | None = Recipe
    known: list[str] = []
    rest = list(loc)
    while len(rest) > 1 and section is not None:
        known.append(str(rest.pop(0)))
        field = section.model_fields.get(known[-1])
        if field is not None and get_origin(field.annotation) is dict:
            known.append("NAME")
            rest.pop(0)
        inner = sections_in(field.annotation) if field is not None else []
        section = inner[0] if inner else None
        if known[0] == "compositions" and rest:
            section = METHODS.get(str(rest.pop(0)))
    return section, ".".join([*known, *map(str, rest)])


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key leads to; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
