"""A watched process says that it waits for a batch."""

from pathlib import Path

from tests.core import child
from tests.core.live.test_publisher import awaited

LOADER = """
import sys, threading
import ltc_dist as ltd
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 8
    def __getitem__(self, k):
        if k == 4:
            threading.Thread(target=lambda: (sys.stdin.readline(), gate.set()), daemon=True).start()
            gate.wait()
        return torch.ones(2)

gate = threading.Event()
total = torch.zeros(2, device=device)
for batch in ltd.MpDeviceLoader(DataLoader(Slow(), batch_size=1), device):
    total += batch[0]
assert total.tolist() == [8, 8]
"""


def test_a_process_that_waits_for_a_batch_says_so(tmp_path: Path) -> None:
    with child.start(LOADER, LTC_WATCH=str(tmp_path), LTC_COMPILE="off") as process:
        state = awaited(tmp_path, lambda s: s.doing == "waiting for a batch")
        later = awaited(tmp_path, lambda s: s.written_ns > state.written_ns + 10**9)
        assert (later.doing, later.since_ns) == (state.doing, state.since_ns)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait() == 0, process.stderr and process.stderr.read()
    assert list(tmp_path.iterdir()) == []
