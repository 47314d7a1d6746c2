"""Benchmarks: throughput of engines, speed-up by drafter and draft length, times of engine steps and of updates."""
