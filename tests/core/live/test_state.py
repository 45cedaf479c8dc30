"""States in a file: what is written is read; what is half written, hostile or too large is not."""

import json
import struct
import zlib
from dataclasses import replace

import pytest

from ltc_core.live.state import MAX_BYTES, State, Wait, decoded, encoded

STATE = State(
    where="host boot",
    pid=7,
    rank=1,
    script="train.py",
    step=12,
    steps_per_s=2.5,
    waits=(Wait("0,1 3", (0, 1), 5),),
    cause="shapes of the batch: é\x1b[2J",
)


def test_what_is_written_is_read() -> None:
    assert decoded(encoded(STATE)) == STATE
    assert decoded(encoded(STATE) + b"the end of a longer state") == STATE


def test_a_half_written_state_is_none() -> None:
    content = encoded(STATE)
    assert decoded(b"") is None and decoded(content[:20]) is None
    other = encoded(replace(STATE, step=13))
    assert decoded(content[:60] + other[60:]) is None
    assert decoded(b"x" * 100) is None


@pytest.mark.parametrize("content", ["[1, {}]", "[2, {}]", "3", "[" * 100_000, '[1, {"pid": []}]'])
def test_a_file_of_somebody_else_is_none(content: str) -> None:
    data = content.encode()
    assert decoded(struct.pack("<4sII", b"ltcW", len(data), zlib.crc32(data)) + data) is None


def test_long_texts_and_many_waits_fit_into_a_file() -> None:
    wait = Wait("x" * 1000, tuple(range(5000)), 0)
    large = replace(STATE, cause="é" * 100_000, waits=(wait,) * 100)
    content = encoded(large)
    assert len(content) <= MAX_BYTES
    found = decoded(content)
    assert found is not None and found.step == 12 and found.waits == ()
    assert json.dumps(found.cause) and len(found.cause) < 1000
