"""Evaluate one policy on one benchmark: sample what is missing, grade it, and write its samples and summary."""

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.bench.samples import (
    Sample,
    SampleKey,
    blocks,
    cut_points,
    merge_blocks,
    pending_blocks,
    read_samples,
    to_line,
    write_block,
)
from lightning_weave.bench.summary import summarise, write_summary
from lightning_weave.config import Eval
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.protocols import Sampler
from lightning_weave.progress import Progress
from lightning_weave.prompts import ask, encode, livecodebench
from lightning_weave.ranks import is_first
from lightning_weave.runs.engines import Engines, gpus_of, note_engine, shards_at_once, with_adapter, with_lora
from lightning_weave.runs.grade import Grader
from lightning_weave.runs.grader_process import GraderProcess
from lightning_weave.runs.prompts import Asked, Form
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.stream import Journal, sample_shards
from lightning_weave.runs.work import Job, Made, make_room
from lightning_weave.store import Stage, recorded, write_atomic
from lightning_weave.types import Prompt, Request, Response, SamplingSettings


@dataclass(frozen=True)
class Evaluated:
    """A policy under evaluation; its weights are loaded when the first sample is wanted."""

    name: str
    checkpoint: Checkpoint
    engines: Engines
    given: Sampler | None = None  # instead of what the recipe's engine would make of the checkpoint

    def sampler(self, steps: Steps, prompts: Sequence[list[int]], max_tokens: int) -> Sampler:
        """Load the checkpoint, or use the engine that is up."""
        if self.given is not None:
            return self.given
        section = steps.recipe.eval
        adapter = Path(self.checkpoint.path) / "adapter"
        if steps.lora_rank is None or not (self.name == "base" or adapter.is_dir()):
            return self.engines.sampler(steps, self.checkpoint, section, prompts, max_tokens)
        section = with_lora(section, steps.lora_rank)
        sampler = self.engines.sampler(steps, steps.student, section, prompts, max_tokens)
        if self.name == "base":
            return sampler
        return with_adapter(steps, sampler, adapter, merged=self.checkpoint, section=section, prompts=prompts)


def exam_jobs(
    steps: Steps,
    policy: Evaluated,
    benchmark: Benchmark,
    stage: Stage,
    progress: Progress,
    booked: str = "eval",
) -> list[Job]:
    """Say what is left to sample of one benchmark; when it is there, samples.jsonl and summary.json are written.

    Samples that only have to be graded again are graded at once, and no job is left. `booked` is the stage name for
    its rows in the ledger.
    """
    section = steps.recipe.eval
    samples = section.samples or benchmark.samples
    settings = sampling_settings(section, benchmark)
    grader = Grader.of(benchmark, section, steps.trust)
    if grader.is_strict_for_want_of_math_verify(section) and is_first():
        progress.say(
            f"eval {benchmark.slug}: math-verify is not installed, so only an answer in \\boxed{{}} that is written "
            "like the reference counts. For a forgiving grader: pip install math-verify"
        )
    make_room(stage)
    if stage.state() == "done":  # it had been set aside, or another rank has graded it
        return []
    if source := _graded_otherwise(stage):
        if is_first():
            progress.say(f"eval {policy.name}/{stage.folder.name}: grading the samples again, without sampling")
            _grade_again(steps, stage, benchmark, grader, progress, source=source)
        return []
    todo = blocks(len(benchmark.problems), samples, section.block)
    folder = _blocks(stage)
    opener = partial(open_exam, policy=policy, benchmark=benchmark, settings=settings, todo=todo, stage=stage)
    name = f"{policy.name}/{stage.folder.name}"
    pending = pending_blocks(folder, len(todo))

    def finish() -> None:
        if is_first():  # the blocks go when they are merged: one rank does it
            while pending_blocks(folder, len(todo)):
                time.sleep(0.2)
            merge_blocks(folder, len(todo), stage.folder / "samples.jsonl")
            _summarise(steps, stage, benchmark, grader, progress)
            drop_blocks(stage)

    return [
        Job(
            booked,
            name,
            "block",
            pending,
            opener,
            fingerprint=stage.step.fingerprint,
            devices=gpus_of(section),
            at_once=shards_at_once(section),
            finish=finish,
        )
    ]


def sampling_settings(section: Eval, benchmark: Benchmark) -> SamplingSettings:
    """How a benchmark is sampled: as the recipe says, else as the benchmark does."""
    longest = section.max_tokens or benchmark.max_tokens
    return SamplingSettings(section.temperature, section.top_p, longest, section.seed)


@dataclass(frozen=True)
class Exam:
    """One policy answering one benchmark."""

    section: Eval
    benchmark: Benchmark
    settings: SamplingSettings
    todo: Sequence[Sequence[SampleKey]]
    folder: Path
    grader: GraderProcess
    tokenizer: Any
    prompts: Sequence[list[int]]
    sampler: Sampler

    def make(self, shards: Sequence[int]) -> Iterator[Made]:
        """Sample fixed blocks of (problem, sample) pairs; each is graded and written while others are sampled."""
        requests = {
            block: [Request(self.prompts[problem], problem, sample) for problem, sample in self.todo[block]]
            for block in shards
        }
        journal = Journal(self.folder, "journal")
        beside = ThreadPoolExecutor(1)
        graded: deque[Future[Made]] = deque()
        try:
            for block, responses in sample_shards(self.sampler, self.settings, requests, journal, late=True):
                graded.append(beside.submit(self._grade, block, responses))
                while graded and graded[0].done():
                    yield graded.popleft().result()
            for one in graded:
                yield one.result()
        except BaseException:
            self.grader.close()  # or it would be waited for
            raise
        finally:
            beside.shutdown(cancel_futures=True)

    def close(self) -> None:
        """The engine stays up for the next benchmark; its grader does not."""
        self.grader.close()

    def _grade(self, block: int, responses: Sequence[Response]) -> Made:
        """Grade a block and write it."""
        pairs = self.todo[block]
        problems = self.benchmark.problems
        texts = [self._decode(response.ids) for response in responses]
        graded = self.grader.grade([(problems[problem], text) for (problem, _), text in zip(pairs, texts, strict=True)])
        samples = [
            Sample(
                problem=problems[problem].id,
                sample=sample,
                seed=self.settings.seed,
                tokens=len(response.ids),
                finish=response.finish,
                text=text,
                answer=verdict.answer,
                correct=verdict.correct,
                why=verdict.why,
                cuts=cut_points(response.ids, self._decode, self.section.budgets),
                official=verdict.official,
            )
            for (problem, sample), response, text, verdict in zip(pairs, responses, texts, graded, strict=True)
        ]
        write_block(self.folder, block, samples)
        return Made(sum(sample.tokens for sample in samples))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def open_exam(
    steps: Steps,
    policy: Evaluated,
    benchmark: Benchmark,
    settings: SamplingSettings,
    todo: Sequence[Sequence[SampleKey]],
    stage: Stage,
) -> Exam:
    """Load a policy and render what it is asked."""
    section = steps.recipe.asked(policy.name)
    tokenizer = policy.checkpoint.tokenizer
    prompts = [one.prompt.token_ids for one in asked_problems(benchmark, tokenizer, section)]
    _check_lengths(policy, benchmark, prompts)
    grader = Grader.of(benchmark, section, steps.trust)
    sampler = policy.sampler(steps, prompts, settings.max_tokens)
    if policy.given is None:
        note_engine(steps, stage, policy.checkpoint, section)
    return Exam(
        section=section,
        benchmark=benchmark,
        settings=settings,
        todo=todo,
        folder=_blocks(stage),
        grader=GraderProcess(grader),
        tokenizer=tokenizer,
        prompts=prompts,
        sampler=sampler,
    )


def _check_lengths(policy: Evaluated, benchmark: Benchmark, prompts: Sequence[list[int]]) -> None:
    """Refuse a problem that leaves no room for a response before anything is sampled."""
    limit = policy.checkpoint.context_limit
    for problem, ids in zip(benchmark.problems, prompts, strict=True):
        if limit is not None and len(ids) >= limit:
            raise InputError(
                f"{benchmark.name}: problem {problem.id!r} has {len(ids)} tokens, which leaves no room in the {limit} "
                f"of {policy.checkpoint.path}. Leave the problem out, or evaluate a checkpoint with a longer context"
            )


def _blocks(stage: Stage) -> Path:
    return stage.folder / f"blocks-{stage.step.fingerprint}"


def drop_blocks(stage: Stage) -> None:
    for leftover in stage.folder.glob("blocks-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _graded_otherwise(stage: Stage) -> Path | None:
    """Find whole samples that only another recipe's grading keeps from being this one's."""
    name = Path(stage.step.path).name
    folders = [path for path in sorted(stage.folder.parent.glob(f"{name}*")) if path.name.partition("@")[0] == name]
    return next((path for path in (*folders, *stage.aside()) if _differs_in_grading(stage, path)), None)


def _differs_in_grading(stage: Stage, folder: Path) -> bool:
    other = replace(stage, folder=folder)
    manifest = other.manifest()
    new = dict(stage.step.settings)
    if manifest is None or manifest["fingerprint"] == stage.step.fingerprint:
        return False
    old = manifest["settings"]
    inputs = {step.path: step.fingerprint for step in stage.step.inputs}
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    known = changed <= {"profile", "budgets"} and set(new["budgets"]) <= set(old.get("budgets", ()))
    return known and manifest["inputs"] == inputs and not other.damaged()


def _grade_again(
    steps: Steps, stage: Stage, benchmark: Benchmark, grader: Grader, progress: Progress, *, source: Path
) -> None:
    budgets = steps.recipe.eval.budgets
    target = stage.folder / "samples.jsonl"
    problems = {problem.id: problem for problem in benchmark.problems}
    samples = list(read_samples(source / target.name))
    graded = grader.grade([(problems[sample.problem], sample.text) for sample in samples])
    lines = [
        to_line(
            replace(
                sample,
                answer=verdict.answer,
                correct=verdict.correct,
                why=verdict.why,
                cuts={budget: cut for budget, cut in sample.cuts.items() if budget in budgets},
                official=verdict.official,
            )
        )
        for sample, verdict in zip(samples, graded, strict=True)
    ]
    write_atomic(target, "".join(lines).encode())
    for engine in (recorded(source) or {}).get("engines", ()):
        stage.note_engine(engine)
    _summarise(steps, stage, benchmark, grader, progress)


def _summarise(steps: Steps, stage: Stage, benchmark: Benchmark, grader: Grader, progress: Progress) -> None:
    section = steps.recipe.eval
    settings = sampling_settings(section, benchmark)
    target = stage.folder / "samples.jsonl"
    summary = stage.folder / "summary.json"
    problems = {problem.id: problem for problem in benchmark.problems}

    def regrade(cut: list[tuple[Sample, str]]) -> list[bool]:
        return [graded.correct for graded in grader.grade([(problems[sample.problem], text) for sample, text in cut])]

    protocol = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "grading": grader.name,
        "engine": section.engine,
    }
    samples = list(read_samples(target))
    result = summarise(benchmark, samples, protocol, section.budgets, regrade)
    write_summary(summary, result)
    stage.record([target, summary])
    if result.error and not steps.recipe.rehearsal:  # random models answer nothing
        progress.say(f"error: {stage.step.path}: {result.error}")


def prompt_texts(benchmark: Benchmark, tokenizer: Any, section: Eval) -> list[str]:
    """Render every problem as the paper does; the LiveCodeBench prompt is already rendered and not wrapped again."""
    return [one.prompt.text for one in asked_problems(benchmark, tokenizer, section)]


def asked_problems(benchmark: Benchmark, tokenizer: Any, section: Eval) -> list[Asked]:
    """Put every problem to a policy."""
    questions = []
    for problem in benchmark.problems:
        is_code = problem.row is not None
        form = Form(is_code, section.chat, section.thinking, rendered=_is_rendered(benchmark, section))
        messages = _messages(problem, section)
        prompt = Prompt(problem.id, messages, form.text(messages, tokenizer), [])
        columns = {**problem.columns, "answer": problem.answer} if problem.row is None else problem.row
        questions.append(Asked(prompt, {name: value for name, value in columns.items() if value is not None}, form))
    ids = encode([one.prompt.text for one in questions], tokenizer, _is_rendered(benchmark, section))
    return [replace(one, prompt=replace(one.prompt, token_ids=own)) for one, own in zip(questions, ids, strict=True)]


def _messages(problem: Problem, section: Eval) -> list[dict[str, str]]:
    if problem.row is not None:
        return livecodebench(problem.question, str(problem.row.get("starter_code") or ""))
    try:
        return ask(
            section.format,
            [{"role": "user", "content": problem.question}],
            template=section.template,
            system=section.system,
            columns=problem.columns,
        )
    except InputError as error:
        raise InputError(f"eval.template: problem {problem.id}: {error}") from error


def _is_rendered(benchmark: Benchmark, section: Eval) -> bool:
    return benchmark.kind == "code" or section.chat
