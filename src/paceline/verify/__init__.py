"""The exactness checks. `paceline verify` runs them on a user's own model; the tests run them on correct and on
deliberately broken engines."""
