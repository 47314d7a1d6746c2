"""Integrations of vLLM and Ray. Only this package imports them."""
