"""The state dict of a whole model, of those that the processes of a `FullyShardedDataParallel` saved.

Also for files that torch_xla wrote. As a program: `python -m ltc_dist.fully_sharded.consolidate --ckpt_prefix P`.
"""

from __future__ import annotations

import argparse
import glob
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc_core.errors import CheckpointError, listed
from ltc_dist.fully_sharded.names import SHARD, joined, original
from ltc_dist.job.ranks import ranks

__all__ = ["consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts", "main"]

_WAIT_S = 30.0  # `save` of torch_xla returns without waiting for other processes, and its scripts consolidate then


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]], shard_metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the state dict of the module that was wrapped.

    Args:
        state_dict_list: `state_dict()` of each process, by rank.
        shard_metadata: `get_shard_metadata()` of any process.

    Returns:
        Whole parameters, and the buffers of rank 0 in the dtype that they had.

    Raises:
        CheckpointError: there are more or fewer state dicts than processes.

    Cost: memory of the whole model, on the device of the shards.

    Source: `torch_xla.distributed.fsdp.consolidate_sharded_state_dicts`.
    """
    count = shard_metadata["world_size"]
    if len(state_dict_list) != count:
        raise CheckpointError(
            "a model cannot be made whole of these state dicts",
            got=f"{len(state_dict_list)}; expected {count}, one of each process",
            next="give those of all processes, by rank",
        )
    buffers = shard_metadata.get("buffer_info", {})
    found: dict[str, Any] = {}
    for name, value in state_dict_list[0].items():
        path, last = _split(name)
        if last.startswith(SHARD):
            info = shard_metadata["shard_info"][path][last]
            whole = _whole([state[name] for state in state_dict_list], info["_orig_size"])
            key = joined(path, info["_orig_name"])
            found |= _unflattened(key, whole, shard_metadata["flatten_info"])
        else:
            dtype = buffers.get(name, {}).get("_orig_dtype")
            found[original(name)] = value if dtype is None else value.to(dtype)
    for name, others in shard_metadata.get("shared_info", {}).items():
        found |= dict.fromkeys(others, found[name])
    return found


def _split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    return path, last


def _whole(shards: Sequence[torch.Tensor], size: torch.Size) -> torch.Tensor:
    """The parts of a vector, or of rows, without the padding."""
    return torch.cat([*shards]).reshape(-1)[: torch.Size(size).numel()].view(size)


def _unflattened(
    key: str, value: torch.Tensor, info: Mapping[str, tuple[list[str], list[Any], list[int]]]
) -> dict[str, torch.Tensor]:
    """The parameters of a shard, by name."""
    if key not in info:
        return {original(key): value}
    names, shapes, numels = info[key]
    path = _split(key)[0]
    return {
        original(f"{path}.{name}"): part.view(shape)
        for name, part, shape in zip(
            names, value.split_with_sizes(list(numels)), shapes, strict=True
        )
    }


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[dict[str, Any], str | None]:
    """Make one model of the files `ckpt_prefix + ckpt_suffix`.

    Args:
        ckpt_prefix, ckpt_suffix: pattern of files that hold 'model' (a `state_dict()`) and 'shard_metadata'.
        save_path: file that {'model': state dict} is written to; `ckpt_prefix + "_consolidated.pth"` by default.
        save_model: write it.

    Returns:
        The state dict, and the file; None if none was written.

    Raises:
        CheckpointError: files are missing.

    Cost: memory of the whole model twice. In a job, rank 0 may wait half a minute for files of the other processes.

    Source: `torch_xla.distributed.fsdp.consolidate_sharded_model_checkpoints`.
    """
    pattern = ckpt_prefix + ckpt_suffix
    saved = _read(pattern)
    ranks_saved = [one["shard_metadata"]["rank"] for one in saved]
    count = saved[0]["shard_metadata"]["world_size"] if saved else 1
    if ranks_saved != list(range(count)):
        raise CheckpointError(
            f"the files {pattern} are not those of all processes",
            got=f"ranks {listed(map(str, ranks_saved))} of {count}" if saved else "no file",
            next="name the files of one checkpoint, one of each process",
        )
    print(f"found {len(saved)} checkpoint files in {pattern}")
    whole = consolidate_sharded_state_dicts(
        [one["model"] for one in saved], saved[0]["shard_metadata"]
    )
    if not save_model:
        return whole, None
    place = save_path or f"{ckpt_prefix}_consolidated.pth"
    torch.save({"model": whole}, place)
    print(f"saved consolidated model to {place}")
    return whole, place


def _read(pattern: str) -> list[dict[str, Any]]:
    """What the files hold, by rank. Other processes of this job, as many as the files are of, may be writing still."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + _WAIT_S
    while True:
        for path in sorted({*glob.glob(pattern)} - found.keys()):
            found[path] = torch.load(path, map_location="cpu")
        counts = {one["shard_metadata"]["world_size"] for one in found.values()}
        is_partial = counts == {ranks().world_size} and len(found) < ranks().world_size
        if not is_partial or time.monotonic() > deadline:
            return sorted(found.values(), key=lambda one: one["shard_metadata"]["rank"])
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make one model of the shards of all processes.")
    parser.add_argument("--ckpt_prefix", required=True, help="what the files' names begin with")
    parser.add_argument("--ckpt_suffix", default="*.pth", help="pattern of the rest of their names")
    parser.add_argument(
        "--save_path", default="", help="file of the model (PREFIX_consolidated.pth)"
    )
    given = parser.parse_args()
    consolidate_sharded_model_checkpoints(given.ckpt_prefix, given.ckpt_suffix, given.save_path)


if __name__ == "__main__":
    main()
