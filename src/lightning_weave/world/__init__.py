"""A tiny world to weave in: a task with a verifier, a corpus with habits and slips, and models made from nothing."""
