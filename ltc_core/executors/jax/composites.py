"""Composites of StableHLO: what lies between marks becomes a function, which one `stablehlo.composite` calls.

The op before a name has it as its location; other ops have none, since their own would be lines of these packages.

In: a module with a custom call for each mark, which tracing within `kept_marks` leaves. Out: the same module, changed.
Used by `stablehlo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from ltc_core.errors import ExportError
from ltc_core.executors.jax.rules.composite import BOUNDARY, OP_NAME
from ltc_core.graph.composite import Boundary

__all__ = ["call_functions", "locate", "outline", "text_with_names"]


def outline(module: Any) -> None:
    """Make the composites of a module.

    Raises:
        ExportError: an input of a composite depends on its results, or its marks are not one for each position.
    """
    with module.context, ir.Location.unknown():
        stablehlo.register_dialect(module.context)
        table = ir.SymbolTable(module.operation)
        left = [op for op in module.body.operations if op.operation.name == "func.func"]
        while left:
            function = left.pop(0)
            for block in function.regions[0].blocks:
                while marks := _outermost(block):
                    made = _outline(table, module, marks)
                    if made is not None:
                        left.append(made)


def locate(module: Any) -> None:
    """Make each name the location of the op that made its operand, and remove all other locations."""
    with module.context, ir.Location.unknown() as nowhere:
        ops = list(_nested(module.operation))
        for op in ops:
            op.location = nowhere
        for op in ops:
            if op.name == "stablehlo.custom_call" and OP_NAME in op.attributes:
                made_by = op.operands[0].owner
                if not isinstance(made_by, ir.Block):
                    made_by.location = ir.Location.name(ir.StringAttr(op.attributes[OP_NAME]).value)
                _drop(op)


def text_with_names(module: Any) -> str:
    """The module as text, with locations if it has names."""
    has_names = any(isinstance(op.location, ir.NameLoc) for op in _nested(module.operation))
    return str(module.operation.get_asm(enable_debug_info=has_names, use_local_scope=has_names))


def _nested(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in _operations(block):
                yield from _nested(inner)


def call_functions(module: Any) -> None:
    """Call the function of each composite in its place: XLA cannot refine the sizes of a composite."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    blocks = [block for function in functions for block in function.regions[0].blocks]
    for op in [op for block in blocks for op in _operations(block)]:
        if op.name == "stablehlo.composite":
            types = [value.type for value in op.results]
            callee = ir.FlatSymbolRefAttr(op.attributes["decomposition"])
            with ir.InsertionPoint(op), op.location:
                called = func.CallOp(types, callee, list(op.operands))
            for value, result in zip(op.results, called.operation.results, strict=True):
                value.replace_all_uses_with(result)
            op.erase()


def _boundary(op: Any) -> Boundary | None:
    if op.name != "stablehlo.custom_call" or BOUNDARY not in op.attributes:
        return None
    return Boundary.of(ir.StringAttr(op.attributes[BOUNDARY]).value)


def _outermost(block: Any) -> list[tuple[Boundary, Any]]:
    """The marks of the composite that begins first: those within it are left for its function."""
    found = [(mark, op) for op in _operations(block) if (mark := _boundary(op)) is not None]
    return [(mark, op) for mark, op in found if mark.id == found[0][0].id]


def _operations(block: Any) -> list[Any]:
    return [op.operation for op in block.operations]


def _outline(table: Any, module: Any, marks: Sequence[tuple[Boundary, Any]]) -> Any:
    """Make one composite; returns its function. Marks without results are dropped."""
    inputs, results = _by_position(marks, True), _by_position(marks, False)
    block = marks[0][1].block
    if not results:
        for _, op in inputs:
            _drop(op)
        return None
    order = {op: at for at, op in enumerate(_operations(block))}
    body, captured = _between(block, order, [op for _, op in inputs], [op for _, op in results])
    operands = [op.operands[0] for _, op in inputs] + captured
    last = max((order[v.owner] for v in operands if _is_made_here(v, order)), default=-1)
    first_use = min(order[op] for _, op in results)
    if last >= first_use:
        raise _error(marks[0][0].name, "an input depends on a result")
    made = _function(table, module, marks[0][0].name, inputs, captured, body, results)

    mark = results[0][0]
    attributes = {
        "name": ir.StringAttr.get(mark.name),
        "decomposition": ir.FlatSymbolRefAttr.get(made.name.value),
    }
    if mark.attr:
        values = {name: _attribute(value) for name, value in mark.attr.items()}
        attributes["composite_attributes"] = ir.DictAttr.get(values)
    there = _operations(block)[last + 1]  # a result's mark comes after
    types = [op.results[0].type for _, op in results]
    composite = ir.Operation.create(
        "stablehlo.composite", types, operands, attributes, ip=ir.InsertionPoint(there)
    )
    for value, (_, op) in zip(composite.results, results, strict=True):
        op.results[0].replace_all_uses_with(value)
        op.erase()
    for op in reversed(body):
        if not any(True for value in op.results for _ in value.uses):
            op.erase()
    for _, op in inputs:
        _drop(op)
    return made


def _by_position(
    marks: Sequence[tuple[Boundary, Any]], is_input: bool
) -> list[tuple[Boundary, Any]]:
    found = sorted(
        (item for item in marks if item[0].is_input is is_input), key=lambda item: item[0].pos
    )
    if [mark.pos for mark, _ in found] != list(range(len(found))):
        what = "inputs" if is_input else "results"
        raise _error(marks[0][0].name, f"{what} {[mark.pos for mark, _ in found]}")
    return found


def _error(name: str, got: str) -> ExportError:
    return ExportError(
        f"the composite {name!r} cannot be made of its marks",
        got=got,
        next="mark each input and each result once, with positions from 0, before and after what is between",
    )


def _drop(op: Any) -> None:
    op.results[0].replace_all_uses_with(op.operands[0])
    op.erase()


def _is_made_here(value: Any, order: dict[Any, int]) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner in order


def _between(
    block: Any, order: dict[Any, int], inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The ops that lead from the inputs to the results, in order; and arguments of the block that they read."""
    ends = {order[op] for op in inputs}
    body: dict[int, Any] = {}
    captured: list[Any] = []
    left = [op.operands[0] for op in results]
    while left:
        value = left.pop()
        if not _is_made_here(value, order):
            if isinstance(value.owner, ir.Block) and value.owner == block and value not in captured:
                captured.append(value)
            continue
        at = order[value.owner]
        if at not in ends and at not in body:
            body[at] = value.owner
            left += _read(value.owner)
    return [body[at] for at in sorted(body)], captured


def _read(op: Any) -> list[Any]:
    """What an op reads, with the ops of its regions."""
    found = list(op.operands)
    for region in op.regions:
        for inner in region.blocks:
            for each in _operations(inner):
                found += _read(each)
    return found


def _function(
    table: Any,
    module: Any,
    name: str,
    inputs: Sequence[tuple[Boundary, Any]],
    captured: Sequence[Any],
    body: Sequence[Any],
    results: Sequence[tuple[Boundary, Any]],
) -> Any:
    given = [op.results[0] for _, op in inputs] + list(captured)
    kinds = ([v.type for v in given], [op.results[0].type for _, op in results])
    made = func.FuncOp(
        f"{name}.impl", kinds, visibility="private", ip=ir.InsertionPoint(module.body)
    )
    table.insert(made)  # another one of the name: it gets a number
    block = made.add_entry_block()
    values = dict(zip(given, block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for op in body:
            copy = op.clone()
            _rename(copy.operation, values)
            values.update(zip(op.results, copy.operation.results, strict=True))
        func.ReturnOp([values[op.operands[0]] for _, op in results])
    return made


def _rename(op: Any, values: dict[Any, Any]) -> None:
    for at, value in enumerate(op.operands):
        if value in values:
            op.operands[at] = values[value]
    for region in op.regions:
        for inner in region.blocks:
            for each in _operations(inner):
                _rename(each, values)


def _attribute(value: Any) -> Any:
    """An attribute: whole numbers have 64 bits, others 32."""
    kinds = {bool: (1, ir.IntegerType.get_signless), int: (64, ir.IntegerType.get_signless)}
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, (list, tuple)):
        bits, of = kinds.get(type(value[0]), (32, lambda _: ir.F32Type.get()))
        kind = ir.RankedTensorType.get([len(value)], of(bits))
        return ir.DenseElementsAttr.get([_attribute(item) for item in value], kind)
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    return ir.FloatAttr.get(ir.F32Type.get(), value)
