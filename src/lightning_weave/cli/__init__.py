"""The `lweave` program: parse, import the stage, call it. A wrong recipe is answered before torch is imported."""

from lightning_weave.cli.starting import INTERRUPTED

# isort: split
import atexit
import errno
import logging
import os
import re
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lightning_weave import __version__
from lightning_weave.cli import commands
from lightning_weave.errors import InputError, WeaveError, explain_error, printable
from lightning_weave.ranks import check_ranks, is_main_process

VERBS = ["init", "recipe", "doctor", "plan", "rehearse", "run", "eval", "forecast", "sweep", "compare"]  # as in --help
VERBS += ["preview", "status", "report", "inspect", "export", "push", "pull", "clean", "demo"]
MOVED = {
    "show": "lweave recipe show RECIPE",
    "keys": "lweave recipe keys [KEY]",
    "verify": "lweave status RECIPE --verify",
    "cost": "lweave status RECIPE --cost",
    "card": "lweave export RECIPE --composition NAME --as student",
    "forget": "lweave clean RECIPE --policy NAME",
    "world": "scripts/build-world DIR",
}
DEBUG = False
# What the system says of a path that the user gave.
WRONG_INPUT = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
# The hub's client warns at every try, where our message names the model; bitsandbytes, which peft imports, asks for a
# package that nothing here needs.
NOISY = ("huggingface_hub", "bitsandbytes")


class _Verbs(TyperGroup):
    """Commands in the order of their use; a command that has moved is answered with the new one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: VERBS.index(name) if name in VERBS else len(VERBS))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in MOVED:
            raise InputError(f"{args[0]} is now: {MOVED[args[0]]}")
        return super().resolve_command(ctx, args)


class _PlainHelp(TyperCommand):
    """Help and usage with RECIPE... instead of {RECIPE}... <list[str]>."""

    def get_help(self, ctx: Any) -> str:
        return _plain(super().get_help(ctx))

    def get_usage(self, ctx: Any) -> str:
        return _plain(super().get_usage(ctx))


def _plain(text: str) -> str:
    return re.sub(r" <(list\[)?(str|int|float)\]?>", "", re.sub(r"\{(\w+)\}", r"\1", text))


app = typer.Typer(
    cls=_Verbs,
    help="Compose what independently post-trained models have learned into one student.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(commands.app)
app.add_typer(commands.recipe_app, name="recipe")
for command in (*commands.app.registered_commands, *commands.recipe_app.registered_commands):
    command.cls = _PlainHelp


class _Stopped(BaseException):
    """SIGTERM or Ctrl-C arrived."""


def _stop(signum: int, frame: FrameType | None) -> None:
    for one in (signal.SIGTERM, signal.SIGINT):  # again, while the first is handled: end without a word
        signal.signal(one, lambda *_: os._exit(INTERRUPTED))
    raise _Stopped


def _ignore_signals() -> None:
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)


def main() -> None:
    """Run the program; errors for users are one or two lines, with a traceback only after --debug."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell; files that are opened later must not get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    atexit.register(_ignore_signals)  # last: Python then restores their default, with another exit code
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell sets it for jobs in the background
        signal.signal(signal.SIGINT, _stop)  # typer would exit silently
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")  # seconds; huggingface_hub reads it when it is imported
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except _Stopped:
        print("lweave: stopped. Finished work is kept; rerun the same command to resume.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (WeaveError, OSError, MemoryError, ImportError) as error:
        if DEBUG or (isinstance(error, ImportError) and "shared object" not in str(error)):
            raise
        if not isinstance(error, BrokenPipeError):  # the reader of our output has left
            print(f"lweave: {printable(explain_error(error))}", file=sys.stderr)
        if isinstance(error, WeaveError):
            sys.exit(error.code)
        with suppress(OSError):  # stdout may be what is full or closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2 if isinstance(error, OSError) and error.errno in WRONG_INPUT else 1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lweave {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    global DEBUG
    DEBUG = debug
    check_ranks()
    level = logging.DEBUG if debug else logging.INFO if is_main_process() else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lightning_weave").setLevel(level)
    if not debug:
        for library in NOISY:
            logging.getLogger(library).setLevel(logging.ERROR)
