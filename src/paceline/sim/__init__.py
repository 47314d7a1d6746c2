"""Simulator of decode steps, rollouts and RL steps on hardware that you do not have."""
