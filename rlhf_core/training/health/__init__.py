"""Judgement of training while it runs: the figures of each step, the rules over them, and the verdict. Pure."""
