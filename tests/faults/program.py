"""Run `lweave` in processes to which something happens; a program, so that torch is imported only once.

Reads JSON jobs from stdin, one per line. Each forks; the child runs the command line. Audit events of the interpreter
tell it which file of the run it is about to write or rename, and at the planned one the fault strikes: a signal to
itself, at once or a moment later, or a limit on its memory. Nothing of the package is replaced. Answers one JSON line.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_weave import cli

STAGES = ("rollout", "reference", "score", "train", "eval", "sweep", "verify", "status")
MODELS = ("qwen3.modeling_qwen3", "llama.modeling_llama")
WRITING = os.O_WRONLY | os.O_RDWR


def strike(fault: dict[str, Any]) -> None:
    """Do it: a signal to this process, or a limit on what it may still allocate."""
    if fault["kind"] != "memory":
        os.kill(os.getpid(), getattr(signal, fault["kind"]))
        return
    signal.alarm(20)  # a thread that cannot start may be waited for without end
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + fault["bytes"], resource.RLIM_INFINITY))


def strike_later(fault: dict[str, Any]) -> None:
    time.sleep(fault["delay"])
    strike(fault)


def watch(folder: str, report: int, fault: dict[str, Any] | None) -> None:
    """Report every write and rename in the folders of a run's stages; at the planned one, let the fault strike."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in {"open", "os.rename"} or (event == "open" and not arguments[2] & WRITING):
            return
        path = os.path.relpath(str(arguments[0]), folder)
        if path.startswith("..") or "/" not in path:  # neither elsewhere nor the recipe and the ledger
            return
        seen += 1
        os.write(report, f"{'write' if event == 'open' else 'rename'} {path}\n".encode())
        if fault is None or seen != fault["event"]:
            return
        if fault["delay"]:
            threading.Thread(target=strike_later, args=(fault,), daemon=True).start()
        else:
            strike(fault)

    sys.addaudithook(hook)


def run(job: dict[str, Any]) -> int:
    """Run the command line in this process and return its exit code."""
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where tests run in the background
    sys.argv = ["lweave", *job["arguments"]]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 99  # no clean end
    return 0


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, run, wait; say how it ended, what it wrote and what it said."""
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.close(read)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            watch(f"{job['folder']}/runs/tiny", write, job.get("fault"))
            code = run(job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.close(write)
        with os.fdopen(read) as pipe:
            events = pipe.read().splitlines()
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        ended = os.waitstatus_to_exitcode(status)
        return {"ended": ended, "events": events, "said": said.read()}


if __name__ == "__main__":
    for stage in STAGES:  # here, not once in every child
        import_module(f"lightning_weave.stages.{stage}")
    for model in MODELS:
        import_module(f"transformers.models.{model}")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
