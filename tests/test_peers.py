"""The whole-vocabulary objective against an independent implementation (`make test-peers`).

TRL's GKDTrainer with lmbda = 0 and beta = 1 minimises KL(student || teacher) on tokens that it is given. A teacher with
logits  log b + sum_i w_i (log p_i+ - log p_i-) / alpha  is the composed target, so its loss is ours over alpha.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Scorer, ScoreRow
from lightning_weave.run import ROLES, Run, Side
from lightning_weave.stages.caches import open_cache
from lightning_weave.train.loop import Fit, make_fit
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import open_trainee
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores
from rounding import assert_same_weights
from rows import read_row
from train.cached import VOCABULARY, context, make_run, save_student

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

ALPHA = 1.7
WEIGHTS = {"long": 0.7, "short": 0.3}
CPU = torch.device("cpu")
ROWS = list(range(8))
UPDATES = 5


class ComposedTeacher(nn.Module):
    """Several models behind one face: what the composition would be as a single teacher."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.student = Checkpoint(str(run.student.path)).load(torch.float32, CPU)
        self.config = self.student.config
        self.pairs = nn.ModuleDict(
            {
                name: nn.ModuleList(
                    Checkpoint(str(Path(path))).load(torch.float32, CPU) for path in (section.post, section.pre)
                )
                for name, section in run.recipe.anchors.items()
            }
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        def log_probs(model: Any) -> Tensor:
            return torch.log_softmax(model(input_ids=input_ids, attention_mask=attention_mask).logits, dim=-1)

        outputs = self.student(input_ids=input_ids, attention_mask=attention_mask)
        logits = log_probs(self.student)
        for name, (post, pre) in self.pairs.items():
            logits = logits + WEIGHTS[name] * (log_probs(post) - log_probs(pre)) / ALPHA
        outputs.logits = logits
        return outputs


def make_scored_run(root: Path) -> Run:
    """A cache of the whole vocabulary, with anchors that are models of their own."""
    run = make_run(
        root,
        groups=4,
        candidates=VOCABULARY,
        student={"vocab_size": VOCABULARY},
        compositions={"both": {"weights": WEIGHTS, "alpha": ALPHA}},
        train={"objective": "reverse-kl-full", "token_budget": 30, "optimizer": {"weight_decay": 0.0, "clip": 1e9}},
    )
    for seed, section in enumerate(run.recipe.anchors.values()):
        for role, path in enumerate((section.post, section.pre)):
            save_student(Path(path), seed=10 + 2 * seed + role, dtype=torch.float32, vocab_size=VOCABULARY)
    run = Run(run.recipe, run.arguments)  # the anchors' identities have changed
    for name in run.recipe.anchors:
        for role in ROLES:
            score_all(run, run.side(name, role))
    return run


def score_all(run: Run, scored: Side) -> None:
    stage = run.stage("score", scored)
    scorer = Scorer.from_model(Checkpoint(str(scored.checkpoint.path)).load(torch.float32, CPU), VOCABULARY)
    shards = len(run.stage("rollout").require()["shards"])
    for shard in range(shards):
        rollouts = run.stage("rollout").open(Rollouts, shard).read()
        found = run.stage("reference").open(Candidates, shard).read()
        rows = []
        for prompt, response, ids_TC in zip(rollouts.prompt_ids, rollouts.response_ids, found.ids, strict=True):
            positions_T = np.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
            mapped_TC = np.ones(ids_TC.shape, dtype=bool)
            rows.append(ScoreRow(np.concatenate([prompt, response]), positions_T, ids_TC, mapped_TC))
        logp, mass = (Ragged.of(list(part)) for part in zip(*scorer.score(rows), strict=True))
        mapped = Ragged(np.ones(logp.flat.shape, dtype=bool), logp.offsets)
        stage.write(shard, Scores(found.trajectory_R, logp, mapped, mass))
    stage.finish(Scores, shards)


def frozen_tokens(fit: Fit) -> dict[str, Tensor]:
    """The same trajectories as TRL wants them: padded, with labels that leave out prompts and padding."""
    rows = [read_row(fit.cache, number) for number in ROWS]
    batch = {
        name: torch.full((len(rows), max(row.tokens for row in rows)), fill)
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }
    for index, row in enumerate(rows):
        batch["input_ids"][index, : row.tokens] = torch.tensor([*row.prompt_ids, *row.response_ids])
        batch["attention_mask"][index, : row.tokens] = 1
        batch["labels"][index, len(row.prompt_ids) : row.tokens] = torch.tensor(row.response_ids)
    return batch


def make_trainer(run: Run, root: Path) -> Any:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    settings = GKDConfig(
        output_dir=str(root / "trl"),
        lmbda=0.0,
        beta=1.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = GKDTrainer(
        model=Checkpoint(str(run.student.path)).load(torch.float32, CPU).requires_grad_(True),
        teacher_model=ComposedTeacher(run),
        args=settings,
        train_dataset=Dataset.from_list([{"unused": 0}]),
        data_collator=lambda rows: rows,
        processing_class=Checkpoint(str(run.student.path)).tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # as its own loop would set it
    return trainer


def test_the_whole_vocabulary_objective_is_trls_loss_times_alpha(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run = make_scored_run(tmp_path)
    ranks = Ranks(0, 1, CPU)
    trainee = open_trainee(run, context(ranks))
    fit = make_fit(run, "both", trainee, open_cache(run, "both"), alpha=ALPHA, ranks=ranks)
    trainer = make_trainer(run, tmp_path)
    # Adam does not see alpha, and both optimizers are given the same rest.
    theirs = torch.optim.AdamW(trainer.model.parameters(), 1e-3, weight_decay=0.0)
    losses = []
    for step in range(1, UPDATES + 1):
        theirs.zero_grad()
        loss = trainer.training_step(trainer.model, frozen_tokens(fit))
        theirs.step()
        losses.append((fit.update(step, ROWS)["loss"], ALPHA * loss.item()))
    assert losses[-1][0] < 0.9 * losses[0][0], "they learned something"
    np.testing.assert_allclose([ours for ours, _ in losses], [their for _, their in losses], rtol=1e-5)
    found, expected = (dict(model.named_parameters()) for model in (fit.trainee.model, trainer.model))
    assert_same_weights(found, expected, updates=UPDATES, learning_rate=1e-3, apart=1e-5)
