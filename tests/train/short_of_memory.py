"""The command line, on a machine whose rank 1 has no room for a backward pass of 15 tokens."""

import os

from lightning_weave.cli import main
from train.launch import run_out_of_memory

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        run_out_of_memory("backward", least=15)
    main()
