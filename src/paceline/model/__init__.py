"""One decoder for learner and engine: definition, weights on disk, KV, kernels, and the way from logits to tokens."""
