"""Guessers of what the target will say, all behind `speculation.batch.Drafter`. Importing this imports none of them."""
