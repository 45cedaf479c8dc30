"""StableHLO: of a model's forward pass, for other programs and a later run without its code, and of what is recorded.

`stablehlo` traces the forward pass and returns a `StableHLOProgram`: a function of the weights, then of the call's
tensors. A saved one is a directory of StableHLO as text and as portable bytecode, the weights as safetensors, and a
signature. `pending` shows the programs of a recorded graph. JAX writes and runs StableHLO (`executors.jax.stablehlo`),
whatever LTC_EXECUTOR is.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.api import verbs
from ltc_core.api.verbs import to_cpu
from ltc_core.errors import DataFormatError, ExportError, UnsupportedOpError, first_line, listed
from ltc_core.executors.jax import library as jax_library
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["PendingPrograms", "StableHLOProgram", "is_possible", "load", "pending", "stablehlo"]

Tensor = torch.Tensor
_FORMAT = 1
# What a leaf of the arguments or of the results may be, besides a tensor: a constant of the program.
_CONSTANTS = (bool, int, float, str, type(None))


class _IsTensor:
    """Stands for a tensor among the leaves of a structure."""

    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _IsTensor()


@dataclasses.dataclass(frozen=True)
class _Structure:
    """Nested containers: which leaves are tensors, and the constants among them."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> tuple[_Structure, list[Tensor]]:
        """The structure, and its tensors.

        Raises:
            ExportError: a leaf is neither a tensor nor a constant.
        """
        leaves, spec = pytree.tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise ExportError(
                    "a program has tensors and constants as arguments and results",
                    got=f"{type(leaf).__name__}, expected a tensor, a number, a string or None, in containers",
                    next="wrap the model in a module whose forward takes and returns these",
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kept = (_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, tuple(kept)), tensors

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def as_json(self) -> dict[str, Any]:
        leaves = [{} if leaf is _TENSOR else {"constant": leaf} for leaf in self.leaves]
        return {"structure": pytree.treespec_dumps(self.spec), "leaves": leaves}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> _Structure:
        leaves = (leaf.get("constant", _TENSOR) for leaf in found["leaves"])
        return cls(pytree.treespec_loads(found["structure"]), tuple(leaves))


@dataclasses.dataclass(frozen=True)
class Signature:
    """Sizes and dtype of one tensor of a program. A free size has a name."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> Signature:
        return cls(tuple(t.shape), t.dtype)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"

    def fits(self, given: Signature, sizes: dict[str, int | str]) -> bool:
        """Whether a tensor may be given for this one; notes its free sizes in `sizes`."""
        if (self.dtype, len(self.shape)) != (given.dtype, len(given.shape)):
            return False
        pairs = zip(self.shape, given.shape, strict=True)
        return all(
            (sizes.setdefault(own, size) if isinstance(own, str) else own) == size
            for own, size in pairs
        )

    def as_json(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Signature:
        return cls(tuple(found["shape"]), getattr(torch, found["dtype"]))


class StableHLOProgram:
    """A forward pass as StableHLO. `stablehlo` and `load` make it.

    Attributes:
        bytecode: StableHLO's portable bytecode: a function of the weights, in order, then of the inputs.
        weights: parameters, buffers and their values when the model was exported.
        inputs, outputs: size and dtype of each tensor of a call, and of its result.
    """

    def __init__(
        self,
        bytecode: bytes,
        weights: Mapping[str, Tensor],
        inputs: Sequence[Signature],
        outputs: Sequence[Signature],
        arguments: _Structure,
        results: _Structure,
    ) -> None:
        self.bytecode = bytecode
        self.weights = dict(weights)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._arguments = arguments
        self._results = results
        self._compiled: Any = None

    def text(self) -> str:
        """StableHLO as text."""
        return str(_jax().text_of(self.bytecode))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments; its tensors are on the device of the first tensor given.

        Raises:
            ExportError: the arguments have another structure, other sizes, dtypes or constants.
        Cost: compiles the program at the first call; copies arguments and results through the CPU.
        """
        found, tensors = _Structure.of((args, kwargs))
        given = [Signature.of(t) for t in tensors]
        sizes: dict[str, int | str] = {}
        if found != self._arguments or not all(
            own.fits(one, sizes) for own, one in zip(self.inputs, given, strict=True)
        ):
            raise ExportError(
                "the program was exported for other arguments",
                got=f"{_words(found, given)}, expected {_words(self._arguments, self.inputs)}",
                next="call it with arguments like those it was exported with, or export it again",
            )
        if self._compiled is None:
            is_free = any(isinstance(n, str) for one in self.inputs for n in one.shape)
            self._compiled = _jax().Compiled(self.bytecode, list(self.weights.values()), is_free)
        results = self._compiled([t.cpu() for t in to_cpu(tensors)])
        device = tensors[0].device if tensors else torch.device("cpu")
        return self._results.filled([t.to(device) for t in results])

    def save(
        self, directory: str | os.PathLike[str], weights: bool = True, text: bool = True
    ) -> None:
        """Write the program into a directory, which is made.

        Args:
            weights: whether to write the weights. Without them others can read the program, and `load` cannot.
            text: whether to write the text.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        signature = {
            "format": _FORMAT,
            "weights": {name: Signature.of(t).as_json() for name, t in self.weights.items()},
            "inputs": [one.as_json() for one in self.inputs],
            "outputs": [one.as_json() for one in self.outputs],
            "arguments": self._arguments.as_json(),
            "results": self._results.as_json(),
        }
        (path / "signature.json").write_text(json.dumps(signature, indent=1))
        (path / "program.bytecode").write_bytes(self.bytecode)
        if text:
            (path / "program.mlir").write_text(self.text())
        if weights:
            _safetensors().torch.save_file(self.weights, path / "weights.safetensors")

    @staticmethod
    def load(directory: str | os.PathLike[str]) -> StableHLOProgram:
        """As `load`."""
        return load(directory)


def stablehlo(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    free_sizes: Sequence[Mapping[int, str]] = (),
) -> StableHLOProgram:
    """Export the forward pass of a model, called with these arguments, as StableHLO.

    Sizes that are not free, and arguments other than tensors, are constants of the program. Weights are its first
    inputs, in the order of `named_parameters`, then `named_buffers`. What the forward pass writes into buffers or
    arguments is dropped.

    Args:
        model: on any device; it is not changed.
        free_sizes: for the first tensors of the arguments: dim -> name of its size. The program takes any such sizes,
            the same ones for the same name.

    Raises:
        DeviceError: JAX is not installed.
        ExportError: the forward pass cannot be traced, for instance because its way depends on values or free sizes.
        UnsupportedOpError: an op has no rule; random ops are such, so call `model.eval()` first.
    Source: `torch_xla.stablehlo`.
    """
    backend = _jax()
    arguments, tensors = _Structure.of((tuple(args), dict(kwargs or {})))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held: dict[str, Tensor] = to_cpu({name: t.detach() for name, t in named.items()})
    weights = {name: t.cpu().clone().contiguous() for name, t in held.items()}
    found: list[_Structure] = []
    dtypes: list[torch.dtype] = []

    def forward(*given: Tensor) -> list[Tensor]:
        copies = [t.clone() for t in given]  # the forward pass may write
        values = dict(zip(weights, copies, strict=False))
        positional, named = arguments.filled(copies[len(weights) :])
        result = torch.func.functional_call(model, values, positional, named)
        structure, returned = _Structure.of(result)
        found[:] = [structure]
        dtypes[:] = [t.dtype for t in returned]
        return returned

    inputs = [Signature.of(t) for t in tensors]
    for k, names in enumerate(free_sizes):
        sizes = [names.get(dim, size) for dim, size in enumerate(inputs[k].shape)]
        inputs[k] = Signature(tuple(sizes), inputs[k].dtype)
    fixed = [tuple(t.shape) for t in weights.values()]
    try:
        bytecode, shapes = backend.portable(
            forward,
            [*weights.values(), *tensors],
            [*fixed, *(one.shape for one in inputs)],
            isinstance(model, torch.fx.GraphModule),
        )
    except ExportError:
        raise
    except backend.FixedSizeError as error:
        raise ExportError(
            "the forward pass needs sizes that are to be free",
            got=str(error),
            next="leave these out of free_sizes; or export torch.export.export(...).module(check_guards=False)",
        ) from error
    except NotImplementedError as error:
        raise UnsupportedOpError(
            "the forward pass has an op that is not written as StableHLO",
            got=first_line(error),
            next="call model.eval() if the op draws random numbers; else replace it",
        ) from error
    except Exception as error:  # whatever the model's own code raises
        raise ExportError(
            "the forward pass cannot be traced",
            got=f"{type(error).__name__}: {first_line(error)}",
            next="export a part whose way does not depend on values, and make tensors on the device of its inputs",
        ) from error
    outputs = list(map(Signature, shapes, dtypes))
    return StableHLOProgram(bytecode, weights, inputs, outputs, arguments, found[0])


class PendingPrograms:
    """What tensors are computed by, as programs of XLA; `pending` makes it. One, if no op has to run on the host."""

    def __init__(self, programs: Sequence[Any]) -> None:
        self._programs = programs

    def text(self) -> str:
        """StableHLO as text: a module for each program."""
        return "\n".join(program.text() for program in self._programs)

    def hlo(self) -> str:
        """HLO as text, before XLA optimises it.

        Raises:
            ExportError: sizes are free.
        """
        if any(program.has_free_sizes for program in self._programs):
            raise ExportError(
                "HLO is written of programs whose sizes are known",
                got="a program with free sizes",
                next="ask for StableHLO, with text()",
            )
        return "\n".join(program.hlo() for program in self._programs)

    def bytecode(self) -> bytes:
        """StableHLO's portable bytecode.

        Raises:
            UnsupportedOpError: there is not one program: nothing is recorded, or an op runs on the host.
        """
        return self._single().bytecode()  # type: ignore[no-any-return]

    def optimized_hlo(self, inputs: Mapping[int, Any]) -> str:
        """HLO as text, after XLA has optimised it. Cost: compiles the programs.

        Args:
            inputs: value of the recorded graph -> its data, which may be divided over a mesh.
        """
        return "\n".join(program.optimized_hlo(inputs) for program in self._programs)

    def hlo_bytes(self, name: str) -> bytes:
        """HLO of this name as the bytes of its protocol buffer, before XLA optimises it.

        Raises:
            UnsupportedOpError: as `bytecode`.
        """
        return self._single().hlo_bytes(name)  # type: ignore[no-any-return]

    def inputs(self) -> tuple[int, ...]:
        """The values of the recorded graph that are the program's inputs, in order.

        Raises:
            UnsupportedOpError: as `bytecode`.
        """
        return self._single().inputs  # type: ignore[no-any-return]

    def _single(self) -> Any:
        if len(self._programs) != 1:
            raise UnsupportedOpError(
                "the tensors are not computed by one program",
                got=f"{len(self._programs)} programs",
                next="ask for the program before the tensors are read, and without collectives and ops of the host",
            )
        return self._programs[0]


def pending(
    tensors: Sequence[Tensor] | None = None,
    device: verbs.DeviceLike = None,
    free_sizes: Mapping[Tensor, Collection[int]] | None = None,
) -> PendingPrograms:
    """The programs of what is recorded and has not run. Nothing is compiled or run.

    Numbers that ops were given are constants. The inputs are tensors that have their values, and keys of random draws.

    Args:
        tensors: whose computation is shown. None: all that is recorded on the device and still held.
        device: by default the current one.
        free_sizes: a tensor that has its value -> the dims whose sizes are free, each for itself. Elementwise ops
            broadcast them as the program runs.

    Raises:
        DeviceError: JAX is not installed.
        ExportError: an op that is not elementwise has an operand with a free size, known sizes do not fit, or a tensor
            of `free_sizes` has no value of its own.
    Source: `torch_xla.core.xla_model.get_stablehlo`.
    """
    backend = _jax()
    graph, scalars = verbs.pending(tensors, device)
    free = _free_dims(free_sizes or {})
    try:
        return PendingPrograms(backend.programs(graph, scalars, free))
    except backend.FixedSizeError as error:
        raise ExportError(
            "the recorded ops need sizes that are to be free",
            got=str(error),
            next="leave these out of free_sizes; or export the model with ltc_core.export.stablehlo",
        ) from error


def _free_dims(free_sizes: Mapping[Tensor, Collection[int]]) -> dict[int, set[int]]:
    """Number of a value of the pending graph -> its free dims. Tensors that it does not read are left out."""
    found = {}
    for t, dims in free_sizes.items():
        handle = t._h if isinstance(t, LazyTensor) else None
        if type(handle) is not Cell or handle.value.buffer is None:
            raise ExportError(
                "sizes are free of tensors that have their values",
                got="a tensor that is pending, a view, or on another device",
                next="choose the tensors that it is computed from; or call mark_step() first, or clone the view",
            )
        if handle.value.epoch == handle.trace.epoch:
            found[handle.value.index] = {dim % t.dim() for dim in dims}
    return found


def load(directory: str | os.PathLike[str]) -> StableHLOProgram:
    """Read a saved program.

    Raises:
        DataFormatError: a file is missing or damaged.
    """
    path = Path(directory)
    files = _safetensors()
    try:
        about = json.loads((path / "signature.json").read_text())
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']}, expected {_FORMAT}")
        there = files.torch.load_file(path / "weights.safetensors") if about["weights"] else {}
        return StableHLOProgram(
            (path / "program.bytecode").read_bytes(),
            {name: there[name] for name in about["weights"]},
            [Signature.from_json(one) for one in about["inputs"]],
            [Signature.from_json(one) for one in about["outputs"]],
            _Structure.from_json(about["arguments"]),
            _Structure.from_json(about["results"]),
        )
    except (OSError, ValueError, KeyError, files.SafetensorError) as error:
        raise DataFormatError(
            f"{path} has no exported program that can be read",
            got=f"{type(error).__name__}: {first_line(error)}",
            next="export it again, with ltc_core.export.stablehlo(model, args).save(directory)",
        ) from error


def is_possible() -> bool:
    """Whether JAX is installed."""
    return jax_library.is_installed()


def _words(structure: _Structure, tensors: Sequence[Signature]) -> str:
    rest = iter(tensors)
    return (
        listed(next(rest) if leaf is _TENSOR else repr(leaf) for leaf in structure.leaves) or "none"
    )


def _safetensors() -> Any:
    import safetensors.torch

    return safetensors


def _jax() -> Any:
    jax_library.require("ltc_core.export")
    from ltc_core.executors.jax import stablehlo

    return stablehlo
