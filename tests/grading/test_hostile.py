"""Programs that attack the grader, each run in the real sandbox: the right verdict, and the host as it was before."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_weave
from grading import problems
from grading.conftest import PATIENT
from lightning_weave.grading.code import grade_code, grade_many
from lightning_weave.grading.sandbox import Limits, Program, RunResult, Sandbox, SandboxError, Slot, open_sandbox

HOSTILE = problems.programs("hostile")
USES_ALL = """
import os, threading
a, b = map(int, input().split())
assert os.listdir("/tmp") == [] and os.getpriority(os.PRIO_PROCESS, 0) == PRIORITY
open("/tmp/PLANTED", "wb").write(bytes(1 << 20))
parts = []
workers = [threading.Thread(target=parts.append, args=(x,)) for x in [a, b] * 10]
for worker in workers: worker.start()
for worker in workers: worker.join()
if os.fork() == 0:
    os._exit(0)
print(sum(parts) // 10)
"""
ONE_SUM = problems.row("one sum", [("1 2\n", "3\n")])
BOMB = """
import os, time
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
"""
GRADE_AS_USER = f"""
import json, sys
sys.path.insert(0, "")
from lightning_weave.grading.code import grade_many
from lightning_weave.grading.sandbox import Limits, open_sandbox
sandbox = open_sandbox(slots=2, limits=Limits(seconds={PATIENT}, memory=512 << 20, output=4 << 20, scratch=4 << 20))
print(json.dumps([verdict.reason for verdict in grade_many(json.load(open("jobs.json")), sandbox)]))
"""
AS_USER = [title for title in HOSTILE if "timeout" not in title and " / add / " in title]
SLOW = "import time\na, b = map(int, input().split())\ntime.sleep(0.3)\nprint(a + b)"


def uses_all() -> str:
    """A program that needs everything it is entitled to, among it our own priority, whatever that is."""
    return USES_ALL.replace("PRIORITY", str(os.getpriority(os.PRIO_PROCESS, 0))).replace("PLANTED", problems.MARK)


def descendants(of: int) -> set[str]:
    """List the processes that descend from one or run as a user of its sandboxes, as the kernel shows them."""
    seen: dict[str, tuple[str, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        seen[folder.name] = (fields["PPid"], int(fields["Uid"].split()[0]))
    found, first = {str(of)}, 1_000_000_000 + (of << 8)
    for _ in range(8):  # generations
        found |= {pid for pid, (parent, uid) in seen.items() if parent in found or first <= uid < first + 256}
    return found - {str(of)}


def planted() -> list[Path]:
    """List the files that a program of these tests has written outside of its sandbox."""
    folders = [
        "/",
        "/tmp",
        tempfile.gettempdir(),
        "/dev",
        "/dev/shm",
        "/usr",
        "/root",
        "/home",
        Path.home(),
        Path.cwd(),
    ]
    return [path for folder in map(Path, folders) for path in folder.glob(f"{problems.MARK}*")]


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves processes, files or open descriptors behind."""
    gc.collect()  # what earlier tests have left open is none of this one's business
    sandboxes = [request.getfixturevalue(name) for name in ("sandbox", "hasty")]
    monkeypatch.setenv("GRADER_SECRET", "GRADER_SECRET")
    for used in sandboxes:
        used.close()
    processes, descriptors = descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    yield
    for used in sandboxes:
        used.close()
    assert descendants(os.getpid()) <= processes
    assert planted() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("title", HOSTILE)
def test_a_hostile_program_gets_its_verdict_and_does_no_harm(sandbox: Sandbox, hasty: Sandbox, title: str) -> None:
    _, name, reason = title.split(" / ")
    used = hasty if reason == "timeout" else sandbox
    verdict = grade_code(HOSTILE[title], problems.PROBLEMS[name][0], used)
    assert verdict.reason == reason, verdict
    if reason != "timeout":  # whose sandbox is thrown away
        assert grade_code(uses_all(), ONE_SUM, used).reason == "passed"  # the next program in the same slot


def test_an_untouched_sandbox_is_kept_and_a_touched_one_is_not(sandbox: Sandbox) -> None:
    def process_after(source: str) -> int:
        with sandbox.slot() as slot:
            slot.run(Program(source), b"")
            return 0 if slot._process is None else slot._process.pid

    first = process_after("print(1)")
    assert process_after("raise ValueError") == first != 0
    write = f"open('/tmp/{problems.MARK}', 'w').close()"
    assert process_after(write) == 0
    assert process_after(f"{write}\nimport os; os.remove('/tmp/{problems.MARK}')") == 0
    assert process_after("import os, time\nif os.fork() == 0: time.sleep(60)") == 0
    assert process_after("print(1)") not in (0, first)


@pytest.mark.slow
def test_parallel_slots_do_not_interfere() -> None:
    """The bombs end by themselves, so that no clock decides how long the others have for their work beside them."""
    killer = HOSTILE["kill everything, then answer / add / passed"]
    files = HOSTILE["symlink planted for the host / add / passed"]
    jobs = [BOMB, uses_all(), killer, files, BOMB, killer, files, uses_all()]
    with open_sandbox(slots=3, limits=Limits(seconds=PATIENT, memory=512 << 20)) as crowded:
        verdicts = grade_many([(code, problems.ADD) for code in jobs], crowded)
        assert [verdict.reason for verdict in verdicts] == ["wrong answer" if job == BOMB else "passed" for job in jobs]


def kill_inside(slot: Slot) -> None:
    assert slot._first is not None
    assert slot._process is not None
    signal.pidfd_send_signal(slot._first, signal.SIGKILL)
    slot._process.wait()


def test_a_sandbox_that_is_killed_from_outside_is_tried_again(sandbox: Sandbox) -> None:
    with sandbox.slot() as slot:
        assert slot.run(Program(SLOW), b"1 2\n").output == b"3\n"
        killer = threading.Timer(0.1, kill_inside, [slot])
        killer.start()
        assert slot.run(Program(SLOW), b"2 3\n").output == b"5\n"
        killer.join()


def test_a_program_whose_sandbox_always_breaks_fails_but_only_if_others_run(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Slot._attempt

    def broken(slot: Slot, program: Program, stdin: bytes, seconds: float | None = None) -> RunResult | None:
        if stdin != spared:
            if slot._process is None:
                slot._start()
            kill_inside(slot)
        return attempt(slot, program, stdin, seconds)

    monkeypatch.setattr(Slot, "_attempt", broken)
    spared = b"ready\n"
    verdict = grade_code(SLOW, problems.ADD, sandbox)
    assert (verdict.reason, verdict.detail) == ("runtime error", "the program destroyed its own sandbox")
    spared = b""
    with pytest.raises(SandboxError, match="any program"):
        grade_code(SLOW, problems.ADD, sandbox)


def test_a_killed_grader_leaves_nothing_running(sandbox: Sandbox) -> None:
    script = (
        "from lightning_weave.grading.sandbox import Limits, Program, open_sandbox\n"
        "with open_sandbox(slots=1, limits=Limits(seconds=600)).slot() as slot:\n"
        "    print('running', flush=True)\n"
        "    slot.run(Program('while True: pass'), b'')\n"
    )
    grader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert grader.stdout is not None
    assert grader.stdout.readline() == b"running\n"
    while len(before := descendants(grader.pid)) < 3:  # bubblewrap, process 1, the program
        time.sleep(0.02)
    grader.kill()
    grader.communicate()
    while any(runs(pid) for pid in before):
        time.sleep(0.02)


def runs(pid: str) -> bool:
    """Whether a process has not ended; a container may reap nobody, and leave a zombie."""
    try:
        return "zombie" not in Path("/proc", pid, "status").read_text()
    except OSError:  # gone, perhaps between two looks
        return False


def test_a_test_that_cannot_be_set_up_is_an_error_and_never_a_verdict(bubblewrap: str) -> None:
    """The kernel refuses an impossible limit in the process that is to become the program."""
    failing = Sandbox(Limits(files=-5), 1, bubblewrap)
    with pytest.raises(SandboxError, match="any program"):
        grade_code(problems.ADD_SOLUTION, problems.ADD, failing)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="every other test has already run as a user who is not root")
def test_it_works_for_a_user_who_is_not_root(sandbox: Sandbox) -> None:
    """Repeat some verdicts as another user, in a user namespace, with the system's interpreter."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    recent = "import sys; sys.exit(sys.version_info < (3, 11))"
    if python is None or subprocess.run([python, "-c", recent], check=False).returncode:
        pytest.skip("the system has no Python 3.11 that another user could run")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(lightning_weave.__file__).parent
        shutil.copytree(package / "grading", Path(folder, "lightning_weave", "grading"))
        for name in ("__init__.py", "errors.py"):
            shutil.copy(package / name, Path(folder, "lightning_weave"))
        jobs = [(code, problems.ADD, title.split(" / ")[2]) for title, code in HOSTILE.items() if title in AS_USER]
        jobs += [(solution, problem, "passed") for problem, solution in problems.PROBLEMS.values()]
        Path(folder, "jobs.json").write_text(json.dumps([job[:2] for job in jobs]))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        done = subprocess.run(
            [python, "-c", GRADE_AS_USER],
            cwd=folder,
            user=65534,
            group=65534,
            extra_groups=[],
            env={},
            capture_output=True,
        )
    if b"cannot be run here" in done.stderr:
        pytest.skip(f"this machine gives other users no namespaces: {done.stderr.decode()[-200:]}")
    assert json.loads(done.stdout) == [reason for _, _, reason in jobs], done.stderr.decode()
