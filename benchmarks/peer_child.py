"""One peer in a process of its own: trains one workload, and does what benchmarks.peers asks.

It imports the peer, trains until the first loss is there, and says how long both took. Then it
reads commands from its input, one a line in JSON, and answers each with one line; when the input
ends, it ends. What fails is answered as {"error": ...}. Comes from training.py; peer_process.py is
the other end.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO


def _claim_stdout() -> TextIO:
    """Take stdout for the answers; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


Begin = Callable[[str, str, str], tuple[dict[str, Any], Callable[..., Any]]]


def _begin(peer_name: str, model: str, device: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Train until the first loss; return what that took, and what answers commands."""
    started = time.perf_counter()
    # Not at the top: this is the import that is timed.
    from benchmarks.peer_kinds import PEERS

    peer = PEERS[peer_name](device)
    imported = time.perf_counter()
    import torch

    from benchmarks.models import WORKLOADS
    from benchmarks.training import Training

    training = Training(peer, WORKLOADS[model])
    training.fetched_step()
    hello = {
        "import_s": imported - started,
        "first_loss_s": time.perf_counter() - imported,
        "versions": peer.versions,
    }

    def answer(command: str, **arguments: Any) -> Any:
        if command == "warm_up":
            compiled = training.warm_up(**arguments)
            return {
                "is_compiled": compiled,
                "times_s": training.times_s,
                "losses": training.losses,
            }
        if command == "run":
            return training.run(**arguments)
        if command == "execute_alone":
            return training.execute_alone(**arguments)
        if command == "counts":
            return peer.counts()
        if command == "device_peak_bytes":
            return torch.cuda.max_memory_allocated() if device == "cuda" else 0
        raise ValueError(command)

    return hello, answer


def serve(begin: Begin, prog: str, description: str | None) -> None:
    """Answer until the input ends, or something fails.

    Args:
        begin: is called with the peer, the model and the device; returns what is said first, and what
            answers a command with its arguments.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("peer")
    parser.add_argument("model")
    parser.add_argument("device")
    args = parser.parse_args()
    answers = _claim_stdout()
    try:
        hello, answer = begin(args.peer, args.model, args.device)
        print(json.dumps(hello), file=answers)
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=answers)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        print(json.dumps({"error": f"{type(error).__name__}: {message}"}), file=answers)
        raise


if __name__ == "__main__":
    serve(_begin, "python -m benchmarks.peer_child", __doc__)
