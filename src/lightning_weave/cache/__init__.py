"""Read the cache: trajectories, candidates and shifts, with the checks and the validity rule in one place."""
