"""Parameters divided by `FullyShardedDataParallel`: losses and parameters are those of eager on the joined batch."""

from pathlib import Path

import pytest

from tests.launching import Job, launcher

SCRIPT = str(Path(__file__).with_name("cases.py"))

CASES = """\
units True
names True True
programs 0
outside the parameter weight is divided over 2 processes
copy True
xm.optimizer_step the gradients of divided parameters are averaged already
one unit True
flat True
rows True
small shards True
kept True
freed in the root, too True
reentrant checkpoints True
checkpoints True
clipped True
clipped by ltd True
accumulated True
accumulated apart True
narrow True
policy True
step ends True
meta {'ltc'} 15
memory True True
changed one of the variables needed for gradient computation has bee
found 2 checkpoint files in model-*.pth
files True True
"""


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    job = Job([*launcher("--nprocs", "2"), SCRIPT, "."], tmp_path, LTC_COMPILE="off")
    code, out, err = job.end()
    assert code == 0, err
    lines = [line.removeprefix("[0] ") for line in out.splitlines() if line.startswith("[0] ")]
    assert "\n".join(lines) + "\n" == CASES.replace("in model-", "in ./model-"), err
