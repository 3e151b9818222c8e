"""forget removes one policy and nothing else; tests/runs/test_known.py does so after real trainings."""

from pathlib import Path

from rich.console import Console

from lightning_weave.views import forget
from tiny import make_world, steps_of


def test_only_the_policy_goes(tmp_path: Path) -> None:
    steps = steps_of(make_world(tmp_path))
    run_dir = steps.store.run_dir
    for name in ("train/both/final", "eval/both/bench", "eval/both/bench@12345678", "eval/base/bench", "preview/both"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "sweep.toml").write_text("[compositions.both.weights]\nacc = 1.0\n[compositions.x.weights]\nacc = 1.0\n")
    forget.run(steps, "both", Console(quiet=True), yes=True)
    assert not list(run_dir.glob("*/both"))
    assert not list(run_dir.rglob(".tmp-*"))
    assert (run_dir / "eval/base/bench").is_dir()
    assert (run_dir / "sweep.toml").read_text() == "[compositions.x.weights]\nacc = 1.0\n"
