"""Write a tree of Python values as JSON nodes; read it back without running code.

None, bool, str, int, finite float and list stand for themselves; all else is an object with a tag:
{"tuple": [...]}, {"tensor": 3}, {"dtype": "float32"}. The caller gives a number for each tensor. A value without a tag
is refused with its place in the tree. `index` stores the nodes.
"""

import base64
import functools
import math
import re
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch

from ltc_core.errors import CheckpointError, CheckpointFormatError

Node = Any  # what the json module reads and writes

# A state_dict has four levels. JSON, pickle and our own walk all recurse.
MAX_DEPTH = 64
_MAX_JSON_INT = 1 << 63

DTYPES: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}


def encode(tree: object, place: Callable[[torch.Tensor, str], int], name: str = "data") -> Node:
    """Return the node of `tree`; `place(tensor, where)` gives the number of each tensor.

    Numbers of numpy become Python's.

    Raises:
        CheckpointFormatError: a value has no node; names its place, such as data['model'][0].
    """
    return _Encoder(place).encode(tree, name)


def decode(node: Node, tensor: Callable[[Any], torch.Tensor]) -> Any:
    """Return the tree of `node`; `tensor(number)` gives each tensor, or refuses the number.

    A namedtuple comes back as a new class of the same name and fields.

    Raises:
        CheckpointFormatError: the node is none that `encode` writes.
    """
    return _Decoder(tensor).decode(node, "data")


class _Encoder:
    def __init__(self, place: Callable[[torch.Tensor, str], int]) -> None:
        self._place = place
        self._open: list[int] = []  # ids of the containers around the value

    def encode(self, value: Any, where: str) -> Node:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._place(value, where)}
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            return leaf(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
            return self.encode(value.item(), where)
        container = _CONTAINERS.get(kind) or (_namedtuple if _is_namedtuple(value) else None)
        if container is None:
            raise _no_node(value, where)
        if id(value) in self._open:
            raise CheckpointFormatError(
                f"cannot save {where}: it contains itself",
                next="save the parts, or use ltc_core.save, which pickles.",
            )
        if len(self._open) == MAX_DEPTH:
            raise CheckpointFormatError(
                f"cannot save {where}: it is nested more than {MAX_DEPTH} levels deep",
                next="flatten it, for instance into a dict of tensors.",
            )
        self._open.append(id(value))
        node = container(self, value, where)
        self._open.pop()
        return node

    def items(self, value: Any, where: str) -> list[Node]:
        return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def pairs(self, value: dict[Any, Any], where: str) -> list[Node]:
        return [
            [self.encode(key, f"a key of {where}"), self.encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]


def _int(value: int) -> Node:
    return value if abs(value) < _MAX_JSON_INT else {"int": hex(value)}


def _float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": repr(value)}


def _complex(value: complex) -> Node:
    return {"complex": [_float(value.real), _float(value.imag)]}


def _bytes(value: bytes) -> Node:
    return {"bytes": base64.b64encode(value).decode("ascii")}


_LEAVES: dict[type, Callable[[Any], Node]] = {
    int: _int,
    float: _float,
    complex: _complex,
    bytes: _bytes,
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": [int(size) for size in value]},
}


def _tuple(encoder: _Encoder, value: Any, where: str) -> Node:
    return {"tuple": encoder.items(value, where)}


def _dict(encoder: _Encoder, value: dict[Any, Any], where: str) -> Node:
    if all(type(key) is str for key in value):
        return {"dict": {k: encoder.encode(v, f"{where}[{k!r}]") for k, v in value.items()}}
    return {"items": encoder.pairs(value, where)}


def _counter(encoder: _Encoder, value: Counter[Any], where: str) -> Node:
    return {"counter": encoder.pairs(value, where)}


def _ordered_dict(encoder: _Encoder, value: OrderedDict[Any, Any], where: str) -> Node:
    """state_dict() keeps the versions of its modules in an attribute; others are refused."""
    attributes = dict(vars(value))
    node = {"ordered_dict": encoder.pairs(value, where)}
    if "_metadata" in attributes:
        metadata = attributes.pop("_metadata")
        node["metadata"] = encoder.encode(metadata, f"{where}._metadata")
    for name, attribute in attributes.items():
        raise _no_node(attribute, f"{where}.{name}")
    return node


def _namedtuple(encoder: _Encoder, value: Any, where: str) -> Node:
    name, fields = type(value).__name__, type(value)._fields
    try:
        _namedtuple_type(name, fields)
    except (ValueError, TypeError):
        raise _no_node(value, where) from None
    nodes = [
        [field, encoder.encode(item, f"{where}.{field}")]
        for field, item in zip(fields, value, strict=True)
    ]
    return {"namedtuple": name, "fields": nodes}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Node]] = {
    list: _Encoder.items,
    tuple: _tuple,
    dict: _dict,
    OrderedDict: _ordered_dict,
    Counter: _counter,  # MultiStepLR keeps its milestones in one
}


def _is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


@functools.lru_cache(maxsize=256)
def _namedtuple_type(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # checks that all are identifiers


def _no_node(value: object, where: str) -> CheckpointFormatError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = "convert it to tensors and plain Python containers"
    for base in (dict, list, tuple, str, bool, int, float, complex, bytes):
        if isinstance(value, base):
            hint = f"convert it: {base.__name__}(...)"
    if hasattr(value, "__array__"):
        hint = "convert it: torch.as_tensor(...), or .item() for one number"
    return CheckpointFormatError(
        f"cannot save {where}: the streaming format has no place for a {kind}",
        got=f"{kind}; expected tensors, None, bool, int, float, complex, str, bytes, dtypes, "
        "devices and sizes in dicts, lists and tuples",
        next=f"{hint}, or save with ltc_core.save, which pickles.",
    )


class _Decoder:
    def __init__(self, tensor: Callable[[Any], torch.Tensor]) -> None:
        self.tensor = tensor
        self._depth = 0

    def decode(self, node: Node, where: str) -> Any:
        if node is None or isinstance(node, bool | str | int | float):
            return node
        if self._depth > MAX_DEPTH:
            raise _bad_node(where, f"more than {MAX_DEPTH} levels")
        self._depth += 1
        if isinstance(node, list):
            value: Any = self.items(node, where)
        elif node.keys() == {"tensor"}:
            value = self.tensor(node["tensor"])
        else:
            tag = next(iter(node), "")
            read = _TAGS.get(tag)
            if read is None or not node.keys() <= {tag, *_EXTRA_TAGS.get(tag, ())}:
                raise _bad_node(where, f"the keys {list(node)[:5]}")
            try:
                value = read(self, node, where)
            except CheckpointError:  # before RuntimeError: it is one
                raise
            except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
                raise _bad_node(where, f"{tag}: {error}") from error
        self._depth -= 1
        return value

    def items(self, nodes: Node, where: str) -> list[Any]:
        if not isinstance(nodes, list):
            raise _bad_node(where, f"{type(nodes).__name__} instead of a list")
        return [self.decode(node, f"{where}[{i}]") for i, node in enumerate(nodes)]

    def pairs(self, nodes: Node, where: str) -> list[tuple[Any, Any]]:
        made = {}
        for key_node, item_node in nodes:
            key = self.decode(key_node, f"a key of {where}")
            if key in made:
                raise _bad_node(where, f"the key {key!r} twice")
            made[key] = self.decode(item_node, f"{where}[{key!r}]")
        return list(made.items())


def _read_dict(decoder: _Decoder, node: Node, where: str) -> Any:
    return {k: decoder.decode(v, f"{where}[{k!r}]") for k, v in node["dict"].items()}


def _read_ordered_dict(decoder: _Decoder, node: Node, where: str) -> Any:
    made: Any = OrderedDict(decoder.pairs(node["ordered_dict"], where))
    if "metadata" in node:
        made._metadata = decoder.decode(node["metadata"], f"{where}._metadata")
    return made


def _read_namedtuple(decoder: _Decoder, node: Node, where: str) -> Any:
    fields = [tuple(pair) for pair in node["fields"]]
    kind = _namedtuple_type(node["namedtuple"], tuple(name for name, _ in fields))
    return kind._make(decoder.decode(item, f"{where}.{name}") for name, item in fields)


def _read_int(decoder: _Decoder, node: Node, where: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", node["int"]):
        raise _bad_node(where, "an int that is not hexadecimal")
    return int(node["int"], 16)


def _read_float(decoder: _Decoder, node: Node, where: str) -> float:
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[node["float"]]


def _read_complex(decoder: _Decoder, node: Node, where: str) -> complex:
    real, imaginary = decoder.items(node["complex"], where)
    return complex(real, imaginary)


def _read_size(decoder: _Decoder, node: Node, where: str) -> torch.Size:
    return torch.Size(decoder.items(node["size"], where))


_TAGS: dict[str, Callable[[_Decoder, Node, str], Any]] = {
    "tuple": lambda decoder, node, where: tuple(decoder.items(node["tuple"], where)),
    "dict": _read_dict,
    "items": lambda decoder, node, where: dict(decoder.pairs(node["items"], where)),
    "ordered_dict": _read_ordered_dict,
    "counter": lambda decoder, node, where: Counter(dict(decoder.pairs(node["counter"], where))),
    "namedtuple": _read_namedtuple,
    "int": _read_int,
    "float": _read_float,
    "complex": _read_complex,
    "bytes": lambda decoder, node, where: base64.b64decode(node["bytes"], validate=True),
    "dtype": lambda decoder, node, where: DTYPES[node["dtype"]],
    "device": lambda decoder, node, where: torch.device(node["device"]),
    "size": _read_size,
}
_EXTRA_TAGS = {"ordered_dict": ("metadata",), "namedtuple": ("fields",)}


def _bad_node(where: str, got: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the checkpoint's index makes no sense at {where}",
        got=got,
        next="it was not written by this library, or was changed: load an older checkpoint.",
    )
