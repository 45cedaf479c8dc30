"""Random programs of changing sizes beside eager, other ones for each seed; thousands of them:
`python -m tests.nets.dynamic_programs --count 3000`.
"""

import pytest

from tests.nets.dynamic_programs import assignments, check_sizes, generate, main


@pytest.mark.timeout(300)
def test_random_programs_of_changing_sizes() -> None:
    assert main(["--count", "25"]) == 0


def test_a_number_is_always_the_same_program_and_sizes() -> None:
    assert generate(7) == generate(7) != generate(8)
    assert assignments(7) == assignments(7) != assignments(8)


def test_sizes_come_again() -> None:
    heads = [head.rsplit(",", 1)[0] for number in range(5) for head in assignments(number)]
    assert len(set(heads)) < len(heads)


def test_a_write_into_a_part_of_an_input() -> None:
    lines = ["t0 = make([b, a], torch.float32, 1).to(d[0])", "t1 = t0.t()", "cut()", "t1.mul_(2)"]
    for number in range(4):
        assert check_sizes(lines, assignments(number), number) == ""
