"""The programs of a rank with their runs: how often, in which tier, how long, and how near to the machine's limits.

The time of a run is divided among the nodes as their times were in a run that called them one by one. Where there was
none (the program was loaded compiled), it is divided by their work, and `is_measured` is false.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ltc_core.report.run_files import Rank
from ltc_core.report.steps import flat

__all__ = ["icicle", "lines_of", "program_table"]

# Positions in a node of `program_facts`.
NAME, LINE, MODULE, BACKWARD, FIRST, OUTS, READS, CONSTANTS, FLOPS, BYTES, IS_VIEW = range(11)

_LAUNCH_NS = 1000.0  # of an op beside its work
_FLOPS, _BANDWIDTH = 5e10, 1e10  # of a machine that was not measured


def program_table(rank: Rank) -> list[dict[str, Any]]:
    """Each program of a rank, with its runs."""
    runs = _runs(rank)
    seen: dict[str, dict[str, Any]] = {}
    for facts in rank.programs:
        row = seen.get(facts["id"])
        if row is not None:
            row["builds"] += 1
            continue
        of_it = runs.get(facts["id"], [])
        by_tier: defaultdict[str, list[float]] = defaultdict(list)
        for tier, took in of_it:
            by_tier[tier].append(took)
        later = of_it[len(of_it) // 2 :]
        mean_us = sum(took for _, took in later) / len(later) if later else 0.0
        row = {name: value for name, value in facts.items() if name != "graph"} | {
            "builds": 1,
            "runs": len(of_it),
            "total_ms": sum(took for _, took in of_it) / 1000,
            "mean_ms": mean_us / 1000,
            "tiers": [
                {"tier": tier, "runs": len(took), "mean_ms": sum(took) / len(took) / 1000}
                for tier, took in by_tier.items()
            ],
        }
        graph = facts.get("graph")
        if graph is not None:
            row["graph"] = graph
            row["kernels"], row["eager"] = rank.kernels.get(facts["id"], ([], []))
            row.update(_work(rank, facts["id"], graph, mean_us))
        seen[facts["id"]] = row
    return list(seen.values())


def _runs(rank: Rank) -> dict[str, list[tuple[str, float]]]:
    """Id of a program -> tier and microseconds of each run, without what it waited for other processes.

    What has run early of a run (`runtime.early_run`) is part of it.
    """
    found: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for lane in rank.threads.values():
        runs = [one for one in lane if one.name in ("run", "run early") and "graph" in one.args]
        if not runs:
            continue
        waits = [one for one in flat(lane) if one.name.startswith("wait for ")]
        at = 0
        begun: defaultdict[str, float] = defaultdict(float)
        for one in runs:
            graph, waited = one.args["graph"], 0.0
            while at < len(waits) and waits[at].start < one.end:
                if waits[at].start >= one.start:
                    waited += waits[at].end - waits[at].start
                at += 1
            if one.name == "run early":
                begun[graph] += one.args.get("computed_us", 0)
            else:
                took = one.took - waited + begun.pop(graph, 0.0)
                found[graph].append((one.args.get("tier", ""), took))
    return found


def _work(rank: Rank, name: str, graph: dict[str, Any], mean_us: float) -> dict[str, Any]:
    """Work of a program, the share of each node in its time, and of what the machine can do."""
    nodes = graph["nodes"]
    peak = rank.machine.get("flops", _FLOPS)
    bandwidth = rank.machine.get("bandwidth", _BANDWIDTH)
    times = rank.times.get(name, {})
    is_measured = len(times) > len(nodes) / 2

    def estimate(node: list[Any]) -> float:
        if node[IS_VIEW]:
            return 0.0
        return _LAUNCH_NS + 1e9 * _least_s(node, peak, bandwidth)

    weights = [
        float(times.get(at, 0.0)) if is_measured else estimate(node)
        for at, node in enumerate(nodes)
    ]
    scale = mean_us / max(sum(weights), 1.0)
    return {
        "is_measured": is_measured,
        "node_us": [round(weight * scale, 2) for weight in weights],
        "flops": sum(node[FLOPS] for node in nodes),
        "bytes": sum(node[BYTES] for node in nodes),
        "limit_ms": 1000 * sum(_least_s(node, peak, bandwidth) for node in nodes),
    }


def _least_s(node: list[Any], peak: float, bandwidth: float) -> float:
    """Seconds that a node takes at least on a machine of these limits: its roofline."""
    return 0.0 if node[IS_VIEW] else float(max(node[FLOPS] / peak, node[BYTES] / bandwidth))


def lines_of(programs: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Each line of the user's with its milliseconds a step, and its ops."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for program in programs:
        graph = program.get("graph")
        if graph is None:
            continue
        for node, took_us in zip(graph["nodes"], program["node_us"], strict=True):
            line = graph["lines"][node[LINE]] or "(no line of yours)"
            name = graph["names"][node[NAME]] + (" in backward" if node[BACKWARD] else "")
            found[line][name] += took_us * program["runs"]
    per_step = 1000 * max(1, num_steps)
    rows = [
        {
            "line": line,
            "ms": sum(ops.values()) / per_step,
            "ops": [[name, took / per_step] for name, took in _ranked(ops)[:12]],
        }
        for line, ops in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def _ranked(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def icicle(programs: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Milliseconds a step as a tree: forward, backward and the rest; below them modules; below those lines, and ops."""
    root: dict[str, Any] = {"name": "step", "ms": 0.0, "below": {}}
    per_step = 1000 * max(1, num_steps)
    for program in programs:
        graph = program.get("graph")
        if graph is None:
            continue
        for node, took_us in zip(graph["nodes"], program["node_us"], strict=True):
            took = took_us * program["runs"] / per_step
            if not took:
                continue
            module = graph["modules"][node[MODULE]]
            phase = "backward" if node[BACKWARD] else "forward" if module else "outside of modules"
            path = [phase, *(module.split(".") if module else ())]
            path += [graph["lines"][node[LINE]] or "(no line of yours)", graph["names"][node[NAME]]]
            place = root
            place["ms"] += took
            for name in path:
                place = place["below"].setdefault(name, {"name": name, "ms": 0.0, "below": {}})
                place["ms"] += took
    return _listed(root)


def _listed(place: dict[str, Any]) -> dict[str, Any]:
    below = sorted(place["below"].values(), key=lambda child: -child["ms"])
    return {**place, "below": [_listed(child) for child in below]}
