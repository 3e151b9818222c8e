"""Run `lweave` in processes that are killed; a program, run by test_resume.py, so that torch is imported only once.

Reads JSON jobs from stdin, one per line. Each forks; the child runs the command line and is killed by SIGKILL in the
middle of the stage's second write, or some time after its second shard was renamed into place. Audit events of the
interpreter tell it where it is; nothing of the package is replaced. Answers with one line of JSON per job.
"""

import json
import os
import signal
import sys
import threading
import time
from importlib import import_module

from lightning_weave import cli

STAGES = [f"lightning_weave.stages.{stage}" for stage in ("rollout", "reference", "score", "verify")]
MODELS = ["transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama"]


def die(when: str, delay: float) -> None:
    """Arrange the kill: at the second shard's write, or `delay` after its rename."""
    seen = 0

    def kill_later() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        wanted = "open" if when == "write" else "os.rename"
        if event != wanted or ".safetensors" not in str(arguments[0]) or ".tmp-" not in str(arguments[0]):
            return
        seen += 1
        if seen == 2 and when == "write":
            os.kill(os.getpid(), signal.SIGKILL)
        elif seen == 2:
            threading.Thread(target=kill_later).start()

    sys.addaudithook(hook)


def start(job: dict[str, object]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(job.get("environment") or {})
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if job.get("kill"):
        die(str(job["kill"]), 0.01)
    sys.argv = ["lweave", *job["arguments"]]
    code = 99  # of anything that is no clean end
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


if __name__ == "__main__":
    for module in STAGES + MODELS:  # here, not once in every child
        import_module(module)
    for line in sys.stdin:
        jobs = json.loads(line)
        children = [start(job) for job in jobs]  # those of one line run side by side
        statuses = [os.waitpid(child, 0)[1] for child in children]
        answer = [os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status) for status in statuses]
        print(json.dumps(answer), flush=True)
