"""One file per verb: read, call, write. Stages never call each other; they meet on disk."""
