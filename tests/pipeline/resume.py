"""Run `lweave` in processes that are killed; a program, run by the fixture `lweave`, so that torch is imported once.

Reads lists of JSON jobs from stdin, one list per line. Each job forks; the child runs the command line and is killed by
SIGKILL when it opens the nth file of some path for writing, or some time after that one was renamed into place. Audit
events of the interpreter tell it where it is; nothing of the package is replaced. Answers with one line of JSON per
list: the signal that ended each job, or minus its exit code.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any

from lightning_weave import cli

STAGES = [f"lightning_weave.stages.{stage}" for stage in ("rollout", "reference", "score", "train", "eval", "verify")]
MODELS = ["transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama"]


def die(when: str, where: str, count: int) -> None:
    """Arrange the kill at the nth temporary file or folder of such a path: its opening, or soon after its rename."""
    seen, wanted = 0, {"write": "open", "rename": "os.rename"}[when]

    def kill(delay: float) -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == wanted and re.search(where, str(arguments[0])):
            seen += 1
            if seen == count and when == "write":
                kill(0)
            elif seen == count:
                threading.Thread(target=kill, args=[0.01]).start()

    sys.addaudithook(hook)


def start(job: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(job.get("environment") or {})
    sys.stdout = sys.stderr = open(job.get("output", os.devnull), "w")  # noqa: SIM115
    if "kill" in job:
        die(job["kill"], job.get("where", r"/\.tmp-[^/]*\.safetensors$"), job.get("count", 2))
    sys.argv = ["lweave", *job["arguments"]]
    code = 99  # of anything that is no clean end
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stderr.flush()
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
