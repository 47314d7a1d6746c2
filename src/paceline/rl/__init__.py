"""RL training: algorithms, the learner, rollouts, the trainer, and the run folder."""
