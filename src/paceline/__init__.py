"""Paceline: RL post-training for language models with exact speculative rollouts."""

__version__ = "0.1.0"
