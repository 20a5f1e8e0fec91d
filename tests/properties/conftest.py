"""Profiles of hypothesis: the same few examples every time, or with HYPOTHESIS_PROFILE=thorough many new ones."""

import os

from hypothesis import HealthCheck, settings

_ALWAYS = {
    "deadline": None,  # machines differ
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("quick", derandomize=True, max_examples=100, **_ALWAYS)
settings.register_profile("thorough", max_examples=2000, **_ALWAYS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
