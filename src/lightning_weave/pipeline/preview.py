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
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from lightning_weave.bench.definitions import asked_benchmark
from lightning_weave.bench.summary import Summary, read_summary
from lightning_weave.cache.block import Block
from lightning_weave.config import benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.maths import compose_shifts, tilted_target, with_other
from lightning_weave.models.hf import HFSampler
from lightning_weave.progress import Progress
from lightning_weave.report.results import policy_rows
from lightning_weave.report.tables import console
from lightning_weave.runs.anchors import AnchorScorer, LiveAnchors
from lightning_weave.runs.caches import routed_weights
from lightning_weave.runs.discard import allow_discards
from lightning_weave.runs.engines import Engines
from lightning_weave.runs.evaluation import Evaluated, asked_problems, exam_jobs
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.scored import ScoredModel
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.trajectories import pack_rollouts
from lightning_weave.runs.work import do_here
from lightning_weave.store import Step
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
        block = self._block(requests, responses, ids_NC.cpu().numpy().astype(np.int32), log_b_NO.cpu().numpy())
        shifts = torch.from_numpy(block.r_KPC), torch.from_numpy(block.valid_KP)
        r_NC, valid_N = compose_shifts(*shifts, list(self.anchors.weights.values()))
        log_q_NO = tilted_target(log_b_NO, r_NC.to(log_b_NO.device), self.alpha)
        # Tokens that are no candidates keep their odds among themselves.
        log_q_NV = (log_b_NV + (log_q_NO[:, -1] - log_b_NO[:, -1])[:, None]).scatter(1, ids_NC, log_q_NO[:, :-1])
        return torch.where(valid_N.to(log_b_NV.device)[:, None], log_q_NV, log_b_NV)

    def _block(
        self, requests: list[Request], responses: list[list[int]], ids_NC: NDArray[np.int32], log_b_NO: NDArray
    ) -> Block:
        """Put the next decision of every response into a block, as the last token of a longer prompt."""
        states = [
            Request([*request.prompt_ids, *response], request.prompt, request.response)
            for request, response in zip(requests, responses, strict=True)
        ]
        # Any token stands for the one that is about to be drawn: only the decision before it is scored.
        rows = pack_rollouts(states, [Response([int(ids[0])], "length") for ids in ids_NC])
        offsets = rows.response_ids.offsets
        other_N = Ragged(log_b_NO[:, -1], offsets)
        logp_NC = Ragged(log_b_NO[:, :-1], offsets)
        candidates = Candidates(rows.trajectories(), Ragged(ids_NC, offsets), logp_NC, other_N, other_N)
        return self.anchors.block(range(len(states)), rows, candidates)


def run(
    steps: Steps,
    progress: Progress,
    out: Console,
    problems: int,
    only: Sequence[str] | None = None,
    yes: bool = False,
) -> dict[str, list[Summary]]:
    """Evaluate the student and the targets of its compositions on a few problems, and print the table.

    `yes` discards an earlier preview of another target without asking.
    """
    whys = {name: _why_not(steps, name) for name in steps.recipe.compositions}
    can = [name for name, why in whys.items() if not why]
    for name in only or ():
        if whys.get(name, "no such composition"):
            hint = f"; these can be previewed: {', '.join(can)}" if can else ""
            raise InputError(f"--only {name}: {whys.get(name, 'no such composition')}{hint}")
    if not can:
        raise InputError("no composition of this recipe can be previewed: " + _listed(whys))
    if not only and len(can) < len(whys):
        progress.say("left out: " + _listed({name: why for name, why in whys.items() if why}))
    loaded: dict[ScoredModel, AnchorScorer] = {}
    names = ["base", *(only or can)]
    previews = [preview_step(steps, name, bench, problems) for name in names for bench in steps.recipe.eval.benchmarks]
    allow_discards(steps, previews, yes)
    summaries = {name: _evaluate(steps, name, problems, loaded, progress) for name in names}
    out.print(console(policy_rows(summaries)))
    out.print(
        "Bold: best. Underlined: second best. Sampled from the targets themselves: no student was trained for this."
    )
    return summaries


def _why_not(steps: Steps, name: str) -> str:
    """Say why a composition's target cannot be sampled from; nothing if it can."""
    composition = steps.recipe.compositions[name]
    if composition.method != "joint":
        return f"its method is {composition.method}; only shifts that act together have a target to sample from"
    if composition.kl_budget is not None:
        return f"compositions.{name}.kl_budget is solved on the cache, and a preview has none: set alpha"
    return ""


def _listed(whys: dict[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in whys.items()) or "it has none"


def _evaluate(
    steps: Steps, name: str, problems: int, loaded: dict[ScoredModel, AnchorScorer], progress: Progress
) -> list[Summary]:
    section = steps.recipe.eval
    summaries = []
    policy = None
    anchors = None
    for benchmark_name in section.benchmarks:
        stage = steps.store.stage(preview_step(steps, name, benchmark_name, problems))
        if stage.state() != "done":
            benchmark = asked_benchmark(section, benchmark_name).first(problems)
            anchors = anchors or _open_anchors(steps, name, loaded)
            anchors.ask(asked_problems(benchmark, steps.student.tokenizer, section))
            policy = policy or _open_policy(steps, name, anchors)
            do_here(exam_jobs(steps, policy, benchmark, stage, progress, booked="preview"), steps, progress)
        summaries.append(read_summary(stage.folder / "summary.json"))
    return summaries


def preview_step(steps: Steps, name: str, benchmark: str, problems: int) -> Step:
    """What a preview depends on: the models and weights of the composition, the benchmark, how it is sampled."""
    base = steps.eval("base", benchmark)
    settings = {**base.settings, "problems": problems, "candidates": steps.recipe.reference.candidates}
    if name != "base":
        step = steps.train(name)
        keys = ("weights", "alpha", "anchors", "routes")
        settings["target"] = {key: step.settings[key] for key in keys if key in step.settings}
    return Step(f"preview/{name}/{benchmark_folder(benchmark)}", settings, (), steps.command("preview"))


def _open_anchors(steps: Steps, name: str, loaded: dict[ScoredModel, AnchorScorer]) -> LiveAnchors:
    if name == "base":
        return LiveAnchors(steps, {}, loaded=loaded)
    composition = steps.recipe.compositions[name]
    if composition.routes:
        weigh = partial(routed_weights, steps, name)
        return LiveAnchors(steps, dict.fromkeys(sorted(composition.used), 1.0), loaded=loaded, weigh=weigh)
    return LiveAnchors(steps, dict(sorted(composition.used.items())), loaded=loaded)


def _open_policy(steps: Steps, name: str, anchors: LiveAnchors) -> Evaluated:
    student = steps.student
    section = steps.recipe.eval
    device = set_up(steps.recipe, steps.store)
    model = student.load(student.compute_dtype(section.dtype, device), device)
    tilt = None if name == "base" else _open_target(steps, name, anchors)
    sampler = HFSampler(model, student.stop_ids, student.vocabulary, section.batch_size, tilt=tilt)
    return Evaluated(name, student, Engines(), sampler)


def _open_target(steps: Steps, name: str, anchors: LiveAnchors) -> Target:
    composition = steps.recipe.compositions[name]
    assert composition.alpha is not None, "a KL budget has no preview"
    return Target(composition.alpha, steps.recipe.reference.candidates, anchors)
