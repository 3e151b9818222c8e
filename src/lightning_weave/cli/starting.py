"""Ctrl-C while `lweave` is still importing ends it with exit code 130, not with a traceback. Imported first."""

import os
import signal
import sys

INTERRUPTED = 130

# Only in the program: Python code that imports the command line keeps its own handler.
_is_program = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "lweave"
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless the shell ignores Ctrl-C
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
