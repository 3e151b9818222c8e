"""`python -m lightning_weave.cli` is `lweave`."""

from lightning_weave.cli import main

if __name__ == "__main__":
    main()
