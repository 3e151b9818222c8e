"""Grade responses: maths by the last box, code by running it in a sandbox."""
