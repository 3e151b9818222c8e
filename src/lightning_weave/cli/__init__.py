"""The `lweave` program: parse, import the stage, call it. A wrong recipe is answered before torch is imported."""

import logging
import os
import re
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lightning_weave import __version__
from lightning_weave.cli import demo, explore, look, pipeline
from lightning_weave.errors import WeaveError
from lightning_weave.ranks import check_ranks, is_first

app = typer.Typer(
    help="Compose what independently post-trained models have learned into one student.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (pipeline, demo, explore, look):  # the order of --help
    app.add_typer(part.app)
app.add_typer(demo.world_app, name="world")


class _PlainHelp(TyperCommand):
    """Help and usage that say RECIPE..., not {RECIPE}... <list[str]>."""

    def get_help(self, ctx: Any) -> str:
        return _plain(super().get_help(ctx))

    def get_usage(self, ctx: Any) -> str:
        return _plain(super().get_usage(ctx))


def _plain(text: str) -> str:
    return re.sub(r" <(list\[)?(str|int|float)\]?>", "", re.sub(r"\{(\w+)\}", r"\1", text))


for group in (pipeline.app, demo.app, explore.app, look.app, demo.world_app):
    for command in group.registered_commands:
        command.cls = _PlainHelp
DEBUG = False
INTERRUPTED = 130
# The hub's client warns at every try, where our message says what to do; bitsandbytes, which peft imports, asks for a
# package that nothing here needs.
NOISY = ("huggingface_hub", "bitsandbytes")


def main() -> None:
    """Run the program; errors for users are one or two lines, never a traceback without --debug."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the shell ignores Ctrl-C
        signal.signal(signal.SIGINT, _stop)  # typer would exit silently
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")  # seconds; huggingface_hub reads it when it is imported
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


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lweave {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    global DEBUG
    DEBUG = debug
    check_ranks()
    level = logging.DEBUG if debug else logging.INFO if is_first() else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lightning_weave").setLevel(level)
    if not debug:
        for library in NOISY:
            logging.getLogger(library).setLevel(logging.ERROR)
