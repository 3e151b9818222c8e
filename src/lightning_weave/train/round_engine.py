"""vLLM as the sampler of online training: before each round it gets the weights that the student has by then.

They are written as a checkpoint below the composition's folder, which every rank's engine reads in place of its own.
"""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_weave.devices import memory_left
from lightning_weave.models.engine_process import engine_version
from lightning_weave.models.hf import hf_scorer
from lightning_weave.models.vllm import Drawn, VLLMSampler
from lightning_weave.runs.engines import Engines, check_version
from lightning_weave.runs.parity import ROWS, Agreement, judge
from lightning_weave.runs.steps import Steps
from lightning_weave.train.checkpoint import wait_until_seen
from lightning_weave.train.export import write_model
from lightning_weave.train.objectives import Trainee
from lightning_weave.train.parallel import Ranks, own_part, reshard
from lightning_weave.types import Prompt, Request, SamplingSettings

FOLDER = "round-"
SHARE = 0.9  # of what is left of a GPU, in steps of 1 / STEPS: what is remembered of an engine names its options
STEPS = 20


class RoundEngine:
    """One engine of this rank, from the first round to the last; it sleeps while the student computes on its GPU."""

    def __init__(self, steps: Steps, name: str, trainee: Trainee, prompts: Sequence[Prompt], ranks: Ranks) -> None:
        self.student = steps.student
        self.folder = steps.store.stage(steps.train(name)).folder
        self.trainee = trainee
        self.ranks = ranks
        self.section = steps.recipe.rollout
        check_version(engine_version(self.section.python), "be given the weights of a round", "[rollout]")
        options = {**room_beside(trainee, ranks.device), **self.section.options}
        section = self.section.model_copy(update={"options": options})
        prompt_ids = [prompt.token_ids for prompt in prompts]
        opened = Engines().sampler(steps, self.student, section, prompt_ids, section.max_tokens)
        assert isinstance(opened, VLLMSampler), opened
        self.engine = opened

    def sample(self, requests: Sequence[Request], settings: SamplingSettings, update: int) -> list[Drawn]:
        """Draw from the student as it is before this update; all ranks together."""
        folder = self._written(update) if update else self.student.path
        if not requests:
            return []
        self.engine.reload(folder)
        drawn = self.engine.sample_with_logprobs(requests, settings)
        self.engine.rest()
        return drawn

    def check(self, requests: Sequence[Request], drawn: Sequence[Drawn]) -> None:
        """Refuse an engine that has not sampled from the weights that it was given; all ranks together, weights whole.

        The student reads a few responses over all rows of its output matrix, as the engine does.
        """
        model = self.trainee.model
        rows = [(request.prompt_ids, one.response.ids) for request, one in zip(requests, drawn, strict=True)][:ROWS]
        scored = hf_scorer(model, model.get_output_embeddings().weight.shape[0]).candidates(rows, 1) if rows else []
        gaps = [
            float(np.abs(sampled_T - np.array(one.logprobs)).sum())
            for (*_, sampled_T), one in zip(scored, drawn, strict=False)
        ]
        total = self.ranks.total({"gap": math.fsum(gaps), "tokens": sum(len(ids) for _, ids in rows)})
        judge(Agreement(total["gap"] / total["tokens"], int(total["tokens"])), self.section, self.student)

    def close(self) -> None:
        """Stop the engine, and remove what it was given."""
        self.engine.close()
        if self.ranks.first:
            self._remove_all_but(None)

    def _written(self, update: int) -> Path:
        folder = self.folder / f"{FOLDER}{update:06d}"
        reshard(self.trainee)
        write_model(folder, self.trainee, self.student.layout, "", self.ranks, beside=True)
        if self.ranks.first:
            self._remove_all_but(folder)
        self.ranks.wait()
        wait_until_seen(folder, folder.exists)
        return folder

    def _remove_all_but(self, current: Path | None) -> None:
        for other in self.folder.glob(f"{FOLDER}*"):
            if other != current:
                shutil.rmtree(other, ignore_errors=True)


def room_beside(trainee: Trainee, device: torch.device) -> dict[str, Any]:
    """Say what an engine may take of the GPU that a trainer is on: what is left, less the optimizer's state to come."""
    memory = memory_left(device)
    if memory is None:
        return {}
    free, total = memory
    to_come = sum(8 * own_part(weight)[0].numel() for weight in trainee.parameters() if weight.requires_grad)
    share = max(1, math.floor(STEPS * SHARE * (free - to_come) / total)) / STEPS
    return {"enable_sleep_mode": True, "gpu_memory_utilization": share}
