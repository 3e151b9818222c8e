"""The `lweave` program: parse, import the stage, call it. A wrong recipe is answered before torch is imported."""

import logging
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from lightning_weave.cli import demo, explore, look, pipeline
from lightning_weave.errors import WeaveError
from lightning_weave.ranks import is_first

app = typer.Typer(
    help="Compose what independently post-trained models have learned into one student.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (pipeline, demo, explore, look):  # the order of --help
    app.add_typer(part.app)
app.add_typer(demo.world_app, name="world")
DEBUG = False
INTERRUPTED = 130


def main() -> None:
    """Run the program; errors for users are one or two lines, never a traceback without --debug."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the shell ignores Ctrl-C
        signal.signal(signal.SIGINT, _stop)  # typer would exit silently
    try:
        app()
    except WeaveError as error:
        if DEBUG:
            raise
        print(f"lweave: {error}", file=sys.stderr)
        sys.exit(error.code)
    except _Stopped:
        print("lweave: stopped. What was finished is kept; rerun the same command to resume.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


class _Stopped(BaseException):
    """SIGTERM or Ctrl-C arrived."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    global DEBUG
    DEBUG = debug
    level = logging.DEBUG if debug else logging.INFO if is_first() else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lightning_weave").setLevel(level)
    if not debug:  # it warns at every try; the message at the end says what to do
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
