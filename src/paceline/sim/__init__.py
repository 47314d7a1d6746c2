"""The open simulator: what a decode step, a rollout and an RL step take on machines that nobody has to own."""
