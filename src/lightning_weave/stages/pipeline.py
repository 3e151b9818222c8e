"""The stages before training, in order: rollout, reference, score."""

from lightning_weave.checks.watch import Watch, warn
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.engines import Engines, share_an_engine
from lightning_weave.stages.eval import evaluate_policy, room_of
from lightning_weave.stages.reference import reference
from lightning_weave.stages.rollout import rollout
from lightning_weave.stages.score import score
from lightning_weave.stages.work import LOCAL, Executor, wait_for_ranks
from lightning_weave.types import Candidates, Rollouts, Scores


def make_cache(
    run: Run,
    progress: Progress,
    executor: Executor = LOCAL,
    watch: Watch = warn,
    evaluates: bool = False,
    until: str = "score",
) -> None:
    """Compute everything that offline training reads. `watch` receives the findings.

    If the student is evaluated too, its rollouts' engine does that before it is closed, where it can.
    """
    shared = evaluates and share_an_engine(run.recipe.engine_of("rollout"), run.recipe.engine_of("eval"))
    with Engines(room_of(run, "base") if shared else 0) as engines:
        shards = rollout(run, progress, executor, watch, engines)
        if shared:
            evaluate_policy(run, "base", progress, engines, executor, watch=watch)
    wait_for_ranks(run.stage("rollout"), Rollouts, shards)
    if until == "rollout":
        return
    with Engines() as engines:
        reference(run, progress, executor, engines)
        wait_for_ranks(run.stage("reference"), Candidates, shards)
        if until == "reference":
            return
        score(run, progress, executor=executor, watch=watch, engines=engines)
    for side in run.score_names:
        wait_for_ranks(run.stage("score", side), Scores, shards)
