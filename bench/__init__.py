"""Benchmarks of the package: named shapes, graph-replay timing, one command that writes JSON lines."""
