"""Losses as small pure functions, one file per algorithm with its formula and paper.

Every loss of a micro-batch is a sum divided by a number that belongs to the whole optimizer step (``aggregation.py``),
so that summing gradients over micro-batches and ranks gives the same gradient however the batch was cut up.
"""
