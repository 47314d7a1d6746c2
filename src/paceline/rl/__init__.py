"""Algorithms, the learner, and the one loop."""
