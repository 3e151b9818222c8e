"""Plain lines when piped, silence on other ranks, bars on a terminal."""

import io
import re

import pytest
from rich.console import Console

from lightning_weave import progress as module
from lightning_weave.progress import Progress, duration


def test_piped_output_is_plain_lines_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY", 0.0)
    with Progress().bar("score klear", 4, "shard") as bar:
        for _ in range(4):
            bar.advance(note="all well")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"score klear: 2/4 shards, \S+ shards/s, (\d+ [hm] )?\d+ [ms] left, all well", lines[1])
    assert re.fullmatch(r"score klear: 4/4 shards, \S+ shards/s, all well", lines[3])
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


def test_messages_are_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().say("aliases = { '[EOS]' = '</s>' }")
    assert "aliases = { '[EOS]' = '</s>' }" in capsys.readouterr().err


def test_durations_are_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (0.2, 59.4, 61, 3600)] == ["0 s", "59 s", "1 m 01 s", "1 h 00 m"]
