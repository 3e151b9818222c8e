"""What doctor looks at, and what score warns of: each check gives findings, none of them loads a model."""
