"""Plain lines when piped, silence on other ranks, bars on a terminal."""

import io
import logging
import re
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave import progress as module
from lightning_weave.progress import Progress, duration, keep_log

DATED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def test_piped_output_is_plain_lines_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY", 0.0)
    with Progress().bar("score klear", 4, "shard") as bar:
        for _ in range(4):
            bar.advance(note="all well")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(DATED + r"score klear: 2/4 shards, \S+ shards/s, (\d+ [hm] )?\d+ [ms] left, all well", lines[1])
    assert re.fullmatch(DATED + r"score klear: 4/4 shards, \S+ shards/s, all well", lines[3])
    assert "\x1b" not in "".join(lines)


def test_not_every_step_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY", 3600.0)
    with Progress().bar("train", 1000, "update") as bar:
        for _ in range(1000):
            bar.advance()
    assert len(capsys.readouterr().err.splitlines()) == 1, "the last"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    quiet = Progress()
    quiet.say("hello")
    with quiet.bar("train", 1, "update") as bar:
        bar.advance()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    shown = Progress()
    shown.console = Console(file=screen, force_terminal=True, width=120)
    with shown.bar("rollout", 2, "shard") as bar:
        bar.advance(note="half")
        bar.advance()
    assert "rollout" in screen.getvalue()
    assert "2/2" in screen.getvalue()
    assert "━" in screen.getvalue()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_gets_a_bar_that_is_drawn_in_place() -> None:
    """In a real kernel with widgets: one output, which is drawn again, not a line for every step."""
    nbclient = pytest.importorskip("nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    cell = new_code_cell(
        "from lightning_weave.progress import Progress\n"
        "with Progress().bar('rollout', 30, 'shard') as bar:\n"
        "    for _ in range(30):\n"
        "        bar.advance()\n"
    )
    notebook = nbclient.execute(new_notebook(cells=[cell]), startup_timeout=600, iopub_timeout=600)
    shown, *rest = notebook.cells[0].outputs
    assert all(output.output_type == "display_data" and not output.data["text/plain"] for output in rest)  # no lines
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    state = widgets[shown.data["application/vnd.jupyter.widget-view+json"]["model_id"]]
    drawn = state["state"]["outputs"][-1]["data"]["text/html"]
    assert drawn.count("rollout") == 1
    assert "30/30" in drawn


def test_messages_are_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().say("aliases = { '[EOS]' = '</s>' }")
    assert "aliases = { '[EOS]' = '</s>' }" in capsys.readouterr().err


def test_durations_are_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (0.2, 59.4, 61, 3600)] == ["0 s", "59 s", "1 m 01 s", "1 h 00 m"]


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_a_bar_is_whole_at_any_width_and_details_are_shown_where_there_is_room(width: int) -> None:
    screen = io.StringIO()
    shown = Progress()
    shown.console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with shown.bar("train weave-of-three-anchors-at-0.5", 400, "update") as bar:
        for _ in range(123):
            bar.advance(note="loss 0.1234, KL 0.0567")
    lines = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", screen.getvalue())) if line]
    assert max(map(len, lines)) <= width
    assert re.search(r"train weave-of-three-anch… .*━.* 123/400 updates \S+/s ", lines[-1]) or width < 80, lines[-1]
    assert ("loss 0.1234" in lines[-1]) == (width >= 100)


def test_the_log_of_a_run_has_everything_that_was_said(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for command in ("lweave run a.toml", "lweave train a.toml"):
        with suppress(ValueError), keep_log(log, command):
            Progress().say("student: 3 shards")
            with Progress().bar("score", 1, "shard") as bar:
                bar.advance()
            logging.getLogger("lightning_weave.runs").warning("warning: little memory")
            raise ValueError("wrong input")
    Progress().say("not in the log")
    lines = [re.sub(DATED, "", line, count=1) for line in log.read_text().splitlines()]
    assert [line for line in lines if "score" not in line] == [
        "$ lweave run a.toml",
        "student: 3 shards",
        "warning: little memory",
        "ended early: wrong input",
        "$ lweave train a.toml",
        "student: 3 shards",
        "warning: little memory",
        "ended early: wrong input",
    ]
    assert lines[2].startswith("score: 1/1 shards")


def test_a_stage_of_one_shard_shows_its_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY", 0.0)
    module.show_rows(1, 2)  # without a bar
    with Progress().bar("rollout", 1, "shard") as bar:
        module.show_rows(1_000, 2_000)
        bar.advance()
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "rollout: 0/1 shards, 1,000/2,000 rows"
    assert lines[1].startswith("rollout: 1/1 shards, ")
    assert "rows" not in lines[1]
