"""What is looked at before a run, after each stage, and by doctor: each check gives findings, none loads a model."""
