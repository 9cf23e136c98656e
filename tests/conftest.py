"""Hypothesis settings for all tests: reproducible by default; HYPOTHESIS_PROFILE=explore draws new examples and more."""
import os

from hypothesis import HealthCheck, settings

COMMON = dict(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile('default', derandomize=True, **COMMON)
settings.register_profile('explore', max_examples=1000, **COMMON)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'default'))
