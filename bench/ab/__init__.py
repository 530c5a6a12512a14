"""A/B time to first token over HTTP: stock against each mode of ours (docs/benchmarks.md)."""
