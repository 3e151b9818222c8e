"""The demo and its tiny world: a student, pairs of models with other tokenizers, prompts and benchmarks."""
