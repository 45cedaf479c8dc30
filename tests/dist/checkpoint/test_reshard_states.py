"""`reshard` on states of stand-ins for files: shards are cut anew, and what cannot be cut is refused in words."""

from typing import Any

import pytest
import torch

from ltc_core.serialization.directory import StoredTensor
from ltc_dist.checkpoint.reshard import is_sharded, reshard, why_not

SIZE = 7
VALUES = torch.arange(1.0, SIZE + 1)


def stored(tensor: torch.Tensor, reads: list[int] | None = None, rank: int = 0) -> StoredTensor:
    def read() -> torch.Tensor:
        if reads is not None:
            reads.append(rank)
        return tensor

    return StoredTensor(tuple(tensor.shape), tensor.dtype, read)


def states(count: int, reads: list[int] | None = None) -> list[dict[str, Any]]:
    """What `count` processes save of one parameter of 7 elements, in shards that are padded with zeros."""
    width = -(-SIZE // count)
    padded = torch.cat([VALUES, torch.zeros(width * count - SIZE)])
    return [
        {
            "state": {},
            "param_groups": [{"lr": 0.1, "params": [0]}],
            "base_state": {
                0: {
                    "step": stored(torch.tensor(3.0)),
                    "exp_avg": stored(padded[k * width : (k + 1) * width], reads, k),
                }
            },
            "shape_info": {0: (SIZE,)},
            "shard": [k, count],
            "ranks": list(range(count)),
        }
        for k in range(count)
    ]


@pytest.mark.parametrize("before", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7, 9])
def test_the_shards_of_any_number_make_those_of_any_other(before: int, after: int) -> None:
    saved = states(before)
    assert is_sharded(saved[0]) and not why_not(saved)
    found = [reshard(saved, rank, after) for rank in range(after)]
    whole = torch.cat([state["base_state"][0]["exp_avg"] for state in found])
    width = -(-SIZE // after)
    assert len(whole) == width * after
    assert torch.equal(whole[:SIZE], VALUES) and not whole[SIZE:].any()
    for rank, state in enumerate(found):
        assert state["base_state"][0]["step"].item() == 3.0
        assert (state["shard"], state["ranks"]) == ([rank, after], list(range(after)))


def test_only_what_overlaps_is_read() -> None:
    reads: list[int] = []
    reshard(states(7, reads), 1, 2)  # elements 4 to 6
    assert reads == [4, 5, 6]


def test_shards_within_groups_of_processes_are_refused() -> None:
    saved = states(2) + states(2)
    assert why_not(saved).startswith(
        "rank 0 saved shard 0 of 2, expected shard 0 of 4: sharding_groups"
    )


def test_numbers_that_differ_are_refused() -> None:
    saved = states(2)
    saved[1]["param_groups"][0]["lr"] = 0.2
    assert why_not(saved) == "rank 1 saved another lr of group 0 than rank 0"
    saved = states(2)
    saved[1]["base_state"][0]["step"] = stored(torch.tensor(4.0))
    assert why_not(saved) == "rank 1 saved another step of parameter 0 than rank 0"


def test_a_state_that_is_no_vector_is_refused() -> None:
    saved = states(2)
    for state in saved:
        state["base_state"][0]["factored"] = stored(torch.ones(2, 3))
    assert why_not(saved).startswith("'factored' of parameter 0 has a tensor of shape (2, 3)")
