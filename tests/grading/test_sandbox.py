"""What happens where there is no sandbox, or none that works."""

from pathlib import Path

import pytest

from grading import problems
from grading.conftest import PATIENT
from lightning_weave.errors import InputError
from lightning_weave.grading.code import grade_code
from lightning_weave.grading.sandbox import Limits, Sandbox, SandboxError, open_sandbox

HOSTILE = problems.programs("hostile")


def test_a_sandbox_that_cannot_start_is_an_error_and_never_a_verdict(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho no namespaces today >&2\nexit 1\n")
    fake.chmod(0o755)
    failing = Sandbox(Limits(), 1, str(fake))
    with pytest.raises(SandboxError, match="no namespaces today"):
        grade_code(problems.ADD_SOLUTION, problems.ADD, failing)
    fake.write_text("#!/no/such/interpreter")
    with pytest.raises(SandboxError, match="cannot be started"):
        grade_code(problems.ADD_SOLUTION, problems.ADD, failing)


def test_without_bubblewrap_it_refuses_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        open_sandbox()
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(InputError, match="cannot be run here"):
        open_sandbox()


def test_the_clock_of_programs_does_not_decide_whether_there_is_a_sandbox(bubblewrap: str) -> None:
    with open_sandbox(slots=1, limits=Limits(seconds=1e-6)) as hasty:
        assert grade_code(problems.ADD_SOLUTION, problems.ADD, hasty).reason == "timeout"


@pytest.mark.slow
def test_the_unsafe_way_needs_a_word_gives_a_warning_and_still_limits() -> None:
    opened = []
    for seconds in (PATIENT, 1.5):
        limits = Limits(seconds=seconds, memory=256 << 20, output=1 << 20)
        with pytest.warns(UserWarning, match="WITHOUT a sandbox"):
            opened.append(open_sandbox(unsafe_local=True, slots=1, limits=limits))
    local, hasty = opened
    assert not grade_code("print(0)", problems.ADD, local).correct
    for name in ("add", "double"):
        problem, solution = problems.PROBLEMS[name]
        assert grade_code(solution, problem, local).correct
    for title in ("heap", "endless lines", "sleep", "fork bomb", "memfd"):
        (program,) = [item for item in HOSTILE.items() if item[0].startswith(f"{title} / ")]
        reason = grade_code(program[1], problems.ADD, hasty if title == "sleep" else local).reason
        assert program[0].endswith(reason), (title, reason)
    for one in opened:
        one.close()
