"""`Run`, a recipe and its directory: the settings, models and inputs of every stage, and the command that computes it.

Keys that are marked as execution in config/ (batch sizes, token budgets, ranks) are not part of a fingerprint.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Literal, assert_never

from lightning_weave.bench.definitions import KNOWN, load_benchmark
from lightning_weave.config import (
    HARNESS,
    HELD_OUT,
    STUDENT,
    Composition,
    Distilled,
    Grading,
    Joint,
    Mixture,
    Objective,
    Online,
    PromptContext,
    Recipe,
    Role,
    SelfDistilled,
    Sequential,
    StageEngine,
    benchmark_folder,
    is_own_function,
    replicate_of,
    slug,
)
from lightning_weave.devices import sees_gpu
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.grading.graders import choose_grading
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.prompts.build import HELD_OUT_RULE, template_columns
from lightning_weave.store import (
    Stage,
    differences,
    file_identities,
    file_identity,
    fingerprint,
    read_checked,
    write_checked,
)

ROLES: tuple[Role, Role] = ("post", "pre")
UNWEIGHTED = {"direct-opd", "reverse-kl", "reverse-kl-full"}  # objectives whose loss is not weighted by b
DUMP: Any = {"mode": "json", "by_alias": True, "exclude_none": True}  # how pydantic writes tables of a recipe
ENGINES = ("rollout", "reference", "score", "eval")  # sections that name one
NUMERIC_OPTIONS = ("quantization", "kv_cache_dtype")  # of vLLM: the others only change its speed and memory
IDENTITIES = "identities.json"
# Keys of [eval] that are part of an evaluation in another form: by content, or where they are used.
EVAL_RESOLVED = ("benchmarks", "sources", "graders", "adapters", "final")
Kind = Literal["prompts", "rollout", "proposal", "reference", "score", "train", "merge", "eval", "harness"]
RESULTS = ("train", "eval")


@dataclass(frozen=True)
class Side:
    """One side of an anchor: a checkpoint in a context. Scored once, however many pairs share it."""

    checkpoint: Checkpoint
    aliases: tuple[tuple[str, str], ...]
    checks_aliases: bool  # pre side with aliases: look for untrained output rows
    untrained: Literal["keep", "mask"] | None  # of a pre-anchor with aliases; None elsewhere
    bos: bool
    prompt: Literal["student", "native"]
    template: Checkpoint | None  # the checkpoint whose chat template both sides use natively: post
    context: PromptContext  # empty: the prompt as it is
    masks_missing: bool  # a row without a column that the context names is masked, not refused
    engine: Literal["hf", "vllm"] | None = None  # None: engine.score
    options: tuple[tuple[str, bool | int | float | str], ...] = ()
    url: str | None = None  # of a server that runs it

    @property
    def reads_other_prompts(self) -> bool:
        """Whether it reads something other than the student's prompt."""
        return self.prompt == "native" or bool(self.context)

    def with_student_prompts(self) -> "Side":
        """The same checkpoint with the student's prompts: usable before other prompts can be rendered."""
        return replace(self, prompt="student", template=None, context=PromptContext(), masks_missing=False)


def explain_missing(stage: Stage) -> str:
    """Name the keys of the recipe by which a stage differs from the nearest folder that exists; empty if none does."""
    compared = [(dict(differences(dict(one.settings), dict(stage.settings))), one) for one in stage.siblings()]
    if not compared:
        return ""
    changes, nearest = min(compared, key=lambda one: len(one[0]))
    if changes:
        given = {key: what for key, what in changes.items() if key != "loss_weights"}  # which follows from the others
        reasons = dict.fromkeys(explain_change(stage.path, key, what) for key, what in given.items())
        return f"{'; '.join(reasons)} ({nearest.folder.name} is kept)"
    causes = [cause for inner in stage.inputs if not inner.complete and (cause := explain_missing(inner))]
    inputs = (nearest.manifest() or {}).get("inputs", {})
    changed = [inner.path for inner in stage.inputs if inputs.get(inner.path) != inner.fingerprint]
    return causes[0] if causes else f"another {', '.join(changed)}" if changed else ""


# The key of the recipe behind a setting of a stage, as STAGE.SETTING; NAME is the composition or policy. First match.
KEYS_OF_SETTINGS = (
    (r"(.*\.)?tf32", "machine.tf32"),
    (r"(.*\.)?date", "date"),
    (r"prompts\.held_out", f'"{HELD_OUT}" in eval.benchmarks'),
    (r"prompts\.(from|responses)", r"rollout.\1"),
    (r"\w+\.student(\..*)?", "student.model"),
    (r"(?:train\.)?(rollout|reference|score|eval)\.engine", r"engine.\1"),
    (r"(train\.(rollout|anchors\..*)|rollout|reference|score|eval)\.dtype", "engine.dtype"),
    (rf"(?:train\.rollout|rollout|reference|score|eval)\.({'|'.join(NUMERIC_OPTIONS)})", r"engine.options.\1"),
    (rf"train\.(anchors\..*)\.(?:post|pre)\.({'|'.join(NUMERIC_OPTIONS)})", r"\1.options.\2"),
    (r"train\.(anchors\..*\.(?:post|pre))\.model", r"\1"),
    (r"train\.(anchors\..*\.(?:post|pre))\.context", r"\1_prompt"),
    (r"train\.(anchors\..*)\.post\.template|train\.(anchors\..*)\.pre\.template", r"the chat template of \1\2"),
    (r"train\.(anchors\..*)\.(?:post|pre)\.(.*)", r"\1.\2"),
    (r"train\.anchors\..*\.where\.(spans\..*)", r"\1"),
    (r"train\.(anchors\..*)\.(clip|temperature|only_above|mass_floor)", r"\1.shift.\2"),
    (r"train\.anchors\..*\.grader", "eval.profile"),
    (r"train\.(?:routes\.)?(tags\..*|anchors\..*)", r"\1"),
    (r"train\.routes(?:\.weights)?(.*)", r"compositions.NAME.weights\1"),
    (r"train\.levels\.control|eval\.(control|level)(\..*)?", "compositions.NAME.control"),
    (r"train\.levels(\.slots)?", "compositions.NAME.levels"),
    (r"train\.candidates", "reference.candidates"),
    (r"train\.((train|rollout)(\..*)?)", r"\1"),
    (r"train\.(.*)", r"compositions.NAME.\1"),
    (r"score\.(.*)", r"\1"),
    (r"merge\.(.*)", r"policies.NAME.\1"),
    (r"eval\.((budget|template|model)(\..*)?)", r"policies.NAME.\1"),
    (r"eval\.target(\..*)?", r"policies.NAME.decode\1"),
    (r"eval\.benchmark(\..*)?", "the benchmark's file"),
)
LONGEST_CHANGE = 150  # characters that are shown


def explain_change(path: str, setting: str, what: str) -> str:
    """Name the recipe's key of a setting that changed, and how.

    >>> explain_change("rollout", "max_tokens", "12 -> 10")
    'rollout.max_tokens: 12 -> 10'
    >>> explain_change("train/even", "weights.acc", "0.5 -> 0.7")
    'compositions.even.weights.acc: 0.5 -> 0.7'
    >>> explain_change("train/even", "anchors.acc.post.model", "has changed")
    'anchors.acc.post has changed'
    """
    stage, _, name = path.partition("/")
    policy = replicate_of(name.partition("/")[0]).partition("@")[0]
    is_task = f"/{HARNESS}" in name and setting.split(".")[0] in ("args", "include")
    key = f"{'harness' if is_task else stage}.{setting}"
    if (stage, policy, setting) == ("eval", "base", "model"):
        key = "student.model"
    for pattern, replacement in KEYS_OF_SETTINGS:
        if found := re.fullmatch(pattern, key):
            key = found.expand(replacement).replace("NAME", policy)
            break
    what = "has changed" if len(what) > LONGEST_CHANGE else what
    return f"{key}: {what}" if "->" in what else f"{key} {what}"


def is_wanted(name: str, only: Collection[str] | None) -> bool:
    """Whether `only` names a policy, or the one of which it is a replicate."""
    return only is None or name in only or replicate_of(name) in only


def without_anchor_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the names of anchors by their content: renaming an anchor changes no result."""
    digests = {name: fingerprint(anchor) for name, anchor in settings["anchors"].items()}

    def rename(weights: Mapping[str, float]) -> list[list[Any]]:
        return sorted([digests.get(name, name), weight] for name, weight in weights.items())

    key = {**settings, "anchors": sorted(digests.values()), "weights": rename(settings["weights"])}
    if "sequence" in key:
        key["sequence"] = [digests[name] for name in key["sequence"]]
    if "levels" in key:
        slots = [[level, rename(weights), *dose] for level, weights, *dose in key["levels"]["slots"]]
        key["levels"] = {**key["levels"], "slots": slots}
    if "routes" in key:
        by_tag = {tag: rename(weights) for tag, weights in key["routes"]["weights"].items()}
        key["routes"] = {**key["routes"], "weights": by_tag}
    return key


def choose_engines(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Resolve engine = "auto" for every stage, with the reason. A run directory keeps its first choice."""
    chosen = {}
    before = resolved_recipe(recipe).get("engine")
    for name in ENGINES:
        if getattr(recipe.engine, name) != "auto":
            continue
        models: list[str | None] = [recipe.student.model]
        if name == "score":
            models += [model for one in recipe.anchors.values() for model in (one.post, one.pre, one.model)]
        if name == "eval":
            models += [policy.model for policy in recipe.policies.values() if policy.model]
        if isinstance(before, dict) and before.get(name) in ("hf", "vllm"):
            chosen[name] = (before[name], "as the run has it")
        elif not sees_gpu(recipe.machine.device):
            chosen[name] = ("hf", "no GPU for vLLM")
        elif recipe.engine.python is None and find_spec("vllm") is None:
            chosen[name] = ("hf", "vLLM is not installed")
        elif any((Path(model).expanduser() / "adapter_config.json").exists() for model in models if model):
            chosen[name] = ("hf", "vLLM cannot load a LoRA adapter")
        else:
            chosen[name] = ("vllm", "it is installed and there is a GPU")
    return chosen


def resolved_recipe(recipe: Recipe) -> dict[str, Any]:
    """Read the recipe in the run directory; before its first command, that of a published cache; else empty."""
    with suppress(OSError, ValueError):
        return tomllib.loads((Path(recipe.runs) / recipe.name / "recipe.toml").read_text(encoding="utf-8"))
    for url in (anchor.cache for anchor in recipe.anchors.values() if anchor.cache is not None):
        from lightning_weave.published import read_index

        with suppress(WeaveError):
            return dict(read_index(url)["recipe"])
    return {}


def engine_settings(engine: StageEngine) -> dict[str, Any]:
    """Return the engine settings that change results."""
    options = {name: engine.options[name] for name in NUMERIC_OPTIONS if name in engine.options}
    return {"engine": engine.engine, "dtype": engine.dtype, **(options if engine.engine != "hf" else {})}


def method_settings(recipe: Recipe, composition: Composition, objective: Objective) -> dict[str, Any]:
    """Return the fingerprint settings that depend on the training method."""
    rollout = recipe.rollout.model_dump(mode="json", include={"temperature", "max_tokens", "seed"})
    rollout |= engine_settings(recipe.engine_of("rollout"))
    settings: dict[str, Any] = {}
    match composition:
        case Joint():
            settings = {"refresh": composition.refresh, "rollout": rollout} if composition.parts > 1 else {}
            settings |= {"refresh_budget": composition.parts} if composition.refresh == "auto" else {}
            settings |= {} if composition.kl_budget is None else {"kl_budget": composition.kl_budget}
        case Mixture():
            settings = {"method": "mixture", "kl_budget": composition.kl_budget}
        case Distilled():
            settings = {"method": "teacher"}
        case SelfDistilled():
            settings = {"method": "self", "sharpen": composition.sharpen}
        case Online():
            rollout["responses"] = recipe.rollout.responses  # for other methods the cache determines it
            settings = {"method": "online", "rollout": rollout, "candidates": recipe.reference.candidates}
        case Sequential():
            order = {"sequence": composition.sequence, "dose": composition.dose, "resample": composition.resample}
            settings = {"method": "sequential", **order, "rollout": rollout}
        case _:
            assert_never(composition)
    # The student that samples differs from the student of the target, so the loss is weighted by the sampler. In a leg
    # of a sequential run both are the same.
    if composition.samples and composition.method != "sequential" and objective not in UNWEIGHTED:
        settings["loss_weights"] = "sampler"
    return settings


def own_content(function: str, where: str) -> dict[str, str]:
    """Name a user's own function by its name and by what is in its file."""
    path, _, name = function.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"{where} = {function!r}: no such file. Give FILE.py:NAME")
    return {"function": name, "content": file_identity(file)}


def template_files(checkpoint: Checkpoint) -> list[Path]:
    """List the files that can hold the chat template of a checkpoint."""
    return sorted(
        path for name in ("chat_template*", "tokenizer_config.json") for path in checkpoint.config_path.glob(name)
    )


@dataclass(eq=False)
class Run:
    """A recipe and its run directory. `stage` returns a stage with all that it depends on.

    `arguments` is the recipe as typed on the command line, for messages; None from Python.
    """

    recipe: Recipe
    arguments: str | None = "RECIPE"
    trust: bool = False  # whether programs and code that the recipe names may run: the command decides, not the recipe
    existing: bool = False  # use the newest complete folder where the recipe's own is not complete
    sampler: Checkpoint | None = None  # samples instead of the student (refreshed training)
    trains_in: Path | None = None  # where training writes, if not the run directory: for the legs of a sequence
    identities: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._published: dict[str, str] = {}  # identities that published anchors bring
        if any(anchor.cache is not None for anchor in self.recipe.anchors.values()):
            from lightning_weave.published import expand_recipe

            self.recipe, models, self._published = expand_recipe(self.recipe)
            self.identities |= {**models, **self.identities}
        self._code = {} if self.trust else self.recipe.code
        if self._code:
            self.recipe = self.recipe.without_remote_code()
        if engines := {name: engine for name, (engine, _) in choose_engines(self.recipe).items()}:
            section = self.recipe.engine.model_copy(update=engines)
            self.recipe = self.recipe.model_copy(update={"engine": section})
        if self.recipe.date is None:
            day = resolved_recipe(self.recipe).get("date", date.today().isoformat())
            self.recipe = self.recipe.model_copy(update={"date": str(day)})
        self._stages: dict[tuple[Any, ...], Stage] = {}

    def derive(self, **changes: Any) -> "Run":
        """Copy this run with some fields changed. (dataclasses.replace fails on subclasses.)"""
        return Run(**{one.name: changes.get(one.name, getattr(self, one.name)) for one in fields(Run)})

    def check_trust(self) -> None:
        """Refuse a recipe that names code or programs unless the command trusts it. Recipes are shared."""
        if self._code:
            key, value = next(iter(self._code.items()))
            more = f" (also: {', '.join(others)})" if (others := list(self._code)[1:]) else ""
            raise InputError(
                f"{key} = {json.dumps(value, ensure_ascii=False)} runs code or a program with your permissions{more}. "
                "If you have read what it runs, add --trust to the command; from Python: Run(..., trust=True)"
            )

    @property
    def directory(self) -> Path:
        return Path(self.recipe.runs) / self.recipe.name

    def stage(self, kind: Kind, *names: Any) -> Stage:
        """Return a stage; that of score takes a side, train a composition, eval and harness a policy and a task."""
        if (kind, *names) not in self._stages or self.existing:  # what exists may change
            stage: Stage = getattr(self, f"_{kind}")(*names)
            self._stages[(kind, *names)] = stage
            if self.existing and not stage.complete:
                inputs = {one.path: one.fingerprint for one in stage.inputs}
                is_result = stage.path.split("/")[0] in RESULTS
                for other in stage.siblings():  # newest first; an older cache only with the same inputs
                    if is_result or (other.manifest() or {}).get("inputs") == inputs:
                        return other
        return self._stages[(kind, *names)]

    @cached_property
    def student(self) -> Checkpoint:
        return Checkpoint.from_section(self.recipe.student)

    def policy(self, name: str) -> Checkpoint:
        """The checkpoint of anything that can be evaluated: the student, a composition that is trained, another."""
        if trained := self.composition_of(name):
            stage = self.stage("train", trained)
            stage.require()
            return self.student.at(stage.folder / "final")
        if self.recipe.merged(name):
            stage = self.stage("merge", name)
            stage.require()
            return self.student.at(stage.folder / "final")
        return self.asked_model(name)

    def asked_model(self, policy: str) -> Checkpoint:
        """The checkpoint whose tokenizer and chat template a policy uses: its own, or the student's."""
        section = self.recipe.policies.get(policy)
        return Checkpoint.from_section(section) if section is not None and section.model else self.student

    @cached_property
    def remembered(self) -> dict[str, str]:
        """The identities that earlier commands found, or that came with published anchors."""
        file = self.directory / IDENTITIES
        return {**self._published, **(read_checked(file) if file.exists() else {})}

    def identity(self, name: str, look: Callable[[], str]) -> str:
        """Return what something is: from `look`, once per command, or where that fails as the run remembers it."""
        if name not in self.identities:
            try:
                self.identities[name] = look()
            except InputError:
                if name not in self.remembered:
                    raise
                self.identities[name] = self.remembered[name]
        return self.identities[name]

    def remember(self) -> None:
        """Keep the identities of this run's models and data, so that they may be moved once they are not needed."""
        identities = {**self.remembered, **self.identities}
        if identities != self.remembered or not (self.directory / IDENTITIES).exists():
            write_checked(self.directory / IDENTITIES, identities)

    def identity_of(self, checkpoint: Checkpoint) -> str:
        """Identify a model by content. Stand-ins of a rehearsal are accepted only in rehearsals."""

        def look() -> str:
            if checkpoint.is_double and not self.recipe.rehearsal:
                raise InputError(f"{checkpoint}: made by a rehearsal, with random weights. Give the real checkpoint")
            return checkpoint.identity

        return self.identity(str(checkpoint), look)

    def _data_identity(self, source: str, key: str) -> str:
        """Identify data by content if it is a file or a directory, by name on a hub."""

        def look() -> str:
            path = Path(source).expanduser()
            if path.is_file():
                return file_identity(path)
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                return hashlib.sha256("".join(file_identities(files)).encode()).hexdigest()
            if source in self.remembered:  # a directory that is gone would be taken for a hub name
                return self.remembered[source]
            if path.suffix in {".jsonl", ".json", ".parquet"} or source.startswith((".", "/", "~")):
                raise InputError(
                    f"{key} = {source!r}: no such file. Give a JSONL or Parquet file, a directory or a hub name"
                )
            return source

        return self.identity(source, look)

    def check_data(self) -> None:
        """Refuse prompts and benchmarks that are missing, before heavy imports; data of finished stages may be gone."""
        recipe = self.recipe
        errors = []
        try:
            if recipe.compositions and recipe.prompts.source and recipe.rollout.from_ is None:
                self._data_identity(recipe.prompts.source, "prompts.source")
        except InputError as error:
            errors.append(str(error))
        for name in recipe.eval.benchmarks:
            file = name.removeprefix("file:")
            is_file = name != file and (Path(file).expanduser().exists() or file in self.remembered)
            if not is_file and name not in KNOWN and name != HELD_OUT:
                try:
                    load_benchmark(name)
                except InputError as error:
                    errors.append(f"eval.benchmarks: {error}")
        if errors:
            raise InputError("\n".join([*errors, "Nothing was run."]))

    def _dated(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The date of the run, where a chat template writes it."""

        def look() -> str:
            writes = any(b"strftime_now" in file.read_bytes() for file in template_files(checkpoint))
            return "writes a date" if writes else "writes no date"

        known = self.identity(f"chat template of {checkpoint}", look)
        return {"date": str(self.recipe.date)} if known == "writes a date" else {}

    @property
    def prompts_file(self) -> Path:
        """Where the prompts of the run are."""
        return self.stage("prompts").folder / "prompts.jsonl"

    def _prompts(self) -> Stage:
        recipe = self.recipe
        section = recipe.prompts
        if recipe.rollout.from_ is not None:
            source = self._data_identity(recipe.rollout.from_, "rollout.from")
            settings: dict[str, Any] = {"from": source, "responses": recipe.rollout.responses}
        elif section.source is None:
            raise InputError("prompts.source is missing: a JSONL or Parquet file, a dataset directory or a hub name")
        else:
            settings = section.settings(exclude_none=True)
            settings["source"] = self._data_identity(section.source, "prompts.source")
            screened = [self._data_identity(name, "prompts.screen_against") for name in section.screen_against]
            settings["screen_against"] = screened
            if HELD_OUT in recipe.eval.benchmarks:
                settings["held_out"] = HELD_OUT_RULE
        settings["student"] = self.identity_of(self.student)
        if section.chat or recipe.rollout.from_ is not None:
            settings |= self._dated(self.student)
        return Stage(self.directory, "prompts", settings, (), self.command("rollout" if self.needs_cache else "train"))

    def _rollout(self) -> Stage:
        section = self.recipe.rollout
        if section.from_ is not None:
            settings = section.model_dump(mode="json", include={"responses", "prompts_per_shard"})
        else:
            settings = section.settings("from_")
            settings |= engine_settings(self.recipe.engine_of("rollout"))
        settings["student"] = self.identity_of(self.sampler or self.student)
        return Stage(self.directory, "rollout", settings, (self.stage("prompts"),), self.command("rollout"))

    def _proposal(self) -> Stage:
        assert self.sampler is not None, "the student proposes its own candidates"
        return self._reference("proposal", self.sampler)

    def _reference(self, path: str = "reference", model: Checkpoint | None = None) -> Stage:
        """The candidates of the student, or of what samples in its place: it proposes those that the student scores."""
        settings = {
            "candidates": self.recipe.reference.candidates,
            **engine_settings(self.recipe.engine_of("reference")),
            "tf32": self.recipe.machine.tf32,
            "student": self.identity_of(model or self.student),
        }
        before = self.stage("proposal" if self.sampler and model is None else "rollout")
        return Stage(self.directory, path, settings, (before,), self.command("reference"))

    def _score(self, side: Side) -> Stage:
        settings = {
            **engine_settings(self.scoring(side)),
            **({"engine": "vllm server"} if side.url else {}),
            "model": self.identity_of(side.checkpoint),
            "aliases": dict(side.aliases),
            "untrained": side.untrained,
            "bos": side.bos,
            "prompt": side.prompt,
            "tf32": self.recipe.machine.tf32,
        }
        if side.template is not None:
            template = side.template
            settings["template"] = self.identity(
                f"template of {template}",
                lambda: hashlib.sha256("".join(file_identities(template_files(template))).encode()).hexdigest()[:16],
            )
            settings |= self._dated(template)
        if side.context:
            settings["context"] = side.context.model_dump(exclude_none=True)
            settings["missing"] = "mask" if side.masks_missing else "refuse"
            settings |= {"grader": self.grading[1]} if side.context.is_graded else {}
        name = self.score_names[side]
        return Stage(self.directory, f"score/{name}", settings, (self.stage("reference"),), self.command("score", name))

    def is_student(self, side: Side) -> bool:
        """Whether a side is the student with its own tokens, computed as the reference is."""
        if side.aliases or side.bos or side.url:
            return False
        engines = (self.scoring(side), self.recipe.engine_of("reference"))
        same = engine_settings(engines[0]) == engine_settings(engines[1])
        return same and self.identity_of(side.checkpoint) == self.identity_of(self.student)

    def scoring(self, side: Side) -> StageEngine:
        """The engine of scoring, or that of this side of an anchor."""
        engine: Literal["hf", "vllm"] | None = "vllm" if side.url else side.engine
        shared = self.recipe.engine_of("score")
        return shared if engine is None else replace(shared, engine=engine, options=dict(side.options))

    @cached_property
    def score_names(self) -> dict[Side, str]:
        """Folder names of the sides: the model's name, or ANCHOR.ROLE if it has a context or the name is taken."""
        names: dict[Side, str] = {}
        for anchor in self.recipe.anchors:
            for role in ROLES:
                side = self.side(anchor, role)
                name = slug(side.checkpoint.name)
                if side not in names:
                    names[side] = f"{anchor}.{role}" if side.context or name in names.values() else name
        return names

    def side(self, anchor: str, role: Role) -> Side:
        """One of the two sides of an anchor, as it is scored."""
        section = self.recipe.anchors[anchor]
        context = section.context(role)
        return Side(
            checkpoint=self.anchor(anchor, role),
            aliases=tuple(sorted(section.aliases.items())),
            checks_aliases=role == "pre" and bool(section.aliases),
            untrained=section.untrained if role == "pre" and section.aliases else None,
            bos=section.bos,
            prompt=section.prompt,
            template=self.anchor(anchor, "post") if section.prompt == "native" else None,
            context=context,
            masks_missing=section.missing == "mask" and bool(context.columns),
            engine=section.own_engine(role),
            options=tuple(sorted(section.options.items())),
            url=section.server(role),
        )

    def anchor(self, name: str, role: Role) -> Checkpoint:
        """One of the two models of an anchor. The base of an adapter is remembered, so the adapter may be deleted."""
        model = self.recipe.anchor_model(name, role)
        if model is not None:
            trust = self.recipe.student if self.recipe.anchors[name].model == STUDENT else self.recipe.anchors[name]
            return Checkpoint(*model, trust.trust_remote_code)
        adapter = self.anchor(name, "post")

        def look() -> str:
            base = adapter.base
            return json.dumps(base and [base.name, base.revision])

        base = json.loads(self.identity(f"base of {adapter}", look))
        if base is None:
            raise InputError(
                f"anchors.{name}.pre is missing: {adapter.name} is not a LoRA adapter that names its base model. "
                "Give the checkpoint that post was trained from"
            )
        return replace(adapter, name=base[0], revision=base[1])

    def has_shift(self, anchor: str) -> bool:
        """Whether the two sides of an anchor differ: another model, or another context."""
        post, pre = (self.side(anchor, role) for role in ROLES)
        return post.context != pre.context or self.identity_of(post.checkpoint) != self.identity_of(pre.checkpoint)

    def scores_of(self, anchor: str) -> tuple[Stage, Stage]:
        """The stages of a pair: post, then pre."""
        return self.stage("score", self.side(anchor, "post")), self.stage("score", self.side(anchor, "pre"))

    def _train(self, name: str) -> Stage:
        composition = self.recipe.compositions[name]
        objective = self.objective(name)
        is_own = is_own_function(objective)
        used = sorted(composition.used)
        shifts = {}
        for anchor in used:
            post, pre = (dict(stage.settings) for stage in self.scores_of(anchor))
            shifts[anchor] = {"post": post, "pre": pre, **self.recipe.rules_of(anchor)}
            if self.recipe.anchors[anchor].graded:
                shifts[anchor]["grader"] = self.grading[1]
        settings = {
            "train": self.recipe.train_section(name).settings("objective"),  # which is the composition's own, below
            "objective": own_content(objective, f"objective of compositions.{name}") if is_own else objective,
            "weights": {anchor: composition.weights.get(anchor, 0.0) for anchor in used},
            "alpha": composition.alpha,
            "anchors": shifts,
            "student": self.identity_of(self.student),
            **method_settings(self.recipe, composition, objective),
            **composition.rules,
            "tf32": self.recipe.machine.tf32,
        }
        tags = self.recipe.tags.model_dump(mode="json", exclude_defaults=True)
        if composition.routes:
            settings["routes"] = {"tags": tags, "weights": composition.by_tag}
        elif self.recipe.train.balance == "tags":
            settings["tags"] = tags
        if isinstance(composition, Joint) and composition.control is not None:
            slots = [[slot.level, slot.weights, slot.alpha, slot.kl_budget] for slot in composition.slots]
            settings["levels"] = {"slots": slots, "control": str(composition.control), **self._dated(self.student)}
        if composition.method == "online":
            inputs: tuple[Stage, ...] = (self.stage("prompts"),)
        else:
            scores = {stage.fingerprint: stage for anchor in used for stage in self.scores_of(anchor)}
            inputs = (self.stage("reference"), *scores.values())
        anchors = {anchor: self.recipe.anchors[anchor].model_dump(**DUMP) for anchor in used}
        leg = PurePosixPath(name).name  # COMPOSITION/leg-2 is trained in train/COMPOSITION@.../leg-2/train/leg-2@...
        return Stage(
            self.directory if self.trains_in is None else self.trains_in / leg,
            f"train/{leg}",
            settings,
            inputs,
            self.command("train", name),
            key=without_anchor_names(settings),
            definition={"compositions": {name: composition.model_dump(**DUMP)}, "anchors": anchors},
        )

    @property
    def grading(self) -> tuple[Grading, Any]:
        """How responses to the prompts are graded: as the benchmarks are, if all are graded alike, else by profile.

        Also returns what identifies the grader.
        """
        section = self.recipe.eval
        rules = {choose_grading(section, name) for name in section.benchmarks}
        rule = rules.pop() if len(rules) == 1 else Grading(kind=section.profile or "paper")
        if rule.function is not None:
            return rule, {"kind": rule.kind, **own_content(rule.function, "eval.graders")}
        return rule, "code" if self.recipe.prompts.format == "livecodebench" else str(rule)

    def objective(self, name: str) -> Objective:
        """What a composition minimises: its own choice, or the recipe's; online direct-opd."""
        composition = self.recipe.compositions[name]
        usual = "direct-opd" if composition.method == "online" else self.recipe.train.objective
        return composition.objective or usual

    def alpha(self, name: str) -> float | None:
        """The alpha of a composition: as given, or as training solved it for kl_budget; None before that."""
        alpha = self.recipe.compositions[name].alpha
        if alpha is not None:
            return alpha
        stage = self.stage("train", name)
        return float(stage.require()["alpha"]) if stage.complete else None

    @property
    def policies(self) -> list[str]:
        """Everything that can be evaluated: the student, every composition, every other checkpoint."""
        return self.recipe.policy_names

    def composition_of(self, policy: str) -> str | None:
        """The composition that a policy was trained as, at whatever effort level; None for other checkpoints."""
        name = policy.partition("@")[0]
        return name if name in self.recipe.compositions else None

    @property
    def lora_rank(self) -> int | None:
        """The LoRA rank if students are evaluated as adapters of one vLLM engine, else None."""
        lora = self.recipe.train.lora
        return lora.rank if lora and self.recipe.eval.adapters and self.recipe.engine.eval == "vllm" else None

    def _eval(self, policy: str, benchmark: str) -> Stage:
        section = self.recipe.asked(policy)
        settings = section.settings(*EVAL_RESOLVED, exclude_none=True)
        settings |= engine_settings(self.recipe.engine_of("eval"))
        rule = choose_grading(self.recipe.eval, benchmark)
        settings["profile"] = str(rule)
        if rule.function is not None:  # a user's own, by its content
            own = own_content(rule.function, f"eval.graders.{benchmark_folder(benchmark)}")
            settings["profile"] = {"kind": rule.kind, **own}
        if self.composition_of(policy) and self.lora_rank is not None:
            settings["adapters"] = True
        if benchmark == HELD_OUT:
            prompts = self.recipe.prompts
            chosen = prompts.model_dump(mode="json", exclude_none=True, include={"name", "split", "columns", "dedup"})
            source = self._data_identity(prompts.source or "", "prompts.source")
            shown = sorted(template_columns(prompts))
            settings["benchmark"] = {"held_out": HELD_OUT_RULE, "source": source, "shown": shown, **chosen}
        else:
            source = section.sources.get(benchmark, benchmark.removeprefix("file:"))
            key = f"eval.sources.{benchmark}" if benchmark in section.sources else "eval.benchmarks"
            settings["benchmark"] = self._data_identity(source, key)
        if section.chat:
            settings |= self._dated(self.asked_model(policy))
        if getattr(section, "budget", None) is not None:
            settings["final"] = section.final
        return self.evaluation(policy, benchmark_folder(benchmark), settings, self.command("eval", policy))

    def _harness(self, policy: str, task: str) -> Stage:
        """A task of another harness. Its version and data are that environment's, and not known before it runs."""
        section = self.recipe.harness
        settings = {"benchmark": f"lm-eval:{task}", "args": section.args, "seed": self.recipe.eval.seed}
        if section.include is not None:
            settings["include"] = self._data_identity(section.include, "harness.include")
        if section.args.get("apply_chat_template", True):
            settings |= self._dated(self.asked_model(policy))
        return self.evaluation(policy, f"{HARNESS}{slug(task)}", settings, self.command("harness", policy))

    def evaluation(self, policy: str, folder: str, settings: dict[str, Any], command: str) -> Stage:
        """Describe the evaluation of a policy on one benchmark or task."""
        inputs: tuple[Stage, ...] = ()
        key = None
        section = self.recipe.policies.get(policy)
        if trained := self.composition_of(policy):
            inputs = (self.stage("train", trained),)
        elif section is not None and section.merge:
            inputs = (self.stage("merge", policy),)
        else:
            settings["model"] = self.identity_of(self.asked_model(policy))
        if section is not None and section.decode:
            target = self.target_settings(section.decode)
            key = {**settings, "target": without_anchor_names(target)}
            settings |= {"target": target}
            if self.recipe.cannot_decode(section.decode, cached=False):  # its dose is solved on the cache
                inputs = self.stage("train", section.decode).inputs
        path = f"eval/{policy}/{folder}"
        return Stage(self.directory, path, settings, inputs, command, key=key, definition=self._definition(policy))

    def _definition(self, policy: str) -> dict[str, Any]:
        """The tables of the recipe that describe a policy which is no composition."""
        section = self.recipe.policies.get(policy)
        if section is None:
            return {}
        compositions = self.recipe.compositions
        named = {policy, *filter(None, [section.decode]), *section.weights}
        named |= {anchor for one in named & compositions.keys() for anchor in compositions[one].used}
        tables = {
            part: {name: one.model_dump(**DUMP) for name, one in getattr(self.recipe, part).items() if name in named}
            for part in ("anchors", "compositions", "policies")
        }
        return {part: some for part, some in tables.items() if some}

    def target_settings(self, composition: str) -> dict[str, Any]:
        """What the target of a composition depends on, where it is sampled from."""
        train = self.stage("train", composition).settings
        names = ("weights", "alpha", "kl_budget", "anchors", "routes")
        target = {name: train[name] for name in names if train.get(name) is not None}
        if train["alpha"] is None and not self.recipe.budgets(composition):  # solved on the first updates
            keys = ("seed", "epochs", "prompts_per_round", "updates_per_round", "validation")
            target["train"] = {key: train["train"][key] for key in keys}
        return {**target, "candidates": self.recipe.reference.candidates}

    def _merge(self, policy: str) -> Stage:
        """Weights of the student, or of checkpoints, put together."""
        section = self.recipe.policies[policy]
        inputs = []
        parts: dict[str, Any] = {}
        for name in self.recipe.merged(policy):
            if name in self.recipe.compositions:
                inputs.append(self.stage("train", name))
                parts[name] = {"train": inputs[-1].fingerprint}
            elif name in self.recipe.anchors:
                roles = ROLES[:1] if section.merge == "linear" else ROLES
                parts[name] = {role: self.identity_of(self.anchor(name, role)) for role in roles}
            else:
                parts[name] = {"model": self.identity_of(self.asked_model(name))}
        settings: dict[str, Any] = {"merge": section.merge, "weights": section.weights, "parts": parts}
        settings |= {"density": section.density or 0.5} if section.merge in ("ties", "dare") else {}
        settings["student"] = self.identity_of(self.student)
        by_content = sorted([fingerprint(parts[name]), section.weights[name]] for name in parts)
        key = {**settings, "weights": by_content, "parts": []}
        path, command = f"merge/{policy}", self.command("eval", policy)
        definition = self._definition(policy)
        return Stage(self.directory, path, settings, tuple(inputs), command, key=key, definition=definition)

    def everything(self) -> list[Stage]:
        """All stages in the order in which they can be computed."""
        verbs = [*(("rollout", "reference", "score") if self.needs_cache else ()), "train", "eval"]
        stages = [stage for verb in verbs for stage in self.stages(verb)]
        return list({(stage.path, stage.fingerprint): stage for stage in stages}.values())

    def stages(self, verb: str, only: Sequence[str] | None = None) -> list[Stage]:
        """The stages that a verb computes; `only` names models, compositions or policies, as its option does."""

        def wanted(name: str) -> bool:
            return is_wanted(name, only)

        match verb:
            case "rollout":
                return [self.stage("prompts"), self.stage("rollout")]
            case "reference":
                return [*([self.stage("proposal")] if self.sampler else []), self.stage("reference")]
            case "score":
                scores = [self.stage("score", side) for side, name in self.score_names.items() if wanted(name)]
                return list({stage.fingerprint: stage for stage in scores}.values())
            case "train":
                trains = [self.stage("train", name) for name in self.recipe.compositions if wanted(name)]
                return [*([self.stage("prompts")] if "online" in self.methods(only) else []), *trains]
            case "eval":
                names = self.recipe.eval.benchmarks
                own = [self.stage("eval", one, name) for one in self.policies if wanted(one) for name in names]
                merged = [self.stage("merge", one) for one in self.policies if wanted(one) and self.recipe.merged(one)]
                return [*merged, *own, *self.stages("harness", only)]
            case "harness":
                tasks = self.recipe.harness.tasks
                names = [one for one in self.policies if wanted(one) and self.recipe.has_weights(one)]
                return [self.stage("harness", one, task) for one in names for task in tasks]
            case _:
                raise AssertionError(verb)

    def methods(self, only: Sequence[str] | None = None) -> set[str]:
        """The methods of these compositions, or of all."""
        named = self.recipe.compositions.items()
        return {composition.method for name, composition in named if is_wanted(name, only)}

    @property
    def needs_cache(self) -> bool:
        """Online training alone needs none; neither does a recipe that only evaluates."""
        methods = self.methods()
        return methods != {"online"} if methods else bool(self.recipe.anchors)

    def command(self, verb: str, only: str = "") -> str:
        """Return what to type: a command, or from Python a method of the run."""
        if self.arguments is None:
            return f"run.{verb}({only!r})" if only else f"run.{verb}()"
        words = {"harness": f"eval {self.arguments} --harness lm-eval"}.get(verb, f"{verb} {self.arguments}")
        return f"lweave {words} --only {only}" if only else f"lweave {words}"
