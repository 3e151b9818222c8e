"""The order in which data flows: the only file that knows all stages. Stages never import each other.

prompts -> rollout -> reference -> score -> train -> eval
"""

from collections.abc import Sequence

from lightning_weave.checks.watch import Watch, warn
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline import prompts, reference, rollout, score, train
from lightning_weave.progress import Progress
from lightning_weave.runs.engines import Engines, share_an_engine
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import HERE, Do, Workers, do_here, wait_for_ranks
from lightning_weave.types import Candidates, Rollouts, Scores


def make_rollouts(
    steps: Steps, progress: Progress, do: Do = do_here, watch: Watch = warn, engines: Engines | None = None
) -> int:
    """Build the prompts and sample the student's responses; returns the number of shards."""
    prompts.run(steps, progress)
    return rollout.run(steps, progress, do, watch, engines)


def make_cache(
    steps: Steps, progress: Progress, do: Do = do_here, watch: Watch = warn, evaluates: bool = False
) -> None:
    """Make everything that offline training reads. `watch` receives the findings.

    If the student is evaluated too, its rollouts' engine does that before it is closed, where it can.
    """
    shared = evaluates and share_an_engine(steps.recipe.rollout, steps.recipe.eval)
    with Engines(eval_stage.room_of(steps, "base") if shared else 0) as engines:
        shards = make_rollouts(steps, progress, do, watch, engines)
        if shared:
            eval_stage.run_policy(steps, "base", progress, engines, do=do, watch=watch)
    wait_for_ranks(steps.store.stage(steps.rollout), Rollouts, shards)
    with Engines() as engines:
        reference.run(steps, progress, do, engines)
        wait_for_ranks(steps.store.stage(steps.reference), Candidates, shards)
        score.run(steps, progress, do=do, watch=watch, engines=engines)
    for scored in steps.score_names:
        wait_for_ranks(steps.store.stage(steps.score(scored)), Scores, shards)


def make_students(
    steps: Steps,
    progress: Progress,
    only: Sequence[str] | None = None,
    watch: Watch = warn,
    workers: Workers = HERE,
) -> None:
    """Train compositions. Those that sample while they train make their own cache, with the stages above."""
    if "online" in steps.methods(only):
        prompts.run(steps, progress)
    train.run(steps, progress, make_cache, only, watch, workers=workers)


def make_everything(steps: Steps, progress: Progress, workers: Workers = HERE, watch: Watch = warn) -> None:
    """Bring every stage up to date; what is up to date is not touched."""
    if steps.recipe.compositions:
        if steps.needs_cache:
            make_cache(steps, progress, workers.do, watch, evaluates=True)
        make_students(steps, progress, watch=watch, workers=workers)
    eval_stage.run(steps, progress, do=workers.do, watch=watch)


def evaluate(steps: Steps, progress: Progress, only: Sequence[str] | None = None, workers: Workers = HERE) -> None:
    """Evaluate policies."""
    eval_stage.run(steps, progress, only, workers.do)
