"""The tiny world of the demo: a task with a verifier, a corpus with habits and slips, and models made from scratch."""
