"""Benchmarks: what is asked, the samples that answer it, and the numbers over those samples."""
