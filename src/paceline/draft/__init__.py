"""Training of EAGLE-3 heads: offline from sequences, online from the learner's own forward."""
