"""Online DOPD: every round samples anew, and live anchors score what the current student does (dopd-objective).

The budget is the offline run's: the same prompts in the same order, as many trajectories and updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning_weave.cache.reader import Row
from lightning_weave.cache.sources import pair_shift
from lightning_weave.config import Online
from lightning_weave.errors import InputError
from lightning_weave.models.hf import HFSampler, Scorer
from lightning_weave.models.load import load_model, load_tokenizer, stop_ids, vocabulary_size
from lightning_weave.pipeline import prompts as prompts_stage
from lightning_weave.pipeline.reference import find_candidates, reread_candidates
from lightning_weave.pipeline.rollout import pack_rollouts
from lightning_weave.pipeline.score import AnchorReader
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import ScoredModel, Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import measure
from lightning_weave.train.dose import anchor_doses, in_words
from lightning_weave.train.objectives import Trainee
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.schedule import Schedule
from lightning_weave.train.training import Job, make_fit, make_schedule, open_trainee
from lightning_weave.types import Prompt, Request, SamplingSettings


def train_online(steps: Steps, name: str, stage: Stage, ranks: Ranks, dtype: torch.dtype, progress: Progress) -> None:
    """Fit one composition with live anchors. Resumable between rounds."""
    if ranks.world > 1:
        raise InputError(f"compositions.{name}: online training runs on one rank; start it without torchrun")
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Online), composition.method
    prompts = prompts_stage.make(steps, progress)
    schedule = make_schedule(steps.recipe, len(prompts), epochs=composition.epochs)
    trainee = open_trainee(steps, ranks, dtype)
    live = LiveRows(steps, name, trainee, prompts, schedule)
    fit = make_fit(steps, name, trainee, live, composition.alpha, ranks, stage)
    job = Job(steps, name, stage, schedule, fit, progress, before_round=live.refresh)
    with measure(steps.store.run_dir, "train", name, method="online") as meter:
        job.say(f"online, {in_words(anchor_doses(composition, composition.alpha))}")
        figures = {"alpha": composition.alpha, **job.fit_all(job.go_to_start(), meter)}
        if not live.rows:  # resumed after the last update: the export looks at a few trajectories
            live.refresh(len(schedule) - 1)
        job.finish(figures)


@dataclass(frozen=True)
class Pair:
    """One live anchor pair."""

    name: str
    weight: float
    validity: str


class LiveRows:
    """The trajectories of the round under way, as the current student drew them."""

    def __init__(
        self, steps: Steps, name: str, trainee: Trainee, prompts: Sequence[Prompt], schedule: Schedule
    ) -> None:
        self.steps, self.trainee, self.prompts, self.schedule = steps, trainee, prompts, schedule
        path, trust = steps.student_path, steps.recipe.student.trust_remote_code
        tokenizer = load_tokenizer(path, trust)
        self.stop, self.vocabulary = stop_ids(path, tokenizer), vocabulary_size(tokenizer)
        device = next(trainee.parameters()).device
        initial = load_model(path, dtype=torch.float32, device=device, trust_remote_code=trust)
        self.initial = Scorer(initial, self.vocabulary, steps.recipe.reference.token_budget)
        self.pairs = [
            Pair(anchor, weight, steps.recipe.anchors[anchor].validity)
            for anchor, weight in sorted(steps.recipe.compositions[name].weights.items())
            if weight != 0
        ]
        self.readers: dict[ScoredModel, AnchorReader] = {}
        self.rows: dict[int, Row] = {}
        # Nothing is trained yet: held out are the trajectories that the offline run holds out.
        self.held_out = self._draw(schedule.held_out(), epoch=0)

    @property
    def weights(self) -> list[float]:
        return [pair.weight for pair in self.pairs]

    def length(self, number: int) -> int:
        return self.read(number).tokens

    def read(self, number: int) -> Row:
        return self.held_out[number] if number in self.held_out else self.rows[number]

    def refresh(self, update: int) -> None:
        """Sample and score the trajectories of this update's round."""
        numbers = [number for each in self.schedule.round_of(update) for number in self.schedule.rows(each)]
        self.rows = self._draw(numbers, self.schedule.epoch_of(update))

    def _draw(self, numbers: Sequence[int], epoch: int) -> dict[int, Row]:
        if not numbers:
            return {}
        self.trainee.model.eval()
        rows = self._make(numbers, epoch)
        self.trainee.model.train()
        return rows

    def _make(self, numbers: Sequence[int], epoch: int) -> dict[int, Row]:
        section, model = self.steps.recipe.rollout, self.trainee.model
        places = [divmod(number, section.responses) for number in numbers]
        requests = [Request(self.prompts[prompt].token_ids, prompt, response) for prompt, response in places]
        # The first epoch draws with the cache's own random numbers: the first round is the offline run's, to the token.
        settings = SamplingSettings(section.temperature, section.top_p, section.max_tokens, section.seed + epoch)
        sampler = HFSampler(model, self.stop, self.vocabulary, section.batch_size)
        drawn = pack_rollouts(requests, sampler.sample(requests, settings))
        student = Scorer(model, self.vocabulary, self.steps.recipe.reference.token_budget)
        candidates = find_candidates(student, drawn, self.steps.recipe.reference.candidates)
        behaviour = reread_candidates(self.initial, drawn, candidates)
        scores = [
            [self._reader(pair.name, role).score(drawn, candidates) for role in ("post", "pre")] for pair in self.pairs
        ]
        rows = {}
        for index, number in enumerate(numbers):
            shifts = [
                pair_shift(post.only(index), pre.only(index), pair.validity)
                for pair, (post, pre) in zip(self.pairs, scores, strict=True)
            ]
            rows[number] = Row(
                number,
                drawn.prompt_ids[index],
                drawn.response_ids[index],
                behaviour.ids[index],
                behaviour.logp[index],
                behaviour.other_logp[index],
                behaviour.sampled_logp[index],
                *_stacked(shifts),
            )
        return rows

    def _reader(self, anchor: str, role: str) -> AnchorReader:
        scored = ScoredModel.of(self.steps.recipe.anchors[anchor], "post" if role == "post" else "pre")
        if self.steps.recipe.train.keep_anchors:
            if scored not in self.readers:
                self.readers[scored] = AnchorReader.open(self.steps, scored)
            return self.readers[scored]
        return AnchorReader.open(self.steps, scored)


def _stacked(shifts: Sequence[tuple]) -> tuple:
    return np.stack([r_TC for r_TC, _ in shifts]), np.stack([valid_T for _, valid_T in shifts])
