"""Settings of all tests. Hypothesis is reproducible; HYPOTHESIS_PROFILE=explore draws new examples, and more of them."""
import os

# before torch is imported, and for the programs that tests start: on tiny models a second thread only waits
os.environ.setdefault('OMP_NUM_THREADS', '1')

from hypothesis import HealthCheck, settings  # noqa: E402

COMMON = dict(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile('default', derandomize=True, **COMMON)
settings.register_profile('explore', max_examples=1000, **COMMON)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'default'))
