"""The OpenAI-compatible server: `paceline serve`. Needs the extra `paceline[serve]`."""
