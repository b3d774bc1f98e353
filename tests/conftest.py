"""For all tests: no time limit per example, since a busy machine is not a fault of the code."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
