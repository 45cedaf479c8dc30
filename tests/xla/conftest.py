"""These tests run on torch_xla's PJRT (`make test-xla`); a run on another device does not collect them."""

from ltc_core.settings import settings

collect_ignore_glob = [] if settings.device == "xla" else ["test_*.py"]
