"""Look at a run: where it stands, what it cost, whether it is sound, and its model card."""
