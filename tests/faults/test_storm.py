"""A small storm: at most six faults in random processes of a job, and what must hold afterwards (see `storm`)."""

import os
import subprocess
import sys

import pytest

from tests.launching import ROOT

SEED = 5


@pytest.mark.dist
@pytest.mark.timeout(400)  # two jobs or more, each of which is started again and again
def test_a_job_in_a_storm_ends_as_if_nothing_had_been() -> None:
    sizes = ["--seconds", "60", "--faults", "6", "--steps", "60", "--seed", str(SEED)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.storm", *sizes],
        cwd=ROOT,
        env={**os.environ, "LTC_COMPILE": "off"},  # a compile takes longer than the storm
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {SEED};" in done.stdout and "faults, 0 problems" in done.stdout
