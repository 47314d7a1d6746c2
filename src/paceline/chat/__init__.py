"""Conversations: messages, their token ids by a model's chat template, and tool calls in a model's text."""
