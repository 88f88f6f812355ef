"""Generators of the pages of docs/ that are made from the code, one module for each page."""
