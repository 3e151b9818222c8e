"""`lweave preview`: sample from the tilted target itself, with live anchors and no training.

Shows what a composition aims at before a GPU hour is spent. It goes through the same alignment and masks as the cache:
where a position is masked, the student's own distribution is used. Anchors with another tokenizer read their whole
context again at every step, so this is for a few problems and short answers.
"""

from collections.abc import Sequence

from rich.console import Console

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.summary import Summary, read_summary
from lightning_weave.config import benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.results import results_table
from lightning_weave.report.tables import console, format_results
from lightning_weave.run import Run, Side, without_anchor_names
from lightning_weave.stages.decoding import open_decoder
from lightning_weave.stages.engines import Engines
from lightning_weave.stages.eval import NO_BENCHMARK, EvaluatedPolicy, eval_job
from lightning_weave.stages.score import AnchorScorer
from lightning_weave.stages.work import run_jobs
from lightning_weave.store import Stage


def preview(
    run: Run, progress: Progress, out: Console, problems: int, only: Sequence[str] | None = None
) -> dict[str, list[Summary]]:
    """Evaluate the student and the targets of its compositions on a few problems, and print the table."""
    whys = {name: run.recipe.cannot_decode(name, cached=False) for name in run.recipe.written}
    can = [name for name, why in whys.items() if not why]
    cannot = "; ".join(f"{name} ({why})" for name, why in whys.items() if why)
    for name in only or ():
        if why := whys.get(name, "no such composition"):
            hint = f"; these can be previewed: {', '.join(can)}" if can else ""
            raise InputError(f"--only {name}: {why}{hint}")
    if not can:
        raise InputError(f"no composition of this recipe can be previewed: {cannot or 'it has none'}")
    if not only and cannot:
        progress.say(f"left out: {cannot}")
    if not run.recipe.eval.benchmarks:
        raise InputError(f"nothing to preview on: {NO_BENCHMARK}")
    loaded: dict[Side, AnchorScorer] = {}  # for all targets
    summaries: dict[str, list[Summary]] = {}
    for name in ["base", *(only or can)]:
        policy = None
        summaries[name] = []
        for benchmark_name in run.recipe.eval.benchmarks:
            stage = preview_stage(run, name, benchmark_name, problems)
            if not stage.complete:
                benchmark = load_eval_benchmark(run.recipe, benchmark_name).first(problems)
                if policy is None:
                    policy = EvaluatedPolicy(name, run.student, Engines(), open_decoder(run, name, loaded))
                if job := eval_job(run, policy, benchmark, stage, progress):
                    run_jobs([job], run, progress)
            summaries[name].append(read_summary(stage.folder / "summary.json"))
    out.print(console(format_results(results_table(summaries))))
    out.print(
        "Bold: best. Underlined: second best. Sampled from the targets themselves: no student was trained for this."
    )
    return summaries


def preview_stage(run: Run, name: str, benchmark: str, problems: int) -> Stage:
    """What a preview depends on: the models and weights of the composition, the benchmark, how it is sampled."""
    base = run.stage("eval", "base", benchmark)
    settings = {**base.settings, "problems": problems}
    hashed = None
    if name != "base":
        settings["target"] = run.target_settings(name)
        hashed = {**settings, "target": without_anchor_names(settings["target"])}
    path = f"preview/{name}/{benchmark_folder(benchmark)}"
    return Stage(run.directory, path, settings, (), run.command("preview"), key=hashed)
