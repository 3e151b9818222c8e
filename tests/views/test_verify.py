"""`lweave verify` finds a flipped byte anywhere in a finished run, and says what to do."""

from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave.errors import CorruptData
from lightning_weave.progress import Progress
from lightning_weave.stages import reference, rollout
from lightning_weave.views import status as verify
from tiny import make_world, run_of

QUIET = Progress(quiet=True)


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        out = Console(record=True, width=200, file=file)
        verify.verify(run_of(make_world(tmp_path)), QUIET, out)
    assert "no stage is complete yet, so there is nothing to check" in out.export_text()


@pytest.mark.slow
def test_a_flipped_byte_is_found_in_every_file_and_mended_by_the_command_named(tmp_path: Path) -> None:
    run = run_of(make_world(tmp_path))
    rollout.rollout(run, QUIET)
    reference.reference(run, QUIET)
    out = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    verify.verify(run, QUIET, out)
    assert "7 files in 3 complete stages are as they were written" in out.export_text()
    out.file.close()
    files = [
        path for part in ("prompts", "rollout", "reference") for path in (run.directory / part).resolve().glob("0*")
    ]
    for path in [*files, (run.directory / "prompts").resolve() / "prompts.jsonl"]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        with pytest.raises(CorruptData) as raised:
            verify.verify(run, QUIET, Console(quiet=True))
        message = str(raised.value)
        assert str(path) in message
        assert "lweave" in message
        path.unlink()  # as the message says
        rollout.rollout(run, QUIET)
        reference.reference(run, QUIET)
        assert path.read_bytes() == whole
    verify.verify(run, QUIET, Console(quiet=True))
