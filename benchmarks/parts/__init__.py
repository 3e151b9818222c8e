"""What the benchmarks share. No benchmark itself."""
