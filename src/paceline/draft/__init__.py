"""Training of EAGLE-3 heads: offline on sequences, online on the learner's own forward pass."""
