"""One module per stage of a run, and what stages share."""
