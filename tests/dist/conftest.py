"""The fork server of the tests in this folder has imported the packages: two processes come in a third of the time.

`start_method="forkserver"` is for tests of what processes do together. Tests of starting processes name all methods;
those that change the environment or capture descriptors need `spawn`, as the server has its own of both.
"""

from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.core.conftest import marked_steps as marked_steps


@pytest.fixture(scope="session", autouse=True)
def _fork_server(_tmp_root: Path) -> None:
    forkserver.set_forkserver_preload(["torch", "ltc_dist"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(_tmp_root / "tmp"))  # as each test has it
        forkserver.ensure_running()
