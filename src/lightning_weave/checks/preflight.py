"""What can be known before anything expensive: `lweave run` refuses on it, `lweave doctor` prints it.

Everything that the stages still to be made will need is looked at: models, prompts, benchmarks, packages, disk. No
weights are loaded. What is finished needs nothing, so its models and data may be gone.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from lightning_weave.bench.definitions import Benchmark, asked_benchmark
from lightning_weave.checks.checkpoints import check_scorable, check_usable
from lightning_weave.checks.end_of_turn import judge_stops
from lightning_weave.checks.findings import Finding, listed
from lightning_weave.checks.memory import check_idle_gpus, check_memory
from lightning_weave.checks.pairs import open_alignment
from lightning_weave.checks.prompts import check_contexts, check_prompts, check_routes
from lightning_weave.checks.todo import Todo
from lightning_weave.config import Eval, Reference, Rollout, Score, is_own_function
from lightning_weave.errors import InputError
from lightning_weave.grading.sandbox import open_sandbox
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.files import check_trainable
from lightning_weave.models.untrained import untrained_specials
from lightning_weave.own import load_function
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.evaluation import asked_problems
from lightning_weave.runs.scored import ROLES, ScoredModel
from lightning_weave.runs.steps import Steps


def preflight(steps: Steps, todo: Todo) -> list[Finding]:
    """Collect what is wrong, or may be, with making what is left of a run."""
    if todo.nothing:
        return []
    findings = [*_check_models(steps, todo), *_check_packages(steps, todo), *_check_own_code(steps, todo)]
    broken = {finding.about for finding in findings if finding.check == "checkpoint"}
    benchmarks = list(_open_benchmarks(steps, todo, findings))
    findings += _check_exams(steps, todo, benchmarks, broken)
    if "student" in broken:
        return findings
    for anchor in todo.anchors:
        if not _is_broken(anchor, broken):
            findings += check_anchor(steps, anchor)
    usable = replace(todo, anchors=[name for name in todo.anchors if not _is_broken(name, broken)])
    if todo.prompts or todo.rollout:
        findings += check_prompts(steps, usable, benchmarks)
    elif _reads_rows(steps, usable):
        prompts = read_prompts(steps.prompts_file)
        findings += [*check_contexts(steps, usable, prompts), *check_routes(steps, usable, prompts)]
    return [*findings, *check_memory(steps, usable.stages, usable.anchors), *check_idle_gpus(steps.recipe)]


def _reads_rows(steps: Steps, todo: Todo) -> bool:
    """Whether what is to be made depends on the rows that prompts were built from: contexts, or weights by tag."""
    anchors = [steps.recipe.anchors[name] for name in todo.anchors]
    in_context = any(anchor.post_prompt or anchor.pre_prompt for anchor in anchors)
    return in_context or any(steps.recipe.compositions[name].routes for name in todo.compositions)


def _is_broken(anchor: str, broken: set[str]) -> bool:
    return any(about.startswith(f"anchors.{anchor}.") for about in broken)


def _check_models(steps: Steps, todo: Todo) -> Iterator[Finding]:
    models = {"student": steps.student}
    for name in todo.anchors:
        for role in ROLES:
            try:
                models[f"anchors.{name}.{role}"] = steps.anchor(name, role)
            except InputError as error:  # nothing says what an adapter's base is
                yield Finding(f"anchors.{name}.{role}", "checkpoint", "error", str(error))
    others = [name for name in todo.benchmarks if name in steps.recipe.policies]
    models |= {f"policies.{name}": steps.policy(name) for name in others}
    checked: dict[Checkpoint, Finding | None] = {}
    for about, checkpoint in models.items():
        if checkpoint not in checked:
            scored = not about.startswith("policies.")  # others are only sampled from
            checked[checkpoint] = check_usable(about, checkpoint) or (
                check_scorable(about, checkpoint) if scored else None
            )
        if finding := checked[checkpoint]:
            yield Finding(about, finding.check, finding.verdict, finding.text)
        elif checkpoint.base is not None and (section := _read_by_vllm(steps, todo, about)):
            text = (
                f'{checkpoint.name}: {section}.engine = "vllm" reads no LoRA adapter. Merge it with peft, or set "hf"'
            )
            yield Finding(about, "checkpoint", "error", text)
    if todo.compositions and not checked[steps.student]:
        try:
            check_trainable(steps.student.light_path)
            if steps.student.is_here:
                _ = steps.student.updates  # an adapter that is more than low-rank updates is refused
        except InputError as error:
            yield Finding("student", "checkpoint", "error", str(error))


def _read_by_vllm(steps: Steps, todo: Todo, about: str) -> str | None:
    """Name the first section whose work on this model is left to vLLM."""
    recipe = steps.recipe
    sections: dict[str, Rollout | Reference | Score | Eval] = {}
    if about == "student" and todo.rollout:
        sections |= {"reference": recipe.reference}
        sections |= {"rollout": recipe.rollout} if recipe.rollout.from_ is None else {}
    if about == "student" and todo.online:
        sections |= {"rollout": recipe.rollout}
    if about.startswith("anchors."):
        name, _, role = about.removeprefix("anchors.").rpartition(".")
        return "score" if recipe.scored_by(name, "post" if role == "post" else "pre") != "hf" else None
    if about.startswith("policies.") or (about == "student" and "base" in todo.benchmarks):
        sections |= {"eval": recipe.eval}
    return next((key for key, section in sections.items() if section.engine == "vllm"), None)


def _check_packages(steps: Steps, todo: Todo) -> Iterator[Finding]:
    """Look for the packages that only some recipes need."""
    recipe = steps.recipe
    packages = {"train.lora": ("peft", "peft")} if recipe.train.lora and todo.compositions else {}
    if recipe.train.lora and recipe.train.lora.base != "own" and todo.compositions:
        packages["train.lora.base"] = ("bitsandbytes", "bitsandbytes")
    if todo.compositions:
        packages |= {f"train.trackers: {name}": (name, name) for name in recipe.train.trackers}
    if todo.benchmarks and recipe.eval.profile == "math-verify":
        packages["eval.profile"] = ("math_verify", "math-verify")
    adapted = [name for name in todo.anchors if recipe.anchors[name].post and recipe.anchors[name].pre is None]
    packages |= {f"anchors.{name}.post": ("peft", "peft") for name in adapted}
    for about, (package, install) in packages.items():
        if find_spec(package) is None:
            text = f"{about} needs the package {package}, which is not installed: pip install '{install}'"
            yield Finding(about.partition(":")[0], "package", "error", text)
    scores = any(recipe.scored_by(name, role) == "vllm" for name in todo.anchors for role in ROLES)
    works: dict[str, tuple[bool, Rollout | Reference | Score | Eval]] = {
        "rollout": (todo.online or (todo.rollout and recipe.rollout.from_ is None), recipe.rollout),
        "reference": (todo.rollout, recipe.reference),
        "score": (scores, recipe.score.model_copy(update={"engine": "vllm"})),
        "eval": (bool(todo.benchmarks), recipe.eval),
    }
    for key, (does, section) in works.items():
        if does and section.engine != "hf" and (wrong := _check_engine(key, section.engine, section.python)):
            yield Finding(f"{key}.engine", "package", "error", wrong)
    python = recipe.harness.python
    if todo.tasks and (lack := _lack("harness", "lm_eval", python)):
        yield Finding(
            "harness.python",
            "package",
            "error",
            f"{lack}. Install it (pip install 'lm_eval[hf]'), or give the Python of an "
            "environment that has it as harness.python",
        )


def _check_own_code(steps: Steps, todo: Todo) -> Iterator[Finding]:
    """Load the user's own objectives and graders where they are trusted: their files are there and run."""
    own = {f"compositions.{name}": steps.objective(name) for name in todo.compositions}
    own = {about: objective for about, objective in own.items() if is_own_function(objective)}
    if todo.benchmarks:
        own |= {
            f"eval.graders.{name}": rule.function for name, rule in steps.recipe.eval.graders.items() if rule.function
        }
    if todo.tasks and steps.recipe.harness.include and not steps.trust:
        own["harness.include"] = steps.recipe.harness.include
    for about, function in own.items():
        try:
            load_function(function, steps.trust)
        except InputError as error:
            yield Finding(about, "function", "error", str(error))


def _check_engine(key: str, engine: str, python: str | None) -> str | None:
    lack = _lack(key, engine, python)
    return lack and (
        f"{key}.engine = {engine!r}: {lack}. Install it, give the Python of an environment that has it as "
        f'{key}.python, or set {key}.engine = "hf"'
    )


def _lack(key: str, package: str, python: str | None) -> str | None:
    """Ask a Python of its own environment whether it has a package, without importing it; say what is missing."""
    if python is None or shutil.which(python) == sys.executable:
        found = find_spec(package) is not None
    elif shutil.which(python) is None:
        return f"{key}.python = {python!r}: no such executable"
    else:
        ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        found = subprocess.run([python, "-c", ask], capture_output=True, check=False).returncode == 0
    return None if found else f"{python or 'this environment'} has no package {package}"


def _open_benchmarks(steps: Steps, todo: Todo, findings: list[Finding]) -> Iterator[Benchmark]:
    """Read every problem of every benchmark that is still to be evaluated."""
    section = steps.recipe.eval
    for name in dict.fromkeys(name for names in todo.benchmarks.values() for name in names):
        try:
            benchmark = asked_benchmark(section, name)
            if benchmark.kind == "code":
                with open_sandbox(section.unsafe_local):
                    pass
            yield benchmark
        except InputError as error:
            findings.append(Finding("eval.benchmarks", "benchmark", "error", str(error)))


def _check_exams(steps: Steps, todo: Todo, benchmarks: list[Benchmark], broken: set[str]) -> Iterator[Finding]:
    """Render every problem for every tokenizer that will read it, and see whether a response still fits."""
    for policy in todo.benchmarks:
        other = policy in steps.recipe.policies
        about = f"policies.{policy}" if other else "student"
        if about in broken or (policy != "base" and not other):  # a composition reads as the student does
            continue
        checkpoint = steps.policy(policy)
        for benchmark in benchmarks:
            try:
                problems = asked_problems(benchmark, checkpoint.tokenizer, steps.recipe.asked(policy))
            except InputError as error:
                text = f"{benchmark.name}: problems cannot be rendered: {error}"
                yield Finding("eval", f"chat template of {about}", "error", text)
                break
            limit = checkpoint.context_limit
            longest, problem = max((len(one.prompt.token_ids), one.prompt.id) for one in problems)
            if limit is not None and longest >= limit:
                text = (
                    f"{benchmark.name}: problem {problem!r} has {longest} tokens, which leaves no room in the {limit} "
                    f"of {checkpoint.light_path}. Leave the problem out, or evaluate a checkpoint with a longer context"
                )
                yield Finding("eval", "context", "error", text)


def check_anchor(steps: Steps, name: str) -> list[Finding]:
    """Find what makes a pair unusable before it is scored: its aliases, its template, the same model on both sides."""
    about = f"anchors.{name}"
    section = steps.recipe.anchors[name]
    try:
        for role in ROLES:
            open_alignment(steps, name, role, cached=False)
        findings = [judge_stops(steps, name)]
        _refuse_untrained(steps.side(name, "pre"))
    except InputError as error:
        return [Finding(about, "aliases", "error", str(error))]
    post = steps.anchor(name, "post")
    if section.prompt == "native" and not post.tokenizer.chat_template:
        text = 'its post-anchor has no chat template, but prompt = "native" needs one. Use prompt = "student"'
        findings.append(Finding(about, "chat template", "error", text))
    if not steps.has_shift(name):
        text = "post and pre are the same model, so its shift is zero everywhere"
        findings.append(Finding(about, "checkpoints", "error", text, judged=True))
    return [finding for finding in findings if finding.verdict in ("warning", "error")]


def _refuse_untrained(pre: ScoredModel) -> None:
    """Refuse an alias onto an output row that looks untrained, as scoring would."""
    if pre.checks_aliases and pre.untrained is None:
        tokenizer = pre.checkpoint.tokenizer
        untrained = untrained_specials(pre.checkpoint)
        wrong = [repr(text) for _, text in pre.aliases if tokenizer.convert_tokens_to_ids(text) in untrained]
        if wrong:
            raise InputError(
                f"an alias leads to {listed(wrong)}, whose output row looks untrained in {pre.checkpoint.name}: its "
                'shift is arbitrary.\nSet untrained = "mask" (no supervision there) or untrained = "keep"'
            )
