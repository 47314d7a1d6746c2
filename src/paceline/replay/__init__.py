"""Recorded rollouts in place of a model: drafters and policies judged offline (no torch)."""
