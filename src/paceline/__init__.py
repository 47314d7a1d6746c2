"""Paceline: rollouts that arrive sooner, with not one token's distribution changed."""

__version__ = "0.1.0"
