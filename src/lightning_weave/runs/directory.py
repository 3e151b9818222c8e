"""The run directory while something is written there: held by one process, with its recipe and a log."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_weave.config import dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.progress import keep_log
from lightning_weave.ranks import check_ranks
from lightning_weave.runs.known import FILE, remember
from lightning_weave.runs.steps import Steps
from lightning_weave.store import lock_run, write_atomic

# All that is in a run directory before its first stage.
UNTOUCHED = {".lock", "recipe.toml", "made.toml", "machine.json", "log.txt"}


@contextmanager
def writing(steps: Steps, command: str) -> Iterator[None]:
    """Hold the run directory and write the resolved recipe before anything else. Wrong input leaves no new one.

    `command` is what the log says before all that is said meanwhile.
    """
    check_ranks()
    run_dir = steps.store.run_dir
    recipe = run_dir / "recipe.toml"
    is_new = not run_dir.exists()
    before = {path: path.read_bytes() for path in (recipe, run_dir / FILE) if path.exists()}
    try:
        with lock_run(run_dir), keep_log(run_dir / "log.txt", command):
            remember(steps)
            write_atomic(recipe, dump_recipe(steps.recipe).encode())
            yield
            steps.remember()
    except InputError:
        if is_new and run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= UNTOUCHED:
            shutil.rmtree(run_dir)
        elif before:
            (run_dir / FILE).unlink(missing_ok=True)
            for path, content in before.items():
                write_atomic(path, content)
        raise
