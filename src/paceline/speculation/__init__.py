"""Speculation's nouns and decisions, without torch: drafts, commits, policies, metrics."""
