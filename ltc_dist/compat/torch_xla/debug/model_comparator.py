"""`torch_xla.debug.model_comparator`: save tensors at named points of two runs, and say where they differ.

mc.configure("run1")                        # or MODELCMP_SAVEDIR=run1; without either, `save` does nothing
x = mc.save("conv1", self.conv1(x), step=step)

python -m ltc_dist.compat.torch_xla.debug.model_comparator run1 run2
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TypeVar

import torch

import ltc_dist as ltd
from ltc_core.errors import CheckpointIOError

__all__ = ["compare", "compare_tensors", "configure", "save", "tensor_file_compare"]

Directory = str | os.PathLike[str]
Tensor = TypeVar("Tensor", bound=torch.Tensor)

_save_dir: Directory | None = None
_num_saved: Counter[Path] = Counter()


def configure(save_dir: Directory | None) -> None:
    """Set the directory that `save` writes to; None turns it off."""
    global _save_dir
    _save_dir = save_dir
    _num_saved.clear()


def save(name: str | None, tensor: Tensor, step: int | None = None) -> Tensor:
    """Write a tensor's values to '<name>.<number>', in 'step-<step>' if there is a step; returns the tensor.

    Args:
        name: of the point; by default the caller's file and line. Saved again under a name, the number goes up.

    Cost: syncs and copies, in all processes; the first of each host writes.
    """
    directory = os.environ.get("MODELCMP_SAVEDIR") if _save_dir is None else _save_dir
    if directory is None:
        return tensor
    values = tensor.detach().cpu()
    if not ltd.is_master_ordinal():
        return tensor
    if name is None:
        caller = sys._getframe(1)
        name = f"{os.path.basename(caller.f_code.co_filename)}.l{caller.f_lineno}"
    place = Path(directory)
    if step is not None:
        place /= f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    point = place / name
    torch.save(values, f"{point}.{_num_saved[point]}")
    _num_saved[point] += 1
    return tensor


def compare(
    save_dir1: Directory,
    save_dir2: Directory,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """Return as text how two directories of saved tensors differ, '' if they do not.

    Args:
        rtol, atol: as for `compare_tensors`.
        max_diffs: values shown for each tensor.

    Raises:
        CheckpointIOError: one of them is not a directory.
    """
    files1, files2 = _saved_in(save_dir1), _saved_in(save_dir2)
    report = ""
    for file in sorted(files1 | files2):
        if file not in files2:
            report += f"Mismatch: {file} not in {os.fspath(save_dir2)}\n"
        elif file not in files1:
            report += f"Mismatch: {file} not in {os.fspath(save_dir1)}\n"
        else:
            path1, path2 = os.path.join(save_dir1, file), os.path.join(save_dir2, file)
            report += tensor_file_compare(path1, path2, rtol, atol, max_diffs)
    return report


def _saved_in(directory: Directory) -> set[str]:
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointIOError(
            f"there are no saved tensors in {os.fspath(directory)}",
            got="no directory of that name",
            next="name the directories that configure(), or MODELCMP_SAVEDIR, was given",
        )
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {os.fspath(path) for path in found if re.fullmatch(r".*\.\d+", path.name)}


def tensor_file_compare(
    path1: Directory,
    path2: Directory,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """Return as text how two saved tensors differ, '' if they do not."""
    tensor1, tensor2 = (ltd.load(path) for path in (path1, path2))
    report = compare_tensors(tensor1, tensor2, rtol, atol, max_diffs)
    if not report:
        return ""
    path = Path(path1)
    name, _, number = path.name.rpartition(".")
    step = re.fullmatch(r"step-(.+)", path.parent.name)
    at_step = f" at step={step[1]}" if step else ""
    lines = "".join(f"  {line}\n" for line in report.splitlines())
    return f'Changes in saved tensor "{name}" with id={number}{at_step}\n{lines}'


def compare_tensors(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """Return as text how two tensors differ, '' if they do not; the largest errors come first.

    Two values differ if their distance is above `atol` and above `rtol` times the larger one, or if only one is nan.
    """
    if tensor1.shape != tensor2.shape:
        sizes = f"{list(tensor1.shape)} vs. {list(tensor2.shape)}"
        return f"Tensors have different shape: {sizes}\n"
    values = [t.detach().cpu().flatten() for t in (tensor1, tensor2)]
    wide = torch.complex128 if any(v.is_complex() for v in values) else torch.float64
    a, b = (v.to(wide) for v in values)
    error = (a - b).abs()
    allowed = (torch.maximum(a.abs(), b.abs()) * rtol).clamp(min=atol)
    # Relative to an infinity, any distance would be small.
    is_near = (error <= allowed) & ~a.isinf() & ~b.isinf()
    differs = (a != b) & ~is_near & ~(a.isnan() & b.isnan())
    where = differs.nonzero().flatten()
    largest_first = error[where].nan_to_num(torch.inf).argsort(descending=True, stable=True)
    report = ""
    for i in where[largest_first][:max_diffs].tolist():
        index = [int(k) for k in torch.unravel_index(torch.tensor(i), tensor1.shape)]
        v1, v2 = (v[i].item() for v in values)
        report += f"{index}: {v1} vs. {v2}\terror={error[i].item()}\n"
    if len(where) > max_diffs:
        report += f"... aborting after {max_diffs} differences\n"
    return report


def main() -> None:
    """Compare two directories named on the command line; exit with 1 if they differ."""
    parser = argparse.ArgumentParser(description="Compare tensors that two runs saved.")
    parser.add_argument("--rtol", type=float, default=1e-05)
    parser.add_argument("--atol", type=float, default=1e-08)
    parser.add_argument("--max_diffs", type=int, default=25)
    parser.add_argument("savedir1")
    parser.add_argument("savedir2")
    found = parser.parse_args()
    report = compare(found.savedir1, found.savedir2, found.rtol, found.atol, found.max_diffs)
    if report:
        print(report, end="", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
