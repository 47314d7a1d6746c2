"""Engines side by side: same prompts, same threads, one process each, rounds interleaved."""
