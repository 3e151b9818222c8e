"""`lweave preview`: sample from the tilted target itself, with live anchors and no training.

Shows what a composition aims at before a GPU hour is spent. It goes through the same alignment and masks as the cache:
where a position is masked, the student's own distribution is used. Anchors read their whole context again at every
step, so this is for a few problems and short answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.summary import Summary, read_summary
from lightning_weave.config import benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.maths import compose_shifts, policy_shift, tilted_target, with_other
from lightning_weave.models.hf import HFSampler, ScoreRow
from lightning_weave.models.load import load_model, load_tokenizer, stop_ids, vocabulary_size
from lightning_weave.pipeline.eval import Policy, evaluate
from lightning_weave.pipeline.score import AnchorReader
from lightning_weave.progress import Progress
from lightning_weave.report.results import policy_rows
from lightning_weave.report.tables import console
from lightning_weave.runs.machine import compute_dtype, set_up
from lightning_weave.runs.steps import ScoredModel, Steps
from lightning_weave.store import Step
from lightning_weave.types import Request


@dataclass(frozen=True)
class Target:
    """The tilted target of a composition, one decision at a time."""

    weights: Sequence[float]
    alpha: float
    candidates: int
    pairs: Sequence[tuple[AnchorReader, AnchorReader]]
    validity: Sequence[str]

    def __call__(self, requests: list[Request], responses: list[list[int]], logits_NV: Tensor) -> Tensor:
        """Tilt the student's distribution by the composed shift, on the whole vocabulary (finite-candidate-target)."""
        log_b_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        logp_NC, ids_NC = log_b_NV.topk(self.candidates, dim=-1)
        other_N = torch.logsumexp(log_b_NV.scatter(1, ids_NC, -torch.inf), dim=-1)
        log_b_NO = with_other(logp_NC, other_N)
        r_KNC, valid_KN = self._shifts(requests, responses, ids_NC)
        r_NC, valid_N = compose_shifts(r_KNC, valid_KN, list(self.weights))
        log_q_NO = tilted_target(log_b_NO, r_NC, self.alpha)
        # Tokens that are no candidates keep their odds among themselves.
        log_q_NV = (log_b_NV + (log_q_NO[:, -1] - log_b_NO[:, -1])[:, None]).scatter(1, ids_NC, log_q_NO[:, :-1])
        return torch.where(valid_N[:, None], log_q_NV, log_b_NV)

    def _shifts(self, requests: list[Request], responses: list[list[int]], ids_NC: Tensor) -> tuple[Tensor, Tensor]:
        shifts, valid = [], []
        for (post, pre), validity in zip(self.pairs, self.validity, strict=True):
            post_NC, post_mapped = _score_next(post, requests, responses, ids_NC)
            pre_NC, pre_mapped = _score_next(pre, requests, responses, ids_NC)
            mapped_NC = post_mapped & pre_mapped
            shifts.append(policy_shift(post_NC, pre_NC).masked_fill(~mapped_NC, 0.0))
            valid.append(mapped_NC.all(dim=-1) if validity == "position" else mapped_NC.any(dim=-1))
        return torch.stack(shifts), torch.stack(valid)


def _score_next(
    reader: AnchorReader, requests: list[Request], responses: list[list[int]], ids_NC: Tensor
) -> tuple[Tensor, Tensor]:
    """Score the candidates of the next decision under one model."""
    rows = []
    for request, response, candidates in zip(requests, responses, ids_NC.cpu().numpy(), strict=True):
        # Any token stands for the one that is about to be drawn: only the decision before it is scored.
        ids_TC = np.tile(candidates, (len(response) + 1, 1))
        prompt, answer = np.array(request.prompt_ids), np.array([*response, candidates[0]])
        row = reader.alignment.align(request.prompt, prompt, answer, ids_TC)
        rows.append(ScoreRow(row.ids, row.positions_T[-1:], row.candidate_ids_TC[-1:], row.mapped_TC[-1:]))
    scored = reader.scorer.score(rows)
    logp_NC = torch.from_numpy(np.concatenate([logp_TC for logp_TC, _ in scored]))
    mapped_NC = torch.from_numpy(np.concatenate([row.mapped_TC for row in rows]))
    return logp_NC.to(ids_NC.device), mapped_NC.to(ids_NC.device)


def run(
    steps: Steps, progress: Progress, out: Console, problems: int, only: Sequence[str] | None = None
) -> dict[str, list[Summary]]:
    """Evaluate the student and the targets of its compositions on a few problems, and print the table."""
    whys = {name: _why_not(steps, name) for name in steps.recipe.compositions}
    can = [name for name, why in whys.items() if not why]
    for name in only or ():
        if whys.get(name, "no such composition"):
            known = f"; these can be previewed: {', '.join(can)}" if can else ""
            raise InputError(f"--only {name}: {whys.get(name, 'no such composition')}{known}")
    if not can:
        raise InputError("no composition of this recipe can be previewed: " + _listed(whys))
    if not only and len(can) < len(whys):
        progress.say("left out: " + _listed({name: why for name, why in whys.items() if why}))
    readers: dict[ScoredModel, AnchorReader] = {}
    found = {"base": _evaluate(steps, "base", problems, readers, progress)}
    for name in only or can:
        found[name] = _evaluate(steps, name, problems, readers, progress)
    out.print(console(policy_rows(found)))
    out.print("Sampled from the targets themselves: no student was trained for this.")
    return found


def _why_not(steps: Steps, name: str) -> str:
    """Say why a composition's target cannot be sampled from; nothing if it can."""
    composition, anchors = steps.recipe.compositions[name], steps.recipe.anchors
    if composition.method != "joint":
        return f"its method is {composition.method}; only shifts that act together have a target to sample from"
    if composition.kl_budget is not None:
        return f"compositions.{name}.kl_budget is solved on a cache, which a preview has not: set alpha"
    native = [anchor for anchor in composition.used if anchors[anchor].prompt == "native"]
    return f'anchors.{native[0]}.prompt = "native": a preview can only project the student\'s prompt' if native else ""


def _listed(whys: dict[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in whys.items()) or "it has none"


def _evaluate(
    steps: Steps, name: str, problems: int, readers: dict[ScoredModel, AnchorReader], progress: Progress
) -> list[Summary]:
    section, found, policy = steps.recipe.eval, [], None
    for benchmark_name in section.benchmarks:
        stage = steps.store.stage(preview_step(steps, name, benchmark_name, problems))
        if stage.state() != "done":
            whole = load_benchmark(benchmark_name, section.sources.get(benchmark_name))
            benchmark = replace(whole, problems=whole.problems[:problems])
            policy = policy or _open_policy(steps, name, readers)
            evaluate(steps, policy, benchmark, stage, progress, booked="preview")
        found.append(read_summary(stage.folder / "summary.json"))
    return found


def preview_step(steps: Steps, name: str, benchmark: str, problems: int) -> Step:
    """What a preview depends on: the models and weights of the composition, the benchmark, how it is sampled."""
    base = steps.eval("base", benchmark)
    settings = {**base.settings, "problems": problems, "candidates": steps.recipe.reference.candidates}
    if name != "base":
        step = steps.train(name)
        settings["target"] = {key: step.settings[key] for key in ("weights", "alpha", "anchors")}
    return Step(f"preview/{name}/{benchmark_folder(benchmark)}", settings, (), f"lweave preview {steps.arguments}")


def _open_policy(steps: Steps, name: str, readers: dict[ScoredModel, AnchorReader]) -> Policy:
    path, trust = steps.student_path, steps.recipe.student.trust_remote_code
    device, section = set_up(steps.recipe, steps.store), steps.recipe.eval
    model = load_model(path, dtype=compute_dtype(section.dtype, path, device), device=device, trust_remote_code=trust)
    tokenizer = load_tokenizer(path, trust)
    tilt = None if name == "base" else _open_target(steps, name, readers)
    sampler = HFSampler(model, stop_ids(path, tokenizer), vocabulary_size(tokenizer), section.batch_size, tilt=tilt)
    return Policy(name, path, trust, sampler)


def _open_target(steps: Steps, name: str, readers: dict[ScoredModel, AnchorReader]) -> Target:
    composition, anchors = steps.recipe.compositions[name], steps.recipe.anchors
    assert composition.alpha is not None, "a KL budget has no preview"
    used = dict(sorted(composition.used.items()))

    def reader(anchor: str, role: str) -> AnchorReader:
        scored = ScoredModel.of(anchors[anchor], "post" if role == "post" else "pre")
        if scored not in readers:
            readers[scored] = AnchorReader.open(steps, scored)
        return readers[scored]

    return Target(
        list(used.values()),
        composition.alpha,
        steps.recipe.reference.candidates,
        [(reader(anchor, "post"), reader(anchor, "pre")) for anchor in used],
        [anchors[anchor].validity for anchor in used],
    )
