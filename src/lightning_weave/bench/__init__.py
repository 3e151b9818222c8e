"""Benchmarks: problems, samples, metrics and statistics."""
