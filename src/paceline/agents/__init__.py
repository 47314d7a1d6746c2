"""Agents: programs, and environments of other libraries, that call the policy during training."""
