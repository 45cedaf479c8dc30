"""A tensor and a view of it are not saved apart: what counts as sharing, and whose picklers are asked.

The messages that users meet are in test_saving_tensors.py and test_verbs.py.
"""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.errors import CheckpointError
from ltc_core.tensor import pickling

SHARING = r"Tensor ID \d+ is sharing a view with tensor ID \d+"


@pytest.fixture
def x() -> torch.Tensor:
    ltc.mark_step()
    return torch.arange(6.0, device=ltc.lazy_device())


def handles(*tensors: torch.Tensor) -> list[Any]:
    return [t._h for t in tensors]  # type: ignore[attr-defined]


class TestWhatIsShared:
    def test_whole_tensors_that_are_one_memory(self, x: torch.Tensor) -> None:
        pickling.check_handles(handles(x, x, x.detach(), x.data, nn.Parameter(x)))

    def test_copies(self, x: torch.Tensor) -> None:
        pickling.check_handles(
            handles(x, x.clone(), x + 0, x[1:].clone(), x[[0, 1]], x.float() * 1)
        )

    def test_a_reshape_that_is_a_copy(self, x: torch.Tensor) -> None:
        grid = x.view(2, 3).clone()
        pickling.check_handles(handles(grid, grid.t().reshape(-1)))

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x[1:],
            lambda x: x.view(2, 3),
            lambda x: x[None],
            lambda x: x.view(2, 3).t()[1],
            lambda x: x.expand(2, 6),
            lambda x: x.unfold(0, 2, 1),
            lambda x: x.split(2)[1],
            lambda x: x.as_strided((2,), (1,)),
            lambda x: x.view(torch.int32),
        ],
    )
    def test_a_view_on_either_side(self, view: Any, x: torch.Tensor) -> None:
        for pair in ((x, view(x)), (view(x), x), (view(x), view(x))):
            with pytest.raises(CheckpointError, match="Tensor ID 2 is sharing .* tensor ID 1"):
                pickling.check_handles(handles(*pair))

    def test_parts_that_do_not_touch(self, x: torch.Tensor) -> None:
        """Loaded, they would no longer be parts of one memory."""
        with pytest.raises(CheckpointError, match=SHARING):
            pickling.check_handles(handles(x[:2], x[4:]))

    def test_the_numbers_count_tensors_in_order(self, x: torch.Tensor) -> None:
        others = [torch.ones(1, device=x.device) for _ in range(3)]
        with pytest.raises(CheckpointError, match="Tensor ID 5 is sharing a view with tensor ID 2"):
            pickling.check_handles(handles(others[0], x, others[1], others[2], x[0]))

    def test_tensors_that_died_are_not_taken_for_new_ones(self, x: torch.Tensor) -> None:
        def fresh() -> Any:
            for i in range(200):
                yield (x + i)[1:]._h  # type: ignore[attr-defined]
                gc.collect(0)

        pickling.check_handles(fresh())


class TestPicklers:
    def test_each_save_counts_anew(self, x: torch.Tensor) -> None:
        for part in (x, x[1:], x[:2], x):
            torch.save(part, io.BytesIO())

    def test_after_a_refusal_all_is_as_before(self, x: torch.Tensor) -> None:
        for _ in range(3):
            with pytest.raises(CheckpointError, match="Tensor ID 2 is sharing .* tensor ID 1"):
                torch.save([x, x[1:]], io.BytesIO())
        torch.save([x, x.clone()], io.BytesIO())
        gc.collect()
        assert len(pickling._picklers) == 0

    def test_a_parameter_counts_once(self, x: torch.Tensor) -> None:
        weight = nn.Parameter(x)
        with pytest.raises(CheckpointError, match="Tensor ID 2 is sharing .* tensor ID 1"):
            torch.save([weight, weight.detach()[1:]], io.BytesIO())
        torch.save(nn.ParameterList([weight, weight]), io.BytesIO())

    def test_the_old_format_too(self, x: torch.Tensor) -> None:
        with pytest.raises(CheckpointError, match=SHARING):
            torch.save([x, x[1:]], io.BytesIO(), _use_new_zipfile_serialization=False)

    def test_a_save_inside_of_a_save(self, x: torch.Tensor) -> None:
        class Nested:
            def __reduce__(self) -> tuple[Any, ...]:
                inner = io.BytesIO()
                torch.save(x[1:], inner)
                return bytes, (inner.getvalue(),)

        torch.save([x, Nested()], io.BytesIO())

    def test_pickle_and_copies_are_no_business_of_it(self, x: torch.Tensor) -> None:
        for pair in (pickle.loads(pickle.dumps([x, x[1:]])), copy.deepcopy([x, x[1:]])):
            assert [t.tolist() for t in pair] == [x.tolist(), x[1:].tolist()]
            assert pair[0].equal(x) and pair[1].equal(x[1:])
