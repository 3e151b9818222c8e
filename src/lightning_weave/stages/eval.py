"""`lweave eval`: sample, grade and summarise every policy on every benchmark."""

import itertools
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from lightning_weave.bench.definitions import Benchmark, load_eval_benchmark
from lightning_weave.bench.samples import (
    Sample,
    SampleKey,
    blocks,
    cut_points,
    export_samples,
    merge_blocks,
    pending_blocks,
    read_samples,
    to_line,
    write_block,
)
from lightning_weave.bench.summary import read_summary, summarise, write_summary
from lightning_weave.checks.findings import Finding, Level, is_pending
from lightning_weave.checks.models import attempt, check_engine, check_model, check_package, check_room, open_benchmarks
from lightning_weave.checks.watch import Watch, check_evaluation, warn
from lightning_weave.config import is_own_function
from lightning_weave.errors import InputError
from lightning_weave.grading.graders import Grader, GraderProcess
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Sampler
from lightning_weave.plugins import load_function
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_main_process
from lightning_weave.report.results import track_evaluation
from lightning_weave.run import ROLES, Run, is_wanted
from lightning_weave.stages.decoding import (
    ANSWER_TOKENS,
    THINKING_ENDS,
    ForcedSampler,
    Target,
    final_text,
    open_decoder,
)
from lightning_weave.stages.engines import (
    Engines,
    gpus_of,
    longest_context,
    note_engine,
    shards_at_once,
    with_adapter,
    with_lora,
)
from lightning_weave.stages.harness import check_policies, run_tasks
from lightning_weave.stages.merge import check_policy, make_merge
from lightning_weave.stages.prompts import render_problems, sampling_settings
from lightning_weave.stages.rollout import Journal, sample_shards
from lightning_weave.stages.work import LOCAL, ComputeShards, Executor, Job, ShardStats
from lightning_weave.store import Stage, damaged_files, write_atomic
from lightning_weave.types import Prompt, Request, Response

NO_BENCHMARK = 'no benchmark is named. Add problems with answers ("file:PATH"), or "held-out", a part of the prompts'


def evaluate(
    run: Run,
    progress: Progress,
    only: Sequence[str] | None = None,
    executor: Executor = LOCAL,
    watch: Watch = warn,
) -> None:
    """Evaluate every policy that is not complete. Resumable block by block, and task by task of another harness."""
    check_policies(run, only)
    if not run.recipe.eval.benchmarks and not run.recipe.harness.tasks:
        raise InputError(f"nothing to evaluate: {NO_BENCHMARK}")
    with Engines() as engines:
        for name in run.policies:
            if is_wanted(name, only):
                evaluate_policy(run, name, progress, engines, executor, watch=watch)
    run_tasks(run, progress, only)


def evaluate_policy(
    run: Run, name: str, progress: Progress, engines: Engines, executor: Executor = LOCAL, *, watch: Watch = warn
) -> None:
    """Evaluate one policy on the benchmarks that are not complete."""
    stages = {benchmark: run.stage("eval", name, benchmark) for benchmark in run.recipe.eval.benchmarks}
    waiting = {benchmark: stage for benchmark, stage in stages.items() if not stage.complete}
    for benchmark in stages.keys() - waiting.keys():
        stages[benchmark].settle()
        _drop_blocks(stages[benchmark])
    if not waiting:
        return
    if run.recipe.merged(name):
        make_merge(run, name, progress)
    section = run.recipe.policies.get(name)
    given = open_decoder(run, section.decode, {}) if section and section.decode else None
    executor = LOCAL if given else executor
    policy = EvaluatedPolicy(name, run.policy(name), engines, given)
    engines.room = room_of(run, name)
    jobs = []
    for benchmark, stage in waiting.items():
        job = eval_job(run, policy, load_eval_benchmark(run.recipe, benchmark), stage, progress)
        jobs += [job] if job else []
    executor.run_jobs(jobs, run, progress)
    watch(partial(check_evaluation, run, name), True, progress)
    if is_main_process():
        track_evaluation(run, name)


def room_of(run: Run, name: str) -> int:
    """Bound the contexts of a policy's engine over all benchmarks; 0 where no engine has to know."""
    section = run.recipe.asked(name)
    if run.recipe.engine.eval == "hf":
        return 0
    checkpoint = run.policy(name)
    lengths = []
    for benchmark in (load_eval_benchmark(run.recipe, each) for each in section.benchmarks):
        prompts = [one.token_ids for one in render_problems(benchmark, checkpoint.tokenizer, section, run.recipe.date)]
        lengths.append(longest_context(checkpoint, prompts, sampling_settings(section, benchmark).max_tokens))
    return max(lengths)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy under evaluation; its weights are loaded when the first sample is wanted."""

    name: str
    checkpoint: Checkpoint
    engines: Engines
    given: Sampler | None = None  # instead of what the recipe's engine would make of the checkpoint

    def sampler(self, run: Run, asked: Sequence[Prompt], max_tokens: int) -> Sampler:
        """Load the checkpoint, or use the engine that is up."""
        if self.given is not None:
            if isinstance(tilt := getattr(self.given, "tilt", None), Target):
                tilt.anchors.set_prompts(asked)
            return self.given
        prompts = [one.token_ids for one in asked]
        rules = run.recipe.asked(self.name)
        budget = getattr(rules, "budget", None)
        if budget is None:
            return self._plain_sampler(run, prompts, max_tokens)
        tokenizer = self.checkpoint.tokenizer
        text = final_text(rules, tokenizer)
        room = budget + len(tokenizer.encode(f"{THINKING_ENDS}\n\n\n{text}")) + ANSWER_TOKENS
        sampler = self._plain_sampler(run, prompts, room)
        return ForcedSampler(sampler, budget, tokenizer, text, self.checkpoint.context_limit)

    def _plain_sampler(self, run: Run, prompts: Sequence[list[int]], max_tokens: int) -> Sampler:
        section = run.recipe.engine_of("eval")
        adapter = Path(self.checkpoint.path) / "adapter"
        if run.lora_rank is None or not (self.name == "base" or adapter.is_dir()):
            return self.engines.sampler(run, self.checkpoint, section, prompts, max_tokens)
        section = with_lora(section, run.lora_rank)
        sampler = self.engines.sampler(run, run.student, section, prompts, max_tokens)
        if self.name == "base":
            return sampler
        return with_adapter(run, sampler, adapter, merged=self.checkpoint, section=section, prompts=prompts)


def eval_job(run: Run, policy: EvaluatedPolicy, benchmark: Benchmark, stage: Stage, progress: Progress) -> Job | None:
    """Plan what is left to sample of one benchmark; when it is there, samples.jsonl and summary.json are written.

    Samples that only have to be graded again are graded at once, and there is no job.
    """
    section = run.recipe.eval
    grader = Grader.from_section(benchmark, section, run.trust)
    if grader.lacks_math_verify(section) and is_main_process():
        progress.say(
            f"eval {benchmark.slug}: math-verify is not installed, so only an answer in \\boxed{{}} that is written "
            "like the reference counts. For a forgiving grader: pip install math-verify"
        )
    if stage.complete or _grade_again(run, stage, benchmark, grader, progress):  # another rank may have graded it
        return None
    keys = blocks(len(benchmark.problems), section.samples or benchmark.samples, section.block)
    folder = stage.folder / f"blocks-{stage.fingerprint}"

    def finish() -> None:
        if is_main_process():  # the blocks go when they are merged: one rank does it
            while pending_blocks(folder, len(keys)):
                time.sleep(0.2)
            merge_blocks(folder, len(keys), stage.folder / "samples.jsonl")
            _summarise(run, stage, benchmark, grader, progress)
            _drop_blocks(stage)

    return Job(
        stage.path,
        pending_blocks(folder, len(keys)),
        partial(open_policy, policy=policy, benchmark=benchmark, keys=keys, stage=stage),
        unit="block",
        fingerprint=stage.fingerprint,
        devices=gpus_of(run.recipe.engine_of("eval")),
        at_once=shards_at_once(run.recipe.engine_of("eval"), section.block),
        finish=finish,
    )


@contextmanager
def open_policy(
    run: Run, policy: EvaluatedPolicy, benchmark: Benchmark, keys: Sequence[Sequence[SampleKey]], stage: Stage
) -> Iterator[ComputeShards]:
    """Load a policy and its grader, which samples and grades fixed blocks of (problem, sample) pairs."""
    section = run.recipe.asked(policy.name)
    settings = sampling_settings(section, benchmark)
    problems = benchmark.problems
    tokenizer = policy.checkpoint.tokenizer
    asked = render_problems(benchmark, tokenizer, section, run.recipe.date)
    prompts = [one.token_ids for one in asked]
    _check_lengths(policy.checkpoint, benchmark, prompts)
    rules = Grader.from_section(benchmark, section, run.trust)
    sampler = policy.sampler(run, asked, settings.max_tokens)
    stage.begin()
    if policy.given is None:
        note_engine(run, stage, policy.checkpoint, run.recipe.engine_of("eval"))
    grader = GraderProcess(rules)
    folder = stage.folder / f"blocks-{stage.fingerprint}"

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def grade(block: int, responses: Sequence[Response]) -> ShardStats:
        pairs = keys[block]
        texts = [decode(response.ids) for response in responses]
        graded = grader.grade([(problems[problem], text) for (problem, _), text in zip(pairs, texts, strict=True)])
        samples = [
            Sample(
                problem=problems[problem].id,
                sample=sample,
                seed=settings.seed,
                tokens=len(response.ids),
                finish=response.finish,
                text=text,
                answer=verdict.answer,
                correct=verdict.correct,
                why=verdict.why,
                cuts=cut_points(response.ids, decode, section.budgets),
                official=verdict.official,
            )
            for (problem, sample), response, text, verdict in zip(pairs, responses, texts, graded, strict=True)
        ]
        write_block(folder, block, samples)
        return ShardStats(sum(sample.tokens for sample in samples))

    def compute_blocks(shards: Sequence[int]) -> Iterator[ShardStats]:
        """Sample; every block is graded and written while others are sampled."""
        requests = {
            block: [Request(prompts[problem], problem, sample) for problem, sample in keys[block]] for block in shards
        }
        journal = Journal(folder, "journal")
        thread = ThreadPoolExecutor(1)
        graded: deque[Future[ShardStats]] = deque()
        try:
            for block, responses in sample_shards(sampler, settings, requests, journal, late=True):
                graded.append(thread.submit(grade, block, responses))
                while graded and graded[0].done():
                    yield graded.popleft().result()
            for future in graded:
                yield future.result()
        except BaseException:
            grader.close()  # or it would be waited for
            raise
        finally:
            thread.shutdown(cancel_futures=True)

    try:
        yield compute_blocks  # the engine stays up for the next benchmark
    finally:
        grader.close()


def _drop_blocks(stage: Stage) -> None:
    for leftover in stage.folder.glob("blocks-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _grade_again(run: Run, stage: Stage, benchmark: Benchmark, grader: Grader, progress: Progress) -> bool:
    """Grade complete samples that differ from this evaluation only in how they were graded; False if there are none."""
    inputs = {one.path: one.fingerprint for one in stage.inputs}
    for source in stage.siblings():
        old, new = source.settings, stage.settings
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        known = changed <= {"profile", "budgets"} and set(new["budgets"]) <= set(old.get("budgets", ()))
        if not known or (source.manifest() or {}).get("inputs") != inputs or damaged_files(source.folder):
            continue
        if is_main_process():
            progress.say(f"{stage.path.replace('/', ' ', 1)}: grading the samples again, without sampling")
            problems = {problem.id: problem for problem in benchmark.problems}
            samples = list(read_samples(source.folder / "samples.jsonl"))
            graded = grader.grade([(problems[sample.problem], sample.text) for sample in samples])
            lines = []
            for sample, verdict in zip(samples, graded, strict=True):
                cuts = {budget: cut for budget, cut in sample.cuts.items() if budget in run.recipe.eval.budgets}
                again = replace(sample, answer=verdict.answer, correct=verdict.correct, why=verdict.why, cuts=cuts)
                lines.append(to_line(replace(again, official=verdict.official)))
            write_atomic(stage.folder / "samples.jsonl", "".join(lines).encode())
            for engine in source.engines():
                stage.note_engine(engine)
            _summarise(run, stage, benchmark, grader, progress)
        return True
    return False


def _summarise(run: Run, stage: Stage, benchmark: Benchmark, grader: Grader, progress: Progress) -> None:
    """Write the summary of all samples, and the manifest."""
    problems = {problem.id: problem for problem in benchmark.problems}

    def regrade(cut: list[tuple[Sample, str]]) -> list[bool]:
        return [graded.correct for graded in grader.grade([(problems[sample.problem], text) for sample, text in cut])]

    settings = asdict(sampling_settings(run.recipe.eval, benchmark))
    protocol = {**settings, "grading": grader.name, "engine": run.recipe.engine.eval}
    target = stage.folder / "samples.jsonl"
    result = summarise(benchmark, list(read_samples(target)), protocol, run.recipe.eval.budgets, regrade)
    write_summary(stage.folder / "summary.json", result)
    stage.record([target, stage.folder / "summary.json"])
    if result.error and not run.recipe.rehearsal:  # random models answer nothing
        progress.say(f"error: {stage.path}: {result.error}")


def export_lm_eval(run: Run, folder: Path, when: datetime) -> list[Path]:
    """Write every finished evaluation as lm-evaluation-harness sample files, a folder per policy."""
    files = []
    for policy in run.policies:
        for name in run.recipe.eval.benchmarks:
            stage = run.stage("eval", policy, name)
            if not stage.complete:
                continue
            benchmark = load_eval_benchmark(run.recipe, name)
            section = run.recipe.asked(policy)
            rendered = render_problems(benchmark, run.policy(policy).tokenizer, section, run.recipe.date)
            prompts = [one.text for one in rendered]
            samples = read_samples(stage.folder / "samples.jsonl")
            settings = read_summary(stage.folder / "summary.json").settings
            files.append(export_samples(folder / policy, benchmark, prompts, samples, settings=settings, when=when))
    return files


def _check_lengths(checkpoint: Checkpoint, benchmark: Benchmark, prompts: Sequence[list[int]]) -> None:
    """Refuse a problem that leaves no room for a response before anything is sampled."""
    tokens, problem = max((len(ids), problem.id) for problem, ids in zip(benchmark.problems, prompts, strict=True))
    remedy = "Leave the problem out, or evaluate a checkpoint with a longer context"
    check_room(checkpoint, f"{benchmark.name}: problem {problem!r}", tokens, remedy)


def validate(run: Run) -> Iterator[Finding]:
    """Check benchmarks, graders and policies, and that every problem leaves room for a response."""
    recipe = run.recipe
    names = recipe.eval.benchmarks
    if not names and not recipe.harness.tasks:
        verdict: Level = "note" if "benchmarks" in recipe.eval.model_fields_set else "warning"
        yield Finding("eval.benchmarks", "benchmark", verdict, f"nothing will be evaluated: {NO_BENCHMARK}")
    pending = [policy for policy in run.policies if any(is_pending(run, "eval", policy, name) for name in names)]
    if not pending:
        return
    if recipe.eval.profile == "math-verify":
        yield from check_package("eval.profile", "math_verify")
    for name, rule in recipe.eval.graders.items():
        if is_own_function(rule):
            yield from attempt(f"eval.graders.{name}", "function", load_function, rule, run.trust)
    yield from check_engine(run, "eval")
    benchmarks, unreadable = open_benchmarks(run)
    yield from unreadable
    for policy in pending:
        own = recipe.policies.get(policy)
        sides = itertools.product(recipe.compositions[own.decode].used, ROLES) if own and own.decode else ()
        for anchor, role in sides:
            yield from check_model(f"anchors.{anchor}.{role}", run.anchor(anchor, role), "score", "hf")
        if own and own.budget:
            about = f"policies.{policy}.budget"
            yield from attempt(about, "forced answer", final_text, recipe.eval, run.asked_model(policy).tokenizer)
        if run.recipe.merged(policy):
            yield from attempt(f"policies.{policy}", "merge", check_policy, run, policy)
        trained, _, level = policy.partition("@")
        if not level and (run.composition_of(policy) or run.recipe.merged(policy)):  # reads as the student does
            continue
        is_student = policy == "base"
        about = "student" if is_student else f"policies.{policy}"
        about = f"compositions.{trained}.control" if level else about
        checkpoint = run.student if level else run.policy(policy)
        faults = list(check_model(about, checkpoint, "eval", recipe.engine.eval, scored=is_student))
        yield from () if level else faults
        for benchmark in benchmarks if not faults else ():
            try:
                problems = render_problems(benchmark, checkpoint.tokenizer, recipe.asked(policy), recipe.date)
            except InputError as error:
                text = f"{benchmark.name}: problems cannot be rendered: {error}"
                yield Finding("eval", f"chat template of {about}", "error", text)
                break
            ids = [one.token_ids for one in problems]
            yield from attempt("eval", "context", _check_lengths, checkpoint, benchmark, ids)
