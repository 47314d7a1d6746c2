"""Benchmarks: rollout throughput of engines, speed-up by drafter and draft length, and the time of engine steps."""
