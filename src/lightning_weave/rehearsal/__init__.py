"""A recipe from its beginning to its end with small doubles of its models, before anything is spent on it."""
