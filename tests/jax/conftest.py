"""These tests run on XLA through JAX (`make test-jax`); a run on another executor does not collect them."""

from ltc_core.settings import settings

collect_ignore_glob = [] if settings.executor == "jax" else ["test_*.py"]
