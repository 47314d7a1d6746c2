"""The decoder of learner and engine: definition, weights, KV cache, kernels and sampling."""
