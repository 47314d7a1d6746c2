"""Replay of recorded rollouts without a model, to compare drafters and speculation policies (no torch)."""
