"""Builds objects from a Config. Only this package branches on the `kind` of a section."""
