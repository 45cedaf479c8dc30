"""The error tree: its builtin bases, its four parts, and errors that cross processes."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltc_core import errors
from ltc_core.errors import CheckpointIOError, ExecutionError, LtcError, listed, op_error

ROOT = Path(__file__).parents[2]

TREE = {
    "SettingsError": ValueError,
    "VersionError": ImportError,
    "BuildError": RuntimeError,
    "DeviceError": RuntimeError,
    "DeviceIndexError": IndexError,
    "TpuHostError": OSError,
    "DeviceMismatchError": RuntimeError,
    "ShardingError": AssertionError,
    "MinibatchError": RuntimeError,
    "MissingShardingError": KeyError,
    "UnsupportedOpError": NotImplementedError,
    "ExecutionError": RuntimeError,
    "ExecutionForbiddenError": RuntimeError,
    "NoValueError": RuntimeError,
    "PlaceholderError": RuntimeError,
    "DonatedError": RuntimeError,
    "CheckpointError": RuntimeError,
    "CheckpointFormatError": ValueError,
    "CheckpointIOError": OSError,
    "ExportError": ValueError,
    "DataFormatError": ValueError,
    "LoaderError": RuntimeError,
    "OutsideWriteError": AssertionError,
    "GraphError": AssertionError,
    "ProfilerError": RuntimeError,
    "RankError": RuntimeError,
    "RankEndedError": RuntimeError,
    "RankTimeoutError": TimeoutError,
    "CollectiveError": RuntimeError,
    "PeerEndedError": RuntimeError,
    "CollectiveTimeoutError": TimeoutError,
}


class UserError(ValueError):
    """An exception of the user's own, with an initialiser of its own."""

    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")


def test_the_tree_is_complete_and_drawn():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, LtcError) and value is not LtcError
    }
    assert defined == set(TREE)
    assert all(f"{name} (" in errors.__doc__ for name in TREE)


@pytest.mark.parametrize(("name", "builtin"), TREE.items())
def test_each_error_is_also_the_builtin_and_can_be_pickled(name, builtin):
    cls = getattr(errors, name)
    error = cls("it failed", got="a", where="train.py:41 in loss_fn", next="do b.")
    with pytest.raises(builtin):
        raise error
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == str(error)
        assert (twin.what, twin.got, twin.where, twin.next) == (
            "it failed",
            "a",
            "train.py:41 in loss_fn",
            "do b.",
        )


def test_four_parts():
    error = LtcError("aten::x has no rule", got="float32[2]", where="train.py:41 in f", next="y.")
    assert str(error) == (
        "aten::x has no rule (recorded at train.py:41 in f)\n  got: float32[2]\n  Next: y."
    )


def test_empty_parts_are_left_out():
    assert str(LtcError("it failed")) == "it failed"
    assert str(LtcError("it failed", next="retry.")) == "it failed\n  Next: retry."


def test_the_first_of_several_lines_stays_first():
    error = LtcError("first\nsecond\nthird", got="g", where="a.py:1 in f")
    assert str(error).split("\n") == [
        "first (recorded at a.py:1 in f)",
        "second",
        "third",
        "  got: g",
    ]


def test_a_setting_is_not_said_to_be_recorded():
    assert "(set in the environment)" in str(errors.SettingsError("x", where="the environment"))


def test_checkpoint_io_error_keeps_errno():
    error = CheckpointIOError("the disk is full", errno=28)
    assert pickle.loads(pickle.dumps(error)).errno == 28


def test_notes_survive_pickling():
    error = ExecutionError("it failed")
    error.add_note("on rank 3")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["on rank 3"]


@pytest.mark.parametrize(
    "original",
    [
        IndexError("index 5 is out of bounds"),
        TypeError("expected Tensor"),
        ValueError("bad value"),
        RuntimeError("shapes cannot be multiplied"),
        NotImplementedError("no kernel"),
        AssertionError("assertion"),
        ZeroDivisionError("division by zero"),
        KeyError("key"),
        OSError(28, "No space left on device", "a.bin"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        torch.linalg.LinAlgError("singular"),
        torch.OutOfMemoryError("out of memory"),
    ],
    ids=lambda original: type(original).__name__,
)
def test_op_error_is_of_the_original_type(original):
    error = op_error(original, what="aten::op failed", got="g", where="a.py:1 in f", next="n.")
    assert isinstance(error, LtcError)
    assert isinstance(error, type(original))
    assert error.what == f"aten::op failed: {original}"
    assert error.__cause__ is original
    with pytest.raises(type(original)):
        raise error
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert not isinstance(original, OSError) or (twin.errno, twin.filename) == (28, "a.bin")


def test_op_error_classes_are_made_once():
    first, second = (op_error(IndexError(word), what="op") for word in ("a", "b"))
    assert type(first) is type(second)
    assert type(first).__name__ == "OpIndexError"


def test_op_error_does_not_repeat_the_message():
    assert op_error(ValueError("bad value"), what="bad value").what == "bad value"
    assert op_error(ValueError("bad value"), what="").what == "bad value"
    assert op_error(ValueError(), what="op failed").what == "op failed"


def test_op_error_of_our_own_error_keeps_its_class():
    error = op_error(errors.UnsupportedOpError("no rule"), what="op")
    assert type(error) is errors.UnsupportedOpError
    made = op_error(IndexError("i"), what="op")
    assert type(op_error(made, what="again")) is type(made)


def test_op_error_of_a_users_type_is_its_nearest_builtin():
    error = op_error(UserError(3, "detail"), what="my_op failed")
    assert type(error).__mro__[1:3] == (LtcError, ValueError)
    assert "3: detail" in str(error)
    assert isinstance(error.__cause__, UserError)


def test_op_error_of_a_group_is_our_base():
    group = ExceptionGroup("several", [ValueError("a"), TypeError("b")])
    assert type(op_error(group, what="op failed")) is LtcError


def test_op_error_of_an_interrupt_is_no_interrupt():
    error = op_error(KeyboardInterrupt(), what="op was interrupted")
    assert type(error) is ExecutionError


def test_op_error_is_rebuilt_in_another_process():
    sent = pickle.dumps(op_error(IndexError("index 5"), what="op failed", where="a.py:1 in f"))
    code = (
        "import pickle, sys; e = pickle.load(sys.stdin.buffer);"
        "print(isinstance(e, IndexError), type(e).__name__, e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, cwd=ROOT, check=True
    )
    assert done.stdout.decode().strip() == (
        "True OpIndexError op failed: index 5 (recorded at a.py:1 in f)"
    )


def test_listed_quotes_five_and_counts_the_rest():
    assert listed("abcde") == "a, b, c, d, e"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert listed([]) == ""
