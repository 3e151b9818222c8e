"""Decide whether a response is right: mathematics by its last box, code by running it in a sandbox."""
