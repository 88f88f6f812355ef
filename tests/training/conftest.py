"""Shared by the tests of training: property tests have no deadline, because the first call of a tokenizer or model is
slow."""

from hypothesis import settings

settings.register_profile("training", deadline=None)
settings.load_profile("training")
