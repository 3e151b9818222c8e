"""`lweave eval`: sample, grade and summarise every policy on every benchmark."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from lightning_weave.bench.definitions import asked_benchmark, load_benchmark
from lightning_weave.bench.export import export_samples
from lightning_weave.bench.lock import check_lock
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.checks.watch import Watch, check_evaluation, warn
from lightning_weave.errors import InputError
from lightning_weave.pipeline.harness import run_tasks
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_first
from lightning_weave.report.results import track_evaluation
from lightning_weave.runs.engines import Engines, longest_context
from lightning_weave.runs.evaluation import (
    Evaluated,
    asked_problems,
    drop_blocks,
    exam_jobs,
    prompt_texts,
    sampling_settings,
)
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, do_here, make_room


def run(
    steps: Steps, progress: Progress, only: Sequence[str] | None = None, do: Do = do_here, watch: Watch = warn
) -> None:
    """Evaluate every policy that is not up to date. Resumable block by block, and task by task of another harness."""
    _check_names(steps, only)
    with Engines() as engines:
        for name in steps.policies:
            if only is None or name in only:
                run_policy(steps, name, progress, engines, do=do, watch=watch)
    run_tasks(steps, progress, only)


def run_policy(
    steps: Steps, name: str, progress: Progress, engines: Engines, do: Do = do_here, watch: Watch = warn
) -> None:
    """Evaluate one policy on the benchmarks that are not up to date."""
    stages = {benchmark: steps.store.stage(steps.eval(name, benchmark)) for benchmark in steps.recipe.eval.benchmarks}
    waiting = {benchmark: stage for benchmark, stage in stages.items() if stage.state() != "done"}
    for benchmark in stages.keys() - waiting.keys():
        make_room(stages[benchmark])  # of a run that was killed as it ended
        drop_blocks(stages[benchmark])
    if not waiting:
        return
    policy = Evaluated(name, steps.policy(name), engines)
    engines.room = room_of(steps, name)
    jobs = []
    for benchmark, stage in waiting.items():
        whole = load_benchmark(benchmark, steps.recipe.eval.sources.get(benchmark))
        check_lock(whole, steps.store.run_dir / "eval" / "benchmarks.json")
        jobs += exam_jobs(steps, policy, whole.first(steps.recipe.eval.problems), stage, progress)
    do(jobs, steps, progress)
    watch(partial(check_evaluation, steps, name), True, progress)
    if is_first():
        track_evaluation(steps, name)


def room_of(steps: Steps, name: str) -> int:
    """Say how long the contexts of a policy's engine must be for all benchmarks; 0 where it needs no saying."""
    section = steps.recipe.asked(name)
    if section.engine == "hf":
        return 0
    checkpoint = steps.policy(name)
    lengths = []
    for benchmark in (asked_benchmark(section, each) for each in section.benchmarks):
        prompts = [one.prompt.token_ids for one in asked_problems(benchmark, checkpoint.tokenizer, section)]
        lengths.append(longest_context(checkpoint, prompts, sampling_settings(section, benchmark).max_tokens))
    return max(lengths)


def run_harness(steps: Steps, progress: Progress, only: Sequence[str] | None = None) -> None:
    """Run the tasks of another harness alone."""
    _check_names(steps, only)
    run_tasks(steps, progress, only)


def _check_names(steps: Steps, only: Sequence[str] | None) -> None:
    if unknown := sorted(set(only or ()) - set(steps.policies)):
        raise InputError(f"{unknown[0]!r}: no such policy; this recipe has {', '.join(steps.policies)}")


def export_lm_eval(steps: Steps, folder: Path, when: datetime) -> list[Path]:
    """Write every finished evaluation as lm-evaluation-harness sample files, a folder per policy."""
    section = steps.recipe.eval
    files = []
    for policy in steps.policies:
        for name in section.benchmarks:
            stage = steps.store.stage(steps.eval(policy, name))
            if stage.state() != "done":
                continue
            benchmark = asked_benchmark(section, name)
            prompts = prompt_texts(benchmark, steps.policy(policy).tokenizer, steps.recipe.asked(policy))
            samples = read_samples(stage.folder / "samples.jsonl")
            settings = read_summary(stage.folder / "summary.json").settings
            files.append(export_samples(folder / policy, benchmark, prompts, samples, settings=settings, when=when))
    return files
