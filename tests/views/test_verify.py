"""`lweave verify` finds a flipped byte anywhere in a finished run, and says what to do."""

from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave.errors import CorruptData
from lightning_weave.pipeline import reference
from lightning_weave.pipeline.flow import make_rollouts
from lightning_weave.progress import Progress
from lightning_weave.views import verify
from tiny import make_world, steps_of

QUIET = Progress(quiet=True)


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        out = Console(record=True, width=200, file=file)
        verify.run(steps_of(make_world(tmp_path)), QUIET, out)
    assert "nothing is finished yet, so there is nothing to check" in out.export_text()


@pytest.mark.slow
def test_a_flipped_byte_is_found_in_every_file_and_mended_by_the_command_named(tmp_path: Path) -> None:
    steps = steps_of(make_world(tmp_path))
    make_rollouts(steps, QUIET)
    reference.run(steps, QUIET)
    out = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    verify.run(steps, QUIET, out)
    assert "7 files in 3 finished stages are as they were written" in out.export_text()
    out.file.close()
    files = [path for part in ("prompts", "rollout", "reference") for path in (steps.store.run_dir / part).glob("0*")]
    for path in [*files, steps.store.run_dir / "prompts" / "prompts.jsonl"]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        with pytest.raises(CorruptData) as raised:
            verify.run(steps, QUIET, Console(quiet=True))
        message = str(raised.value)
        assert str(path) in message
        assert "lweave" in message
        path.unlink()  # as the message says
        make_rollouts(steps, QUIET)
        reference.run(steps, QUIET)
        assert path.read_bytes() == whole
    verify.run(steps, QUIET, Console(quiet=True))
