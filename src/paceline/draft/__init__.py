"""Training of draft heads: offline on sequences, online on the learner's own forward pass."""
