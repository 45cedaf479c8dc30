"""HLO as the bytes of its protocol buffer, written as text or as JSON.

In: the bytes of HLO's message. Out: the text and the JSON that protobuf's library writes of it. Only the fields of
`_MESSAGES` have names; as in protobuf, text shows another field by its number, and JSON leaves it out. Used by
`lowering`. Source: xla/service/hlo.proto and xla/xla_data.proto; the encoding is protobuf's wire format.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["json_of", "text_of"]

_TYPES = {
    0: "PRIMITIVE_TYPE_INVALID", 1: "PRED", 2: "S8", 3: "S16", 4: "S32", 5: "S64", 6: "U8", 7: "U16", 8: "U32",
    9: "U64", 10: "F16", 11: "F32", 12: "F64", 13: "TUPLE", 14: "OPAQUE_TYPE", 15: "C64", 16: "BF16", 17: "TOKEN",
    18: "C128", 19: "F8E5M2", 20: "F8E4M3FN",
}  # fmt: skip
_SHARDINGS = {
    0: "REPLICATED", 1: "MAXIMAL", 2: "TUPLE", 3: "OTHER", 4: "MANUAL", 5: "UNKNOWN",
}  # fmt: skip
_PRECISIONS = {0: "DEFAULT", 1: "HIGH", 2: "HIGHEST"}

# Message -> number of a field -> its name, with '*' if it is repeated, and what it is: a message, a table of names, or
# a scalar.
_MESSAGES: dict[str, dict[int, tuple[str, Any]]] = {
    "Module": {
        1: ("name", "string"), 2: ("entry_computation_name", "string"), 3: ("computations*", "Computation"),
        4: ("host_program_shape", "ProgramShape"), 5: ("id", "int"), 6: ("entry_computation_id", "int"),
        8: ("input_output_alias", "Nothing"), 17: ("stack_frame_index", "Nothing"), 18: ("buffer_donor", "Nothing"),
    },
    "Computation": {
        1: ("name", "string"), 2: ("instructions*", "Instruction"), 4: ("program_shape", "ProgramShape"),
        5: ("id", "int"), 6: ("root_id", "int"), 7: ("is_fusion_computation", "bool"),
        8: ("execution_thread", "string"),
    },
    "Instruction": {
        1: ("name", "string"), 2: ("opcode", "string"), 3: ("shape", "Shape"), 7: ("metadata", "Metadata"),
        8: ("literal", "Literal"), 9: ("parameter_number", "int"), 11: ("fusion_kind", "string"),
        13: ("tuple_index", "int"), 14: ("dimensions*", "int"), 17: ("slice_dimensions*", "Slice"),
        20: ("dynamic_slice_sizes*", "int"), 24: ("epsilon", "float"), 25: ("feature_index", "int"),
        26: ("channel_id", "int"), 28: ("custom_call_target", "string"),
        30: ("dot_dimension_numbers", "DotDimensions"), 35: ("id", "int"), 36: ("operand_ids*", "int"),
        37: ("control_predecessor_ids*", "int"), 38: ("called_computation_ids*", "int"), 40: ("sharding", "Sharding"),
        43: ("backend_config", "bytes"), 51: ("precision_config", "Precision"),
        63: ("comparison_direction", "string"), 65: ("custom_call_has_side_effect", "bool"),
        68: ("frontend_attributes", "Attributes"), 72: ("comparison_type", "string"),
    },
    "ProgramShape": {1: ("parameters*", "Shape"), 2: ("result", "Shape"), 3: ("parameter_names*", "string")},
    "Shape": {
        2: ("element_type", _TYPES), 3: ("dimensions*", "int"), 4: ("tuple_shapes*", "Shape"), 5: ("layout", "Layout"),
        6: ("is_dynamic_dimension*", "bool"),
    },
    "Layout": {1: ("minor_to_major*", "int"), 16: ("tail_padding_alignment_in_elements", "int")},
    "Metadata": {
        1: ("op_type", "string"), 2: ("op_name", "string"), 3: ("source_file", "string"), 4: ("source_line", "int32"),
    },
    "Literal": {
        1: ("shape", "Shape"), 2: ("preds*", "bool"), 15: ("s8s", "bytes"), 3: ("u8s", "bytes"), 4: ("s32s*", "int32"),
        5: ("s64s*", "int"), 6: ("u32s*", "int32"), 7: ("u64s*", "int"), 8: ("f32s*", "float"), 9: ("f64s*", "double"),
        10: ("tuple_literals*", "Literal"), 11: ("f16s", "bytes"), 12: ("c64s*", "float"), 13: ("bf16s", "bytes"),
    },
    "Slice": {1: ("start", "int"), 2: ("limit", "int"), 3: ("stride", "int")},
    "DotDimensions": {
        1: ("lhs_contracting_dimensions*", "int"), 2: ("rhs_contracting_dimensions*", "int"),
        3: ("lhs_batch_dimensions*", "int"), 4: ("rhs_batch_dimensions*", "int"),
    },
    "Precision": {1: ("operand_precision*", _PRECISIONS)},
    "Sharding": {
        1: ("type", _SHARDINGS), 2: ("tile_shape", "Shape"), 3: ("tile_assignment_dimensions*", "int"),
        4: ("tile_assignment_devices*", "int"), 5: ("tuple_shardings*", "Sharding"),
        6: ("replicate_on_last_tile_dim", "bool"), 8: ("last_tile_dims*", _SHARDINGS),
        9: ("iota_reshape_dims*", "int"), 10: ("iota_transpose_perm*", "int32"),
    },
    "Attributes": {1: ("map*", "Pair")},
    "Pair": {1: ("key", "string"), 2: ("value", "string")},
    "Nothing": {},
}  # fmt: skip

_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5
# Scalars of a fixed size: their code for `struct` and the size.
_FIXED = {"float": ("<f", 4), "double": ("<d", 8)}


class _Field(NamedTuple):
    """A field of a message: its name, what it is, whether it is repeated, and each value that is given for it."""

    name: str
    what: Any
    is_repeated: bool
    values: list[Any]


def text_of(module: bytes) -> str:
    """HLO as the text of its protocol buffer: `opcode: "add"`."""
    return "".join(f"{row}\n" for row in _rows(module, "Module"))


def json_of(module: bytes) -> str:
    """HLO as the JSON of its protocol buffer: names in camel case, integers of 64 bits as strings."""
    return json.dumps(_object(module, "Module"), separators=(",", ":"))


def _rows(message: bytes, kind: str) -> Iterator[str]:
    for field in _fields(message, kind):
        for value in field.values:
            if isinstance(field.what, str) and field.what in _MESSAGES:
                yield f"{field.name} {{"
                yield from (f"  {row}" for row in _rows(value, field.what))
                yield "}"
            else:
                yield f"{field.name}: {_as_text(value)}"


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f'"{value.decode("latin-1").encode("unicode_escape").decode()}"'
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value)


def _object(message: bytes, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in _fields(message, kind):
        if field.name.isdigit():
            continue
        first, *rest = field.name.split("_")
        name = first + "".join(map(str.capitalize, rest))
        values = [_as_json(value, field.what) for value in field.values]
        if field.what == "Pair":
            found[name] = {pair["key"]: pair["value"] for pair in values}
        else:
            found[name] = values if field.is_repeated else values[-1]
    return found


def _as_json(value: Any, what: Any) -> Any:
    if isinstance(what, str) and what in _MESSAGES:
        return _object(value, what)
    if what == "int":
        return str(value)
    if what == "bytes":
        return base64.b64encode(value).decode()
    if what == "string":
        return value.decode()
    return value


def _fields(message: bytes, kind: str) -> list[_Field]:
    """The fields that are set, by their numbers."""
    found: dict[int, _Field] = {}
    for number, wire, value in _entries(message):
        marked, what = _MESSAGES[kind].get(number, (str(number), None))
        field = found.setdefault(
            number, _Field(marked.removesuffix("*"), what, marked.endswith("*"), [])
        )
        is_packed = wire == _WITH_LENGTH and (
            isinstance(what, dict) or what in ("int", "int32", "bool", *_FIXED)
        )
        field.values.extend(_numbers(value, what) if is_packed else [_scalar(value, what)])
    return [found[number] for number in sorted(found)]


def _entries(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each entry of a message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, wire, value
            continue
        if wire == _WITH_LENGTH:
            size, at = _varint(message, at)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[wire]
        yield tag >> 3, wire, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer of variable length, and where the next entry begins."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _numbers(packed: bytes, what: Any) -> Iterator[Any]:
    if isinstance(what, str) and what in _FIXED:
        code, _ = _FIXED[what]
        yield from (number for (number,) in struct.iter_unpack(code, packed))
        return
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield _scalar(value, what)


def _scalar(value: Any, what: Any) -> Any:
    if isinstance(what, dict):
        return _Name(what.get(value, str(value)))
    if what == "bool":
        return bool(value)
    if what in ("int", "int32"):
        return value - (1 << 64) if value >= 1 << 63 else value
    if isinstance(value, bytes) and what in _FIXED:
        (number,) = struct.unpack(_FIXED[what][0], value)
        return number
    return value


class _Name(str):
    """A name of an enumeration; it stands without quotes."""
