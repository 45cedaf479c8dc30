"""Two devices in each of several processes, which reduce distinct values, in one thread and in several.

Run with PyTorch's variables and LTC_NUM_DEVICES=2 in the environment. Ends with 1 where a sum is wrong.
"""

import sys
import threading

import torch

import ltc_dist as ltd

_STEPS = 100


def value(rank: int, device: int, step: int) -> float:
    return float(1 + 1000 * step + 100 * device + rank)


def wrong_sum(found: torch.Tensor, device: int, step: int) -> bool:
    expected = sum(value(rank, device, step) for rank in range(ltd.world_size()))
    return found.tolist() != [expected] * 3


def reduce(device: int, step: int) -> torch.Tensor:
    rank = ltd.get_ordinal()
    given = torch.full((3,), value(rank, device, step), device=ltd.lazy_device(device))
    return ltd.all_reduce("sum", given)


def in_one_thread() -> int:
    """Each rank reads, cuts and orders its devices in a way of its own."""
    wrong, rank = 0, ltd.get_ordinal()
    for step in range(_STEPS):
        first = reduce(0, step)
        second = reduce(1, step)
        if (step + rank) % 3 == 0:
            second.tolist()
        elif (step + rank) % 3 == 1:
            ltd.mark_step(device=(step + rank) % 2)
        third = reduce(0, step + 7)
        wrong += wrong_sum(second, 1, step)
        wrong += wrong_sum(first, 0, step)
        wrong += wrong_sum(third, 0, step + 7)
    last = reduce(1, _STEPS)  # rank 0 reads it, the others end with it recorded
    return wrong + (rank == 0 and wrong_sum(last, 1, _STEPS))


def in_threads() -> int:
    """A thread for each device."""
    wrong = [_STEPS, _STEPS]

    def run(device: int) -> None:
        for step in range(_STEPS):
            wrong[device] -= not wrong_sum(reduce(device, step), device, step)

    threads = [threading.Thread(target=run, args=(device,)) for device in (0, 1)]
    for thread in threads if ltd.get_ordinal() else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(wrong)


def on_its_own() -> int:
    """Each process uses the device of its local rank."""
    device = ltd.get_local_ordinal()
    given = torch.ones(2, device=ltd.lazy_device(device))
    return int(ltd.all_reduce("sum", given).tolist() != [float(ltd.world_size())] * 2)


def in_another_order() -> None:
    """Print the sums of two devices, which the last time reduce in another order in rank 1."""
    for step in range(4):
        order = (1, 0) if step == 3 and ltd.get_ordinal() == 1 else (0, 1)
        sums = {k: reduce(k, 0) for k in order}
        print([int(wrong_sum(sums[k], k, 0)) for k in (0, 1)], flush=True)


if __name__ == "__main__":
    if "in_another_order" in sys.argv:
        in_another_order()
        sys.exit()
    wrong = {call.__name__: call() for call in (on_its_own, in_threads, in_one_thread)}
    print(f"wrong sums: {wrong}", file=sys.stderr)
    sys.exit(any(wrong.values()))
