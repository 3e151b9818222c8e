"""`lweave preview`: sample from the tilted target itself, with live anchors and no training.

Shows what a composition aims at before a GPU hour is spent. It goes through the same alignment and masks as the cache:
where a position is masked, the student's own distribution is used. Anchors read their whole context again at every
step, so this is for a few problems and short answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.summary import Summary, read_summary
from lightning_weave.cache.block import compute_targets
from lightning_weave.config import benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.maths import with_other
from lightning_weave.models.sampler import HFSampler
from lightning_weave.progress import Progress
from lightning_weave.report.results import results_table
from lightning_weave.report.tables import console, format_results
from lightning_weave.run import Run, Side, without_anchor_names
from lightning_weave.stages.alignment import pack_rollouts
from lightning_weave.stages.caches import routed_weights
from lightning_weave.stages.engines import Engines
from lightning_weave.stages.eval import NO_BENCHMARK, EvaluatedPolicy, eval_job
from lightning_weave.stages.prompts import render_problems
from lightning_weave.stages.score import AnchorScorer, LiveAnchors
from lightning_weave.stages.work import run_jobs, set_up
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Ragged, Request, Response


@dataclass(frozen=True)
class Target:
    """The tilted target of a composition, one decision at a time."""

    alpha: float
    candidates: int
    anchors: LiveAnchors

    def __call__(self, requests: list[Request], responses: list[list[int]], logits_NV: Tensor) -> Tensor:
        """Tilt the student's distribution by the composed shift, on the whole vocabulary (finite-candidate-target)."""
        log_b_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        logp_NC, ids_NC = log_b_NV.topk(self.candidates, dim=-1)
        other_N = torch.logsumexp(log_b_NV.scatter(1, ids_NC, -torch.inf), dim=-1)
        log_b_NO = with_other(logp_NC, other_N)
        # The next decision of every response, as the last token of a longer prompt. Any token stands for the one that
        # is about to be drawn: only the decision before it is scored.
        states = [
            Request([*request.prompt_ids, *response], request.prompt, request.response)
            for request, response in zip(requests, responses, strict=True)
        ]
        candidate_ids = ids_NC.cpu().numpy().astype(np.int32)
        rows = pack_rollouts(states, [Response([int(ids[0])], "length") for ids in candidate_ids])
        offsets = rows.response_ids.offsets
        log_b = log_b_NO.cpu().numpy()
        logp, other = Ragged(log_b[:, :-1], offsets), Ragged(log_b[:, -1], offsets)
        candidates = Candidates(rows.trajectories(), Ragged(candidate_ids, offsets), logp, other, other)
        block = self.anchors.block(range(len(states)), rows, candidates)
        targets = compute_targets(block, list(self.anchors.weights.values()), self.alpha)
        log_q_NO = torch.from_numpy(targets.log_q_PO).to(log_b_NO.device)
        # Tokens that are not candidates keep their odds among themselves.
        return (log_b_NV + (log_q_NO[:, -1] - log_b_NO[:, -1])[:, None]).scatter(1, ids_NC, log_q_NO[:, :-1])


def preview(
    run: Run,
    progress: Progress,
    out: Console,
    problems: int,
    only: Sequence[str] | None = None,
) -> dict[str, list[Summary]]:
    """Evaluate the student and the targets of its compositions on a few problems, and print the table."""
    whys = {}  # why the target of a composition cannot be sampled from
    for name, composition in run.recipe.compositions.items():
        whys[name] = ""
        if composition.method != "joint":
            method = composition.method
            whys[name] = f"its method is {method}; only shifts that act together have a target to sample from"
        elif composition.kl_budget is not None:
            whys[name] = f"compositions.{name}.kl_budget is solved on the cache, and a preview has none: set alpha"
    can = [name for name, why in whys.items() if not why]
    cannot = "; ".join(f"{name} ({why})" for name, why in whys.items() if why)
    for name in only or ():
        if whys.get(name, "no such composition"):
            hint = f"; these can be previewed: {', '.join(can)}" if can else ""
            raise InputError(f"--only {name}: {whys.get(name, 'no such composition')}{hint}")
    if not can:
        raise InputError(f"no composition of this recipe can be previewed: {cannot or 'it has none'}")
    if not only and cannot:
        progress.say(f"left out: {cannot}")
    if not run.recipe.eval.benchmarks:
        raise InputError(f"nothing to preview on: {NO_BENCHMARK}")
    section = run.recipe.eval
    student = run.student
    loaded: dict[Side, AnchorScorer] = {}  # for all targets
    summaries: dict[str, list[Summary]] = {}
    for name in ["base", *(only or can)]:
        policy = target = None
        summaries[name] = []
        for benchmark_name in section.benchmarks:
            stage = preview_stage(run, name, benchmark_name, problems)
            if not stage.complete:
                benchmark = load_eval_benchmark(run.recipe, benchmark_name).first(problems)
                if policy is None:
                    device = set_up(run)
                    model = student.load(student.compute_dtype(run.recipe.engine_of("eval").dtype, device), device)
                    target = None if name == "base" else open_target(run, name, loaded)
                    sampler = HFSampler(model, student.stop_ids, student.vocabulary, section.batch_size, tilt=target)
                    policy = EvaluatedPolicy(name, student, Engines(), sampler)
                if target is not None:
                    target.anchors.set_prompts(render_problems(benchmark, student.tokenizer, section, run.recipe.date))
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
    settings = {**base.settings, "problems": problems, "candidates": run.recipe.reference.candidates}
    hashed = None
    if name != "base":
        train = run.stage("train", name).settings
        settings["target"] = {key: train[key] for key in ("weights", "alpha", "anchors", "routes") if key in train}
        hashed = {**settings, "target": without_anchor_names(settings["target"])}
    path = f"preview/{name}/{benchmark_folder(benchmark)}"
    return Stage(run.directory, path, settings, (), run.command("preview"), key=hashed)


def open_target(run: Run, name: str, loaded: dict[Side, AnchorScorer]) -> Target:
    """Open the anchors of a composition; those that are `loaded` are used, others are added."""
    composition = run.recipe.compositions[name]
    assert composition.alpha is not None, "a KL budget has no preview"
    weights = dict(sorted(composition.used.items()))
    weigh = partial(routed_weights, run, name) if composition.routes else None
    weights = dict.fromkeys(weights, 1.0) if weigh else weights
    anchors = LiveAnchors(run, weights, loaded=loaded, weights_of=weigh)
    return Target(composition.alpha, run.recipe.reference.candidates, anchors)
