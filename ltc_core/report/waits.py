"""Where a rank waits and moves data, by the user's line, each with what to do about it; and its loader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ltc_core.report.run_files import Rank, Slice
from ltc_core.report.steps import DATA, Step, main_thread, mean_of

__all__ = ["fallbacks_of", "loader_of", "syncs_of", "transfers_of"]

# Why a value was waited for -> what to do.
_ADVICE = {
    "Item": "read it every some steps, or after the loop: keep losses on the device in a list",
    "Print": "print every some steps, and detach what is printed later",
    "Fetch": "move results to the CPU after the loop, or in a step closure (ltc.add_step_closure)",
    "Wait": "leave out wait_device_ops() outside of measurements",
}
_ADVICE_OF_OP = (
    "its result depends on values, as those of nonzero, of a mask as an index and of `if tensor:` do: use torch.where, "
    "or a fixed size"
)


def syncs_of(rank: Rank, num_steps: int) -> list[dict[str, Any]]:
    """Places where the script waits for values: calls, milliseconds a step, advice."""
    found = [one for one in rank.slices if one.name in ("fetch", "wait for the device")]
    return _by(
        found,
        lambda one: (one.args.get("line", ""), str(one.args.get("reason", "Wait"))),
        ("line", "reason"),
        num_steps,
        lambda row: _ADVICE.get(row["reason"], _ADVICE_OF_OP),
    )


def fallbacks_of(rank: Rank, num_steps: int) -> list[dict[str, Any]]:
    """Ops that ran on the CPU, each call with a cut and two copies of an operand."""
    found = [one for one in rank.slices if one.name == "run on the CPU"]
    return _by(
        found,
        lambda one: (one.args.get("line", ""), one.args.get("op", "")),
        ("line", "op"),
        num_steps,
        lambda row: (
            "it has no rule on the device, or its result depends on values: replace it, or move it out of the step"
        ),
    )


def transfers_of(rank: Rank, num_steps: int) -> list[dict[str, Any]]:
    """Uploads and fetches by line: calls, bytes, milliseconds a step."""
    found = rank.lanes.get("transfers", [])
    rows = _by(
        found,
        lambda one: (one.args.get("line", ""), one.name),
        ("line", "what"),
        num_steps,
        lambda row: "",
    )
    for row in rows:
        if row["what"] == "upload" and row["calls"] >= num_steps > 1 and row["line"]:
            row["advice"] = (
                "a loader of ours uploads beside the step: MpDeviceLoader(loader, device)"
            )
    return rows


def _by(
    found: Iterable[Slice],
    key: Callable[[Slice], tuple[str, str]],
    names: tuple[str, str],
    num_steps: int,
    advice: Callable[[dict[str, Any]], str],
) -> list[dict[str, Any]]:
    groups: defaultdict[tuple[str, str], list[Slice]] = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    rows = []
    for parts, slices in groups.items():
        row: dict[str, Any] = dict(zip(names, parts, strict=True))
        row["calls"] = len(slices)
        row["total_ms"] = sum(one.took for one in slices) / 1000
        row["ms_a_step"] = row["total_ms"] / max(1, num_steps)
        row["bytes"] = sum(int(one.args.get("bytes", 0)) for one in slices)
        row["advice"] = advice(row)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["total_ms"])


def loader_of(rank: Rank, steps: Sequence[Step]) -> dict[str, Any] | None:
    """How long the loader takes for a batch, and whether the steps wait for it; None if there is none of ours."""
    named: defaultdict[str, list[float]] = defaultdict(list)
    for one in rank.slices:
        if one.name in ("read a batch", "upload a batch", "wait for a batch"):
            named[one.name].append(one.took / 1000)
    if not named:
        return None
    means = {name: sum(took) / len(took) for name, took in named.items()}
    mean = mean_of(steps)
    waiting = mean["parts"][DATA]
    return {
        "batches": len(named["wait for a batch"]),
        "read_ms": means.get("read a batch", 0.0),
        "upload_ms": means.get("upload a batch", 0.0),
        "wait_ms": means.get("wait for a batch", 0.0),
        "share": waiting / mean["ms"] if mean["ms"] else 0.0,
        "here": any(one.name == "read a batch" for one in rank.threads.get(main_thread(rank), [])),
    }
