"""Online DOPD: every round samples again, and live anchors score what the current student does (dopd-objective).

The budget is the offline run's: the same prompts in the same order, as many trajectories and updates.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from lightning_weave.cache.block import Block
from lightning_weave.config import Online
from lightning_weave.models.hf import HFSampler, hf_scorer
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.anchors import LiveAnchors
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.trajectories import find_candidates, pack_rollouts, rescore_candidates
from lightning_weave.store.ledger import measure
from lightning_weave.train.dose import anchor_doses, in_words
from lightning_weave.train.objectives import Trainee, without_dropout
from lightning_weave.train.parallel import Ranks, whole
from lightning_weave.train.round_engine import RoundEngine
from lightning_weave.train.schedule import Schedule, make_schedule
from lightning_weave.train.training import TrainContext, Training, make_fit, open_trainee
from lightning_weave.types import Candidates, Prompt, Request, Response, Rollouts, SamplingSettings


def train_online(steps: Steps, name: str, context: TrainContext) -> None:
    """Fit one composition with live anchors. Resumable between rounds."""
    prompts = read_prompts(steps.prompts_file)
    schedule = make_schedule(steps.recipe, len(prompts), epochs=steps.recipe.compositions[name].epochs)
    trainee = open_trainee(steps, context)
    with closing(LiveRows(steps, name, trainee, prompts, schedule, ranks=context.ranks)) as rows:
        _fit(steps, name, trainee, rows, context)


def _fit(steps: Steps, name: str, trainee: Trainee, rows: "LiveRows", context: TrainContext) -> None:
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Online), composition.method
    fit = make_fit(steps, name, trainee, rows, alpha=composition.alpha, ranks=context.ranks)
    training = Training(steps, name, rows.schedule, fit, context.progress, before_round=rows.refresh)
    spent = {"method": "online", "fingerprint": training.stage.step.fingerprint}
    with measure(steps.store.run_dir, "train", name, **spent) as meter:
        training.say(f"online, {in_words(anchor_doses(composition, composition.alpha))}")
        figures = {"alpha": composition.alpha, **training.fit_all(training.go_to_start(), meter)}
        if not rows.drawn:  # resumed after the last update: the export looks at a few trajectories
            rows.refresh(len(rows.schedule) - 1)
        training.finish(figures)


class LiveRows:
    """The trajectories of the current round, as the current student drew them."""

    def __init__(
        self,
        steps: Steps,
        name: str,
        trainee: Trainee,
        prompts: Sequence[Prompt],
        schedule: Schedule,
        *,
        ranks: Ranks,
    ) -> None:
        self.steps = steps
        self.trainee = trainee
        self.prompts = prompts
        self.schedule = schedule
        self.ranks = ranks
        self.vocabulary = steps.student.vocabulary
        initial = steps.student.load(torch.float32, ranks.device)
        self.initial = hf_scorer(initial, self.vocabulary, steps.recipe.reference.token_budget)
        weights = dict(sorted(steps.recipe.compositions[name].used.items()))
        self.anchors = LiveAnchors(steps, weights, keep=steps.recipe.train.keep_anchors)
        self.engine = RoundEngine(steps, name, trainee, prompts, ranks) if _has_engine(steps) else None
        self.drawn: dict[int, Block] = {}  # row number -> a block of that row
        # Nothing is trained yet: held out are the trajectories that the offline run holds out.
        self.held_out = self._draw(schedule.held_out(), update=0)

    @property
    def weights(self) -> list[float]:
        return list(self.anchors.weights.values())

    def length(self, number: int) -> int:
        return int(self.block([number]).tokens_R[0])

    def block(self, rows: Sequence[int]) -> Block:
        return Block.joined([self.held_out[row] if row in self.held_out else self.drawn[row] for row in rows])

    def refresh(self, update: int) -> None:
        """Sample and score the trajectories of this update's round."""
        numbers = [number for each in self.schedule.round_of(update) for number in self.schedule.rows(each)]
        self.drawn = self._draw(numbers, update)

    def close(self) -> None:
        """Stop the engine, where one samples."""
        if self.engine:
            self.engine.close()

    def _draw(self, numbers: Sequence[int], update: int) -> dict[int, Block]:
        if not numbers:
            return {}
        own = numbers[self.ranks.rank :: self.ranks.world]
        section = self.steps.recipe.rollout
        places = [divmod(number, section.responses) for number in own]
        requests = [Request(self.prompts[prompt].token_ids, prompt, response) for prompt, response in places]
        # The first epoch draws with the cache's own random numbers: the first round is the offline run's, to the token.
        seed = section.seed + self.schedule.epoch_of(update)
        settings = SamplingSettings(section.temperature, section.top_p, section.max_tokens, seed)
        drawn = self.engine.sample(requests, settings, update) if self.engine else []
        with without_dropout(self.trainee), whole(self.trainee):
            responses = [one.response for one in drawn] if self.engine else self._sample(requests, settings)
            rollouts = pack_rollouts(requests, responses) if own else None
            candidates = self._candidates(rollouts) if rollouts else None
            if self.engine:
                self.engine.check(requests, drawn)
        block = self._block(own, rollouts, candidates) if rollouts and candidates else None
        return dict(
            self.ranks.gathered([(number, block.pick([row])) for row, number in enumerate(own)] if block else [])
        )

    def _sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Sample with the student where it is trained."""
        batch_size = self.steps.recipe.rollout.batch_size
        sampler = HFSampler(self.trainee.model, self.steps.student.stop_ids, self.vocabulary, batch_size)
        return sampler.sample(requests, settings) if requests else []

    def _candidates(self, rollouts: Rollouts) -> Candidates:
        """What the current student finds likely."""
        reference = self.steps.recipe.reference
        student = hf_scorer(self.trainee.model, self.vocabulary, reference.token_budget)
        return find_candidates(student, rollouts, reference.candidates)

    def _block(self, numbers: Sequence[int], rollouts: Rollouts, candidates: Candidates) -> Block:
        """What the initial student and the anchors say of these candidates."""
        block = self.anchors.block(numbers, rollouts, candidates)
        return replace(block, candidates=rescore_candidates(self.initial, rollouts, candidates), proposal=candidates)


def _has_engine(steps: Steps) -> bool:
    return steps.recipe.rollout.engine != "hf"
