"""How policies that need no training are sampled: from the target of a composition, or with a forced answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.block import compute_targets
from lightning_weave.config import SPANS, Eval
from lightning_weave.errors import InputError
from lightning_weave.maths import with_other
from lightning_weave.models.sampler import HFSampler
from lightning_weave.models.scorer import Sampler
from lightning_weave.run import Run, Side
from lightning_weave.stages.alignment import pack_rollouts
from lightning_weave.stages.caches import open_cache, routed_weights
from lightning_weave.stages.prompts import tag_of
from lightning_weave.stages.score import AnchorScorer, LiveAnchors
from lightning_weave.stages.work import set_up
from lightning_weave.train.data import find_dose
from lightning_weave.train.schedule import make_schedule
from lightning_weave.types import Candidates, Prompt, Ragged, Request, Response, SamplingSettings

ANSWER_TOKENS = 32  # after the forced text
THINKING, THINKING_ENDS = SPANS["thinking"]


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


def open_target(run: Run, name: str, loaded: dict[Side, AnchorScorer]) -> Target:
    """Open the anchors of a composition; those that are `loaded` are used, others are added."""
    composition = run.recipe.compositions[name]
    alpha, weights = composition.alpha, dict(sorted(composition.used.items()))
    weigh = partial(routed_weights, run, name) if composition.routes else None
    if run.recipe.cannot_decode(name, cached=False):  # KL budgets, which are solved on the cache as in training
        cache = open_cache(run, name)
        schedule = make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, name)
        alpha = find_dose(run, name, cache, schedule).alpha
        solved = {(one.tag, one.anchor): one.dose for one in cache.shares}
        if solved:
            weigh = partial(_solved_weights, run, name, solved, alpha)
    assert alpha is not None, "given, or solved"
    weights = dict.fromkeys(weights, 1.0) if weigh else weights
    anchors = LiveAnchors(run, weights, grows=True, loaded=loaded, weights_of=weigh)
    return Target(alpha, run.recipe.reference.candidates, anchors)


def _solved_weights(
    run: Run, name: str, doses: Mapping[tuple[str, str], float], alpha: float, asked: Sequence[Prompt]
) -> NDArray[np.float32]:
    """The weights of each prompt over the anchors of a composition whose KL budgets are solved by tag."""
    composition = run.recipe.compositions[name]
    tags = [tag_of(run.recipe, one) if composition.routes else "" for one in asked]
    if unknown := sorted({*tags} - {tag for tag, _ in doses}):
        raise InputError(
            f"compositions.{name}: the KL budgets of its anchors are solved by tag, and no cached prompt has the tag "
            f"{unknown[0]!r} of these problems. Sample such prompts, too, or remove the budgets"
        )
    weights = [[alpha * doses.get((tag, anchor), 0.0) for anchor in sorted(composition.used)] for tag in tags]
    return np.array(weights, np.float32)


def open_decoder(run: Run, name: str, loaded: dict[Side, AnchorScorer]) -> HFSampler:
    """Load the student to sample from a target, or with the name `base` from itself."""
    device = set_up(run)
    student = run.student
    model = student.load(student.compute_dtype(run.recipe.engine_of("eval").dtype, device), device)
    tilt = None if name == "base" else open_target(run, name, loaded)
    return HFSampler(model, student.stop_ids, student.vocabulary, run.recipe.eval.batch_size, tilt=tilt)


@dataclass(frozen=True)
class ForcedSampler:
    """Ends every response at a budget: appends a text that opens the answer, and samples a few tokens more."""

    sampler: Sampler
    budget: int
    tokenizer: Any
    final: str
    limit: int | None = None  # of the context

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request; those that end by themselves within the budget are left alone."""
        responses = self.sampler.sample(requests, replace(settings, max_tokens=self.budget))
        prompts = {}
        for place, one in enumerate(responses):
            if one.finish == "length":
                ids = [*requests[place].prompt_ids, *one.ids]
                prompts[place] = [*ids, *self._opening(ids)]
        cut = [place for place, ids in prompts.items() if self.limit is None or len(ids) < self.limit]
        asked = [replace(requests[place], prompt_ids=prompts[place]) for place in cut]
        later = replace(settings, max_tokens=ANSWER_TOKENS, seed=settings.seed + 1)
        for place, one in zip(cut, self.sampler.sample(asked, later) if asked else (), strict=True):
            before = prompts[place][len(requests[place].prompt_ids) :]
            responses[place] = Response([*before, *one.ids], one.finish)
        return responses

    def close(self) -> None:
        """Release the model."""
        self.sampler.close()

    def _opening(self, ids: list[int]) -> list[int]:
        vocabulary = self.tokenizer.get_vocab()
        begins, ends = vocabulary.get(THINKING), vocabulary.get(THINKING_ENDS)
        marks = [id for id in ids if id in (begins, ends)]  # the template's, and the student's own
        text = f"\n{THINKING_ENDS}\n\n{self.final}" if ends is not None and marks[-1:] == [begins] else self.final
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def final_text(section: Eval, tokenizer: Any) -> str:
    """What opens a forced answer; refused where the tokenizer cannot write it."""
    usual = "\n\nThe final answer is " + ("\\boxed{" if section.format == "boxed" else "")
    text = usual if section.final is None else section.final
    written = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))
    if written.strip() != text.strip():
        raise InputError(f"eval.final = {text!r}: the student's tokens cannot spell it, only {written!r}. Set another")
    return text
