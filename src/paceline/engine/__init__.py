"""Continuous batching with lossless speculation: one forward a step for all rows, whatever they are doing."""
