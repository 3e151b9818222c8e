"""What each stage of a recipe is: its settings, the identity of its model, its inputs, the command that makes it.

This is the one place that knows which stage depends on which. Execution settings (batch sizes, token budgets, ranks,
threads) are left out: they are recorded elsewhere, never fingerprinted.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_weave.config import (
    HARNESS,
    Objective,
    Recipe,
    Score,
    Train,
    benchmark_folder,
    is_own_function,
    slug,
)
from lightning_weave.errors import InputError
from lightning_weave.grading.graders import grading_of
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.runs.changes import as_made
from lightning_weave.runs.scored import ROLES, Role, ScoredModel
from lightning_weave.runs.settings import (
    SHIFT_RULES,
    TRAIN_EXECUTION,
    data_identity,
    engine_settings,
    loss_settings,
    method_settings,
    own_content,
    quantization,
    template_identity,
    with_engines,
    without_defaults,
    without_unset,
)
from lightning_weave.store import MANIFEST, RunIdentities, Step, Store, recorded

IDENTITIES = "identities.json"


@dataclass(frozen=True)
class Steps:
    """All steps of one recipe. `arguments` is how a command named it, None from Python: messages say what to type."""

    recipe: Recipe
    arguments: str | None = "RECIPE"
    trust: bool = False  # whether Python files that the recipe names may run: the command says it, never the recipe
    standing: bool = False  # take what is finished as it is on disk, whatever the recipe says now
    sampler: Checkpoint | None = None  # what samples in the student's place: the student as training has left it
    _identities: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", with_engines(self.recipe))

    @property
    def store(self) -> Store:
        return Store(Path(self.recipe.runs) / self.recipe.name)

    @cached_property
    def student(self) -> Checkpoint:
        return Checkpoint.of(self.recipe.student)

    def policy(self, name: str) -> Checkpoint:
        """The checkpoint of anything that can be evaluated: the student, a composition that is trained, another."""
        if name in self.recipe.compositions:
            stage = self.store.stage(self.train(name))
            stage.require()
            return self.student.at(stage.folder / "final")
        return Checkpoint.of(self.recipe.policies[name]) if name in self.recipe.policies else self.student

    def identity_of(self, checkpoint: Checkpoint) -> str:
        """Say what a model is. The double of a rehearsal is one in rehearsals only."""

        def look() -> str:
            if checkpoint.is_double and not self.recipe.rehearsal:
                raise InputError(
                    f"{checkpoint}: made by a rehearsal, of random weights. Give the checkpoint that it stands for"
                )
            return checkpoint.identity

        return self._known.identity(str(checkpoint), look)

    def _data_identity(self, source: str, key: str) -> str:
        """Say what data is. A directory that is gone would be taken for a hub name: what the run knows comes first."""

        def look() -> str:
            gone = not Path(source).expanduser().exists()
            return (gone and self._known.remembered.get(source)) or data_identity(source, key)

        return self._known.identity(source, look)

    @cached_property
    def _known(self) -> RunIdentities:
        return RunIdentities(self.store.run_dir / IDENTITIES, self._identities)

    def remember(self) -> None:
        """Keep the identities of this run's models and data, so that they may be moved once they are not needed."""
        self._known.keep()

    @property
    def prompts_file(self) -> Path:
        """Where the prompts of the run are."""
        return self.store.stage(self.prompts).folder / "prompts.jsonl"

    @cached_property
    def prompts(self) -> Step:
        if self.recipe.rollout.from_ is not None:
            source = self._data_identity(self.recipe.rollout.from_, "rollout.from")
            settings: dict[str, Any] = {"from": source}
        else:
            if self.recipe.prompts.source is None:
                raise InputError(
                    "prompts.source is missing: a JSONL or Parquet file, a dataset directory or a hub name"
                )
            settings = without_unset(self.recipe.prompts.model_dump(mode="json"))
            settings["source"] = self._data_identity(self.recipe.prompts.source, "prompts.source")
            settings["screen_against"] = [
                self._data_identity(name, "prompts.screen_against") for name in self.recipe.prompts.screen_against
            ]
        command = self.command("rollout" if self.needs_cache else "train")
        settings["student"] = self.identity_of(self.student)
        return self._step(Step("prompts", self._as_made("prompts", settings), (), command))

    def _step(self, step: Step) -> Step:
        """A step as the recipe says it, or as it stands: a cache only where it was made from what stands, too."""
        if not self.standing:
            return step
        stage = self.store.stage(step)
        is_result = step.path.startswith(("train/", "eval/"))
        return stage.standing() if is_result or not stage.changed_inputs() else step

    def _as_made(self, path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings as the finished stage has them, where the difference does not matter."""
        folder = self.store.run_dir / path
        return as_made(settings, recorded(folder) if (folder / MANIFEST).exists() else None)

    @cached_property
    def rollout(self) -> Step:
        names = {"responses", "temperature", "top_p", "max_tokens", "seed", "engine", "dtype", "prompts_per_shard"}
        if self.recipe.rollout.from_ is not None:
            names = {"prompts_per_shard"}
        settings = self.recipe.rollout.model_dump(mode="json", include=names)
        settings |= quantization(self.recipe.rollout)
        settings["student"] = self.identity_of(self.sampler or self.student)
        return self._step(Step("rollout", settings, (self.prompts,), self.command("rollout")))

    @cached_property
    def proposal(self) -> Step:
        """The candidates of what samples in the student's place; the reference says what the student makes of them."""
        assert self.sampler is not None, "the student proposes its own"
        return self._reference("proposal", self.sampler, self.rollout)

    @cached_property
    def reference(self) -> Step:
        return self._reference("reference", self.student, self.proposal if self.sampler else self.rollout)

    def _reference(self, path: str, model: Checkpoint, before: Step) -> Step:
        section = self.recipe.reference
        settings = {"candidates": section.candidates, "dtype": section.dtype, **engine_settings(section)}
        settings |= self._rounding
        settings["student"] = self.identity_of(model)
        return self._step(Step(path, settings, (before,), self.command("reference")))

    def score(self, scored: ScoredModel) -> Step:
        settings = {
            "dtype": self.recipe.score.dtype,
            **({"engine": "vllm server"} if scored.url else engine_settings(self.scoring(scored))),
            "model": self.identity_of(scored.checkpoint),
            "aliases": dict(scored.aliases),
            "untrained": scored.untrained,
            "bos": scored.bos,
            "prompt": scored.prompt,
            **self._rounding,
        }
        if scored.template is not None:
            settings["template"] = template_identity(scored.template.light_path)
        if scored.context:
            settings["context"] = scored.context.model_dump(exclude_none=True)
            settings |= {"missing": "mask"} if scored.masks_missing else {}
        name = self.score_names[scored]
        command = self.command("score", name)
        return self._step(Step(f"score/{name}", settings, (self.reference,), command))

    def scoring(self, scored: ScoredModel) -> Score:
        """[score], with the engine that this side has of its own."""
        engine = "vllm" if scored.url else scored.engine
        if engine is None:
            return self.recipe.score
        return self.recipe.score.model_copy(update={"engine": engine, "options": dict(scored.options)})

    @cached_property
    def score_names(self) -> dict[ScoredModel, str]:
        """Folder names of the models to score: short, and distinct where two would clash."""
        models = [self.side(anchor, role) for anchor in self.recipe.anchors for role in ROLES]
        names: dict[ScoredModel, str] = {}
        for scored in dict.fromkeys(models):
            name = slug(scored.checkpoint.name)
            # The first keeps it: an anchor that is added later renames no other. What is in no context comes first.
            if scored.context or name in names.values():
                name = f"{name}-{hashlib.sha256(scored.text.encode()).hexdigest()[:6]}"
            names[scored] = name
        return names

    def side(self, anchor: str, role: Role) -> ScoredModel:
        """One of the two sides of an anchor, as it is scored."""
        section = self.recipe.anchors[anchor]
        context = self.recipe.side(anchor, role).context
        return ScoredModel(
            checkpoint=self.anchor(anchor, role),
            aliases=tuple(sorted(section.aliases.items())),
            checks_aliases=role == "pre" and bool(section.aliases),
            untrained=section.untrained if role == "pre" and section.aliases else None,
            bos=section.bos,
            prompt=section.prompt,
            template=self.anchor(anchor, "post") if section.prompt == "native" else None,
            context=context,
            masks_missing=section.missing == "mask" and bool(context.columns),
            engine=section.engine,
            options=tuple(sorted(section.options.items())),
            url=section.post_url if role == "post" else section.pre_url,
        )

    def anchor(self, name: str, role: Role) -> Checkpoint:
        """One of the two models of an anchor."""
        side = self.recipe.side(name, role)
        if side.model is None:
            return self._base(name)
        return Checkpoint(side.model, side.revision, side.trust_remote_code)

    def _base(self, anchor: str) -> Checkpoint:
        """The base of an anchor that is an adapter; known to the run even if the adapter is gone."""
        adapter = self.anchor(anchor, "post")

        def look() -> str:
            base = adapter.base
            return json.dumps(base and [base.name, base.revision])

        named = json.loads(self._known.identity(f"base of {adapter}", look))
        if named is None:
            raise InputError(
                f"anchors.{anchor}.pre is missing: {adapter.name} is no LoRA adapter that says its base. It "
                "is the checkpoint that post was trained from"
            )
        name, revision = named
        return replace(adapter, name=name, revision=revision)

    def has_shift(self, anchor: str) -> bool:
        """Whether the two sides of an anchor differ: another model, or another context."""
        post, pre = (self.side(anchor, role) for role in ROLES)
        return post.context != pre.context or self.identity_of(post.checkpoint) != self.identity_of(pre.checkpoint)

    def scores_of(self, anchor: str) -> tuple[Step, Step]:
        """The steps of a pair: post, then pre."""
        return self.score(self.side(anchor, "post")), self.score(self.side(anchor, "pre"))

    def train(self, name: str) -> Step:
        composition = self.recipe.compositions[name]
        used = sorted(composition.used)
        settings = {
            "train": without_defaults(self.train_section(name).model_dump(mode="json", exclude=TRAIN_EXECUTION)),
            "objective": self._objective_settings(name),
            "weights": {anchor: composition.weights.get(anchor, 0.0) for anchor in used},
            "alpha": composition.alpha,
            "anchors": {anchor: self._shift_settings(anchor) for anchor in used},
            "student": self.identity_of(self.student),
            **method_settings(self.recipe, composition),
            **loss_settings(composition, self.objective(name)),
            **self._rounding,
        }
        if composition.routes:
            tags = self.recipe.tags.model_dump(mode="json", exclude_defaults=True)
            settings["routes"] = {"tags": tags, "weights": composition.by_tag}
        scores = {step.path: step for anchor in used for step in self.scores_of(anchor)}
        cached = (self.reference, *scores.values())
        inputs = (self.prompts,) if composition.method == "online" else cached
        path = f"train/{name}"
        command = self.command("train", name)
        return self._step(Step(path, self._as_made(path, settings), inputs, command))

    def train_section(self, name: str) -> Train:
        """[train], with what a composition has of its own."""
        epochs = self.recipe.compositions[name].epochs
        return self.recipe.train if epochs is None else self.recipe.train.model_copy(update={"epochs": epochs})

    def objective(self, name: str) -> Objective:
        """What a composition minimises: its own choice, or the recipe's; online, DOPD's own."""
        composition = self.recipe.compositions[name]
        return composition.objective or (
            "direct-opd" if composition.method == "online" else self.recipe.train.objective
        )

    def _objective_settings(self, name: str) -> str | dict[str, str]:
        """Say what a composition minimises; a user's own function by its content."""
        objective = self.objective(name)
        return own_content(objective, f"objective of compositions.{name}") if is_own_function(objective) else objective

    def alpha(self, name: str) -> float | None:
        """The alpha of a composition: as said, or as training solved it; None where it has yet to be solved."""
        alpha = self.recipe.compositions[name].alpha
        if alpha is not None:
            return alpha
        stage = self.store.stage(self.train(name))
        return float(stage.require()["alpha"]) if stage.state() == "done" else None

    @property
    def _rounding(self) -> dict[str, Any]:
        """What the machine does to numbers, where that is not left at its best."""
        return {"tf32": True} if self.recipe.machine.tf32 else {}

    def _shift_settings(self, anchor: str) -> dict[str, Any]:
        section = self.recipe.anchors[anchor]
        post, pre = self.scores_of(anchor)
        rules = section.model_dump(mode="json", include=SHIFT_RULES, exclude_defaults=True)
        return {"post": dict(post.settings), "pre": dict(pre.settings), "validity": section.validity, **rules}

    @property
    def policies(self) -> list[str]:
        """Everything that can be evaluated: the student, every composition, every other checkpoint."""
        return ["base", *self.recipe.compositions, *self.recipe.policies]

    @property
    def lora_rank(self) -> int | None:
        """The rank of the students that are evaluated as adapters in one engine; None where they are merged."""
        section = self.recipe.eval
        lora = self.recipe.train.lora
        return lora.rank if lora is not None and section.adapters and section.engine == "vllm" else None

    def eval(self, policy: str, benchmark: str) -> Step:
        section = self.recipe.asked(policy)
        execution = {"python", "options", "parity", "batch_size", "unsafe_local", "adapters"}
        settings = section.model_dump(mode="json", exclude={"benchmarks", "sources", "graders", *execution})
        settings = without_unset(settings) | {"profile": self._grading(benchmark)} | quantization(section)
        if policy in self.recipe.compositions and self.lora_rank is not None:
            settings["adapters"] = True
        source = section.sources.get(benchmark, benchmark.removeprefix("file:"))
        key = f"eval.sources.{benchmark}" if benchmark in section.sources else "eval.benchmarks"
        settings["benchmark"] = self._data_identity(source, key)
        return self._measured(policy, benchmark_folder(benchmark), settings, self.command("eval", policy))

    def harness(self, policy: str, task: str) -> Step:
        """A task of another harness. Its version and data are that environment's, and not known before it runs."""
        section = self.recipe.harness
        names = {"chat", "fewshot", "limit", "generation", "engine", "options", "dtype", "seed"}
        settings = {"benchmark": f"lm-eval:{task}", **section.model_dump(mode="json", include=names)}
        if section.include is not None:
            settings["include"] = self._data_identity(section.include, "harness.include")
        return self._measured(policy, f"{HARNESS}{slug(task)}", settings, self.command("harness", policy))

    def _measured(self, policy: str, folder: str, settings: dict[str, Any], command: str) -> Step:
        """The evaluation of a policy in a folder of its own."""
        inputs: tuple[Step, ...] = ()
        if policy in self.recipe.compositions:
            inputs = (self.train(policy),)
        elif policy in self.recipe.policies:
            settings["model"] = self.identity_of(Checkpoint.of(self.recipe.policies[policy]))
        else:
            settings["model"] = self.identity_of(self.student)
        subject = frozenset({"model", "benchmark"})
        return self._step(Step(f"eval/{policy}/{folder}", settings, inputs, command, subject=subject))

    def _grading(self, benchmark: str) -> str | dict[str, Any]:
        """Say how a benchmark is graded; a user's own function by its content."""
        rule = grading_of(self.recipe.eval, benchmark)
        if rule.function is None:
            settings = rule.model_dump(mode="json", exclude_defaults=True)
            return rule.kind if settings.keys() == {"kind"} else settings
        return {"kind": rule.kind, **own_content(rule.function, f"eval.graders.{benchmark_folder(benchmark)}.function")}

    @property
    def cache(self) -> list[Step]:
        """What offline training reads, and what that is made from."""
        return [step for verb in ("rollout", "reference", "score") for step in self.made_by(verb)]

    def everything(self) -> list[Step]:
        """All steps in the order in which they can be made."""
        results = [step for verb in ("train", "eval") for step in self.made_by(verb)]
        steps = [*(self.cache if self.needs_cache else []), *results]
        return list({step.path: step for step in steps}.values())

    def made_by(self, verb: str, only: Sequence[str] | None = None) -> list[Step]:
        """The steps that a verb makes; `only` names models, compositions or policies, as its option does."""

        def wanted(name: str) -> bool:
            return only is None or name in only

        match verb:
            case "rollout":
                return [self.prompts, self.rollout]
            case "reference":
                return [*([self.proposal] if self.sampler else []), self.reference]
            case "score":
                return [self.score(scored) for scored, name in self.score_names.items() if wanted(name)]
            case "train":
                trains = [self.train(name) for name in self.recipe.compositions if wanted(name)]
                return [*([self.prompts] if "online" in self.methods(only) else []), *trains]
            case "eval":
                policies = filter(wanted, self.policies)
                own = [self.eval(policy, name) for policy in policies for name in self.recipe.eval.benchmarks]
                return [*own, *self.made_by("harness", only)]
            case "harness":
                policies = filter(wanted, self.policies)
                return [self.harness(policy, task) for policy in policies for task in self.recipe.harness.tasks]
            case _:
                raise AssertionError(verb)

    def methods(self, only: Sequence[str] | None = None) -> set[str]:
        """The methods of these compositions, or of all."""
        named = self.recipe.compositions.items()
        return {composition.method for name, composition in named if only is None or name in only}

    @property
    def needs_cache(self) -> bool:
        """Online training alone needs none; neither does a recipe that only evaluates."""
        methods = self.methods()
        return methods != {"online"} if methods else bool(self.recipe.anchors)

    def command(self, verb: str, only: str = "") -> str:
        """Say what to type: a command, or from Python a method of the run."""
        if self.arguments is None:
            return f"run.{verb}({only!r})" if only else f"run.{verb}()"
        words = {"harness": f"eval {self.arguments} --harness lm-eval"}.get(verb, f"{verb} {self.arguments}")
        return f"lweave {words} --only {only}" if only else f"lweave {words}"
