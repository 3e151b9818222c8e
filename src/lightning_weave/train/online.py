"""Online DOPD: every round samples again, and live anchors score what the current student does (dopd-objective).

The budget is the offline run's: the same prompts in the same order, as many trajectories and updates.
"""

import math
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_weave.cache.block import Block
from lightning_weave.config import Online
from lightning_weave.devices import free_memory, memory_left
from lightning_weave.errors import InputError
from lightning_weave.models.sampler import HFSampler
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.models.worker_process import engine_version
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages.alignment import find_candidates, pack_rollouts
from lightning_weave.stages.engines import PARITY, ROWS, Engines, check_version, judge
from lightning_weave.stages.score import LiveAnchors
from lightning_weave.store.ledger import measure
from lightning_weave.train.checkpoint import wait_until_seen
from lightning_weave.train.data import anchor_doses, format_doses
from lightning_weave.train.export import write_model
from lightning_weave.train.loop import Training, make_fit
from lightning_weave.train.parallel import Ranks, local_shard, reshard
from lightning_weave.train.schedule import Schedule, make_schedule
from lightning_weave.train.student import TrainContext, Trainee, as_sampler, open_trainee
from lightning_weave.types import Prompt, Request, Response, SamplingSettings

FOLDER = "round-"
SHARE = 0.9  # of the free memory of a GPU, rounded to 1 / STEPS: the parity check is kept for the engine's options
STEPS = 20


def train_online(run: Run, name: str, context: TrainContext) -> None:
    """Fit one composition with live anchors. Resumable between rounds."""
    composition = run.recipe.compositions[name]
    assert isinstance(composition, Online), composition.method
    prompts = read_prompts(run.prompts_file)
    schedule = make_schedule(run.recipe, len(prompts), name)
    trainee = open_trainee(run, context, name)
    with closing(LiveRows(run, name, trainee, prompts, schedule, ranks=context.ranks)) as rows:
        fit = make_fit(run, name, trainee, rows, alpha=composition.alpha, ranks=context.ranks)
        training = Training(run, name, schedule, fit, context.progress, before_round=rows.refresh)
        spent = {"method": "online", "fingerprint": training.stage.fingerprint}
        with measure(run.directory, "train", name, **spent) as meter:
            training.say(f"online, {format_doses(anchor_doses(composition, composition.alpha))}")
            figures = {"alpha": composition.alpha, **training.run_updates(training.restore(), meter)}
            if not rows.drawn:  # resumed after the last update: the export reads a few trajectories
                rows.refresh(len(schedule) - 1)
            training.export(training.stage, len(schedule), figures)


class LiveRows:
    """The trajectories of the current round, drawn by the current student."""

    def __init__(
        self, run: Run, name: str, trainee: Trainee, prompts: Sequence[Prompt], schedule: Schedule, *, ranks: Ranks
    ) -> None:
        self.run = run
        self.trainee = trainee
        self.prompts = prompts
        self.schedule = schedule
        self.ranks = ranks
        self.vocabulary = run.student.vocabulary
        initial = run.student.load(torch.float32, ranks.device)
        self.initial = Scorer.from_model(initial, self.vocabulary, run.recipe.score.token_budget)
        weights = dict(sorted(run.recipe.compositions[name].used.items()))
        self.anchors = LiveAnchors(run, weights, keep=run.recipe.train.keep_anchors)
        has_engine = run.recipe.engine.rollout != "hf"
        if has_engine and self.anchors.keep:
            self.anchors.load()  # the engine gets what they leave
        self.engine = RoundEngine(run, name, trainee, prompts, ranks) if has_engine else None
        self.drawn: dict[int, Block] = {}  # row number -> a block of that row
        # Nothing is trained yet: held out are the trajectories that the offline run holds out.
        self.held_out = self._draw(schedule.held_out(), update=0)

    @property
    def weights(self) -> list[float]:
        return list(self.anchors.weights.values())

    def length(self, number: int) -> int:
        return int(self.block([number]).tokens_R[0])

    def block(self, rows: Sequence[int]) -> Block:
        return Block.concatenate([self.held_out[row] if row in self.held_out else self.drawn[row] for row in rows])

    def refresh(self, update: int) -> None:
        """Sample and score the trajectories of this update's round."""
        numbers = [number for each in self.schedule.round_of(update) for number in self.schedule.rows(each)]
        self.drawn = self._draw(numbers, update)

    def close(self) -> None:
        """Stop the engine, if there is one."""
        if self.engine:
            self.engine.close()

    def _draw(self, numbers: Sequence[int], update: int) -> dict[int, Block]:
        """Sample rows from the current student, and score them under it, the initial student and the anchors."""
        if not numbers:
            return {}
        recipe, ranks = self.run.recipe, self.ranks
        own = numbers[ranks.rank :: ranks.world_size]
        places = [divmod(number, recipe.rollout.responses) for number in own]
        requests = [Request(self.prompts[prompt].token_ids, prompt, response) for prompt, response in places]
        # The first epoch draws with the cache's own random numbers: the first round is the offline run's, to the token.
        seed = recipe.rollout.seed + update // self.schedule.per_epoch
        settings = SamplingSettings(recipe.rollout.temperature, 1.0, recipe.rollout.max_tokens, seed)
        responses = self.engine.sample(requests, settings, update) if self.engine else []
        rows = []
        with as_sampler(self.trainee):
            model = self.trainee.model
            if own and not self.engine:
                sampler = HFSampler(model, self.run.student.stop_ids, self.vocabulary, recipe.rollout.batch_size)
                responses = sampler.sample(requests, settings)
            if own:
                rollouts = pack_rollouts(requests, responses)
                student = Scorer.from_model(model, self.vocabulary, recipe.score.token_budget)
                candidates = find_candidates(student, rollouts, recipe.reference.candidates)
            if self.engine:
                self.engine.check(requests, responses)
        if own:
            block = self.anchors.block(own, rollouts, candidates)
            before = find_candidates(self.initial, rollouts, recipe.reference.candidates, candidates)
            block = replace(block, candidates=before, proposal=candidates)
            rows = [(number, block.pick([row])) for row, number in enumerate(own)]
        return dict(ranks.all_gather(rows))


class RoundEngine:
    """One engine of this rank, from the first round to the last; it sleeps while the student computes on its GPU."""

    def __init__(self, run: Run, name: str, trainee: Trainee, prompts: Sequence[Prompt], ranks: Ranks) -> None:
        self.student = run.student
        self.folder = run.stage("train", name).folder
        self.trainee = trainee
        self.ranks = ranks
        self.section = run.recipe.engine_of("rollout")
        check_version(engine_version(self.section.python), "be given the weights of a round", "rollout")
        section = replace(self.section, options={**memory_options(trainee, ranks.device), **self.section.options})
        prompt_ids = [prompt.token_ids for prompt in prompts]
        opened = Engines().sampler(run, self.student, section, prompt_ids, run.recipe.rollout.max_tokens)
        assert isinstance(opened, VLLMSampler), opened
        self.engine = opened

    def sample(self, requests: Sequence[Request], settings: SamplingSettings, update: int) -> list[Response]:
        """Draw from the student before this update; all ranks together."""
        folder = self.student.path
        if update:
            folder = self.folder / f"{FOLDER}{update:06d}"
            reshard(self.trainee)
            write_model(folder, self.trainee, self.student.layout, "", self.ranks, unmerged=True)
            if self.ranks.is_main_process:
                for other in set(self.folder.glob(f"{FOLDER}*")) - {folder}:
                    shutil.rmtree(other, ignore_errors=True)
            self.ranks.barrier()
            wait_until_seen(folder, folder.exists)
        if not requests:
            return []
        free_memory()  # the pool keeps what training has freed, and the engine takes its memory back
        self.engine.reload(folder)
        drawn = self.engine.sample(requests, settings, finite=False)  # `check` judges them
        self.engine.sleep()
        return drawn

    def check(self, requests: Sequence[Request], drawn: Sequence[Response]) -> None:
        """Refuse an engine that has not sampled from the weights that it was given; all ranks together, unsharded.

        The student reads a few responses over all rows of its output matrix, as the engine does.
        """
        model = self.trainee.model
        rows = [(request.prompt_ids, one.ids) for request, one in zip(requests, drawn, strict=True)][:ROWS]
        width = model.get_output_embeddings().weight.shape[0]
        scored = Scorer.from_model(model, width).candidates(rows, 1) if rows else []
        gaps = [
            float(np.abs(sampled_T - np.array(one.logprobs)).sum())
            for (*_, sampled_T), one in zip(scored, drawn, strict=False)
        ]
        total = self.ranks.all_reduce({"gap": math.fsum(gaps), "tokens": sum(len(ids) for _, ids in rows)})
        # The engine's weights are rounded to the dtype of the files.
        dtypes = (self.student.compute_dtype(self.section.dtype, self.ranks.device), self.student.dtype)
        dtype = max(dtypes, key=lambda dtype: PARITY[dtype])
        judge(total["gap"] / total["tokens"], int(total["tokens"]), self.section, self.student, dtype)

    def close(self) -> None:
        """Stop the engine, and remove the weights that it was given."""
        self.engine.close()
        if self.ranks.is_main_process:
            for folder in self.folder.glob(f"{FOLDER}*"):
                shutil.rmtree(folder, ignore_errors=True)


def memory_options(trainee: Trainee, device: torch.device) -> dict[str, Any]:
    """Give an engine on the trainer's GPU the memory that is free, less the optimizer's state to come."""
    free_memory()
    memory = memory_left(device)
    if memory is None:
        return {}
    free, total = memory
    to_come = sum(8 * local_shard(weight)[0].numel() for weight in trainee.parameters() if weight.requires_grad)
    steps = math.floor(STEPS * SHARE * (free - to_come) / total)
    if steps < 1:
        raise InputError(
            'engine.rollout = "vllm": the student, its optimizer and the anchors leave '
            f"{(free - to_come) / 1e9:.1f} of {total / 1e9:.1f} GB for the engine. Set train.keep_anchors = false, use "
            'more ranks, or engine.rollout = "hf"'
        )
    return {"enable_sleep_mode": True, "gpu_memory_utilization": steps / STEPS}
