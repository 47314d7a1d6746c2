"""Rows in; tables, files and plots out. No torch."""
