"""PyTorch's own base class for tests of several processes: collectives of c10d on tensors of the device, by values.

`MultiProcessTestCase` starts the processes and gathers what failed in them.
"""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

import ltc_dist as ltd

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


class TestCollectives(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        with contextlib.suppress(
            OSError
        ):  # the store removes its file, unless a process ends before it does
            os.remove(self.file_name)

    def test_collectives_have_the_values_of_eager(self) -> None:
        device = ltd.lazy_device()
        dist.init_process_group(
            f"cpu:gloo,{device.type}:gloo",
            store=dist.FileStore(self.file_name, self.world_size),
            rank=self.rank,
            world_size=self.world_size,
        )
        for _ in range(4):
            x = torch.arange(4.0, device=device) + self.rank
            y = x * 2
            dist.all_reduce(y)
            self.assertEqual(y.cpu(), torch.arange(4.0) * 4 + 2)
            z = torch.zeros(4, device=device) + self.rank
            dist.broadcast(z, 1)
            self.assertEqual(z.cpu(), torch.ones(4))
            parts = [torch.empty(4, device=device) for _ in range(2)]
            dist.all_gather(parts, x)
            self.assertEqual([p.cpu() for p in parts], [torch.arange(4.0), torch.arange(4.0) + 1])
        dist.destroy_process_group()
