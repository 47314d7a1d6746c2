"""The exactness ladder as a product: what `paceline verify` runs on a user's own model, and what the tests run on
correct and on deliberately broken engines."""
