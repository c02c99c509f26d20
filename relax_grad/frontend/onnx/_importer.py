"""TVM's importer with other converters, where TVM's differ from ONNX or emit tensor
functions."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import onnx
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from ...errors import UnsupportedOperatorError
from ...ir.bindings import with_function_body
from ...ir.compat import constant_value
from ...ir.expressions import variables
from ...ir.extent_checks import ExtentCheck, condition_of, with_extent_checks
from ...ir.module import ending_blocks, with_functions
from .extents.evaluate import evaluated, known_constant
from .extents.values import Extents, Known, is_symbolic, objects, plain
from .operators import indices, symbolic
from .operators.choices import check_is_tensor, with_extents
from .operators.converters import CONVERTERS, Refused, _dtype
from .operators.fused import DOMAIN, FUSED, in_domain
from .operators.recurrent import RECURRENT
from .operators.resize import RESIZING
from .operators.small_types import check_stored, refuse_small_operands, refuse_small_results
from .operators.standard_attention import STANDARD_ATTENTION
from .operators.support import STANDARD_OPERATORS, reason_of
from .read.nodes import STANDARD, every_node, label, opset_of
from .read.nodes import operands as all_operands

_CONVERTERS = {
    **CONVERTERS,
    **RECURRENT,
    **RESIZING,
    **STANDARD_ATTENTION,
    **{f"{DOMAIN}.{name}": function for name, function in FUSED.items()},
}

#: Operators of ONNX Runtime that TVM has converters for; the converters ignore the domain of a
#: node.
_MICROSOFT = {"AllClassNMS", "MatMulInteger16"}

#: Operators of TVM's that are no operators of ONNX's own domain, or have another meaning there.
_ONLY_MICROSOFT = _MICROSOFT | (FUSED.keys() - STANDARD_OPERATORS.keys())

#: The most nodes of an operator that a message names.
_MOST_NAMED = 3


def has_converter(node: onnx.NodeProto) -> bool:
    """Tell whether a node can be imported."""
    kind, known = node.op_type, {*onnx_frontend._get_convert_map(), *_CONVERTERS}
    if in_domain(node):
        return kind in FUSED or kind in _MICROSOFT & known
    if node.domain in STANDARD:
        return kind in {*known, "Constant", "If"} and kind not in _ONLY_MICROSOFT
    return False


def check_operators(model: onnx.ModelProto) -> None:
    """Raise an error that lists all operators without a converter, also those in branches."""
    unsupported: dict[str, list[str]] = defaultdict(list)
    for node in every_node(model.graph):
        if not has_converter(node):
            is_own = node.domain in STANDARD
            kind = node.op_type if is_own else f"{node.domain}.{node.op_type}"
            unsupported[kind].append(label(node))
    if not unsupported:
        return
    lines = []
    for kind, names in sorted(unsupported.items()):
        named = ", ".join(names[:_MOST_NAMED])
        rest = len(names) - _MOST_NAMED
        reason = reason_of(kind)
        lines.append(
            f"  {kind}: {len(names)} ({named}{f' and {rest} more' if rest > 0 else ''})"
            + (f": {reason}" if reason else "")
        )
    raise UnsupportedOperatorError(
        "These operators of the model are not supported, with the number of their nodes:\n"
        + "\n".join(lines)
        + (
            "\n"
            "Export the model without them, or cut the graph before them with "
            "onnx.utils.extract_model."
        )
    )


def imported(model: onnx.ModelProto) -> tuple[tvm.IRModule, bool]:
    """Return the module of a model, and whether it draws random numbers.

    The parameters of ``main`` are the inputs of the graph. If it draws, a seed comes first.
    """
    names = {name for node in every_node(model.graph) for name in (*node.input, *node.output)}
    names.update(value.name for value in (*model.graph.input, *model.graph.initializer))
    seed = "seed"
    while seed in names:
        seed = f"{seed}_"
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    for node in every_node(graph):
        if in_domain(node) and node.op_type in FUSED:
            node.op_type = f"{DOMAIN}.{node.op_type}"
    graph.input.insert(0, onnx.helper.make_tensor_value_info(seed, onnx.TensorProto.INT64, []))
    first = _Importer(seed)
    try:
        module, importer = first.run(graph, opset_of(model)), first
    except _Equal as equal:
        _rename_symbol(model.graph, *equal.args)
        return imported(model)
    except (ValueError, UnsupportedOperatorError):
        # A shape may be computed before the windows that bound its extents.
        if not first.least:
            raise
        importer = _Importer(seed, first.least)
        try:
            module = importer.run(graph, opset_of(model))
        except _Equal as equal:
            _rename_symbol(model.graph, *equal.args)
            return imported(model)
    main = with_extent_checks(module["main"], importer.checks)
    if not importer.draws:
        main = with_function_body(main, main.body, main.params[1:])
    return with_functions(module, {"main": main}), importer.draws


#: An extent as TVMScript writes it.
_NUMBER = re.compile(r"T\.int64\((-?\d+)\)")


class _Equal(Exception):
    """Two symbols of inputs that a node makes equal; ``args`` are their names."""


def _rename_symbol(graph: onnx.GraphProto, kept: str, other: str) -> None:
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == other:
                dim.dim_param = kept


class _Importer(onnx_frontend.ONNXGraphImporter):
    """TVM's importer, with the converters of this package first."""

    def __init__(self, seed: str, least: Mapping[str, int] | None = None):
        super().__init__(None, None, keep_params_in_input=False, sanitize=False)
        self._seed = seed
        self._streams = itertools.count()
        self._extents = Extents(least)
        self._known: dict[str, Known] = {}
        self._tensors: dict[str, relax.Expr] = {}
        self._operands: list[Known | None] | None = None
        self._branches = 0
        self._symbols: set[str] = set()
        self.checks: list[ExtentCheck] = []
        self.draws = False

    @property
    def least(self) -> dict[str, int]:
        """The smallest values of symbols that the model was found to imply."""
        return self._extents.bounds

    def run(self, graph: onnx.GraphProto, opset: int) -> tvm.IRModule:
        """Return the module of a graph."""
        shapes = (value.type.tensor_type.shape.dim for value in graph.input)
        self._symbols = {dim.dim_param for shape in shapes for dim in shape}
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            ending_blocks(self.bb),
        ):
            # TVM warns of every name that it changes, and prints the operands of a node that fails.
            warnings.filterwarnings("ignore", category=UserWarning)
            return self.from_onnx(graph, opset)

    def _draw(self) -> tuple[relax.Var, int]:
        """Return the seed, and a stream that no other node has."""
        self.draws = True
        return self._nodes[self._seed], next(self._streams)

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Do nothing: :func:`check_operators` checks all graphs."""

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        """Convert the nodes, apart from those whose results are known before the run."""
        for node in graph.node:
            operands = [self._elements(name) for name in node.input]
            shapes = [self._extents_of(name) for name in node.input]
            results = evaluated(node, operands, shapes, self._extents)
            if results is not None:
                self._known.update(zip(node.output, results, strict=True))
                continue
            taken = symbolic.TAKES_ELEMENTS.get(node.op_type, ())
            elements = {name for i, name in enumerate(node.input) if i in taken}
            for name in {*all_operands(node)} & self._known.keys():
                # A converter that takes elements has them from ``known``.
                is_taken = name in elements and self._known[name].is_symbolic
                self._nodes[name] = None if is_taken else self._tensor(name)
            is_choice = node.op_type == "If"
            if is_choice:
                self._choose(node)
                continue
            self._operands = operands
            super()._construct_nodes(SimpleNamespace(node=[node]))
        for output in graph.output:
            if output.name in self._known:
                self._nodes[output.name] = self._tensor(output.name)

    def _choose(self, node: onnx.NodeProto) -> None:
        """Convert a node ``If``, whose branches may return other extents."""
        self._operands = None
        self._branches += 1
        try:
            super()._construct_nodes(SimpleNamespace(node=[node]))
            for name in filter(None, node.output):
                self._nodes[name] = with_extents(self.bb, name, self._nodes[name])
        except Refused as error:
            raise UnsupportedOperatorError(f"If {label(node)!r}: {error}") from error
        self._branches -= 1

    def _parse_array(self, tensor_proto: onnx.TensorProto) -> object:
        check_stored(tensor_proto)
        return super()._parse_array(tensor_proto)

    def _elements(self, name: str) -> Known | None:
        """Return the elements of a value, if they are known before the run."""
        if not name:
            return None
        if name in self._known:
            known = self._known[name]
            if known.is_symbolic:
                values = map(self._extents.refreshed, known.elements.flat)
                known = Known(objects(values, known.elements.shape), known.dtype)
            return known
        value = self._nodes.get(name)
        constant = constant_value(value) if isinstance(value, relax.Expr) else None
        return None if constant is None else known_constant(constant)

    def _extents_of(self, name: str) -> list | None:
        if name in self._known:
            return list(self._known[name].elements.shape)
        kind = getattr(self._nodes.get(name), "ty", None)
        if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
            return None
        return list(kind.shape.values)

    def _tensor(self, name: str) -> relax.Expr:
        """Return the tensor of known elements."""
        if name not in self._tensors:
            self._tensors[name] = symbolic.tensor_of(self.bb, self._known[name])
        return self._tensors[name]

    def _multiplied(self, operands: list) -> list:
        """Return the operands of a matrix product, whose common extents are known to be equal."""
        shapes = _shapes_of(operands[:2])
        if shapes is None or min(map(len, shapes)) < 2:
            return operands
        if not any(map(is_symbolic, [*shapes[0], *shapes[1]])):
            return operands
        result = [*self._broadcast(operands[:2], first=3), *operands[2:]]
        column = [shapes[0][-1], shapes[1][-2]]
        self._check_symbols(column)
        for i, value in self._aligned(result, column, (0, 1), (-1, -2)):
            result[i] = value
        return result

    def _broadcast(self, operands: list, first: int = 1) -> list:
        """Return operands that are broadcast to each other with extents that are known to be equal,
        from an axis that is counted from the last."""
        shapes = _shapes_of(operands)
        if shapes is None:
            return operands  # an operand's own extents are unknown
        rank, result = max(map(len, shapes), default=0), list(operands)
        for place in range(first, rank + 1):
            column = [shape[-place] if len(shape) >= place else 1 for shape in shapes]
            places = [i for i, extent in enumerate(column) if is_symbolic(extent) or extent != 1]
            axes = (-place,) * len(places)
            for i, value in self._aligned(result, [column[i] for i in places], places, axes):
                result[i] = value
        return result

    def _joined(self, operands: list, axis: int) -> list:
        """Return the operands of a concatenation, whose other extents are known to be equal."""
        shapes, result = _shapes_of(operands), list(operands)
        if shapes is None or len(set(map(len, shapes))) > 1:
            return operands
        for i in range(len(shapes[0])):
            if i != axis % len(shapes[0]):
                column = [shape[i] for shape in shapes]
                axes = (i,) * len(column)
                self._check_symbols(column)
                for place, value in self._aligned(result, column, range(len(column)), axes):
                    result[place] = value
        return result

    def _check_symbols(self, extents: list) -> None:
        """Raise :class:`_Equal` for two symbols of extents that must be equal; symbols of a branch
        may be undefined here."""
        symbols = [extent.name for extent in extents if isinstance(extent, tirx.Var)]
        symbols = [symbol for symbol in symbols if symbol in self._symbols]
        for symbol in symbols:
            if symbol != symbols[0] and not self._branches:
                raise _Equal(symbols[0], symbol)

    def _aligned(
        self, operands: list, extents: list, places: range | Sequence[int], axes: tuple[int, ...]
    ) -> Iterator[relax.Expr]:
        """Yield the operands whose extent of an axis must equal the extent of others, and is not
        known to, with that extent; ``axes`` has the axis of each place.

        Extents of different symbols are refused. Those of the same symbols are compared at run
        time.
        """
        wanted = next((extent for extent in extents if isinstance(extent, (int, tirx.Var))), None)
        wanted = extents[0] if wanted is None and extents else wanted
        for place, extent, axis in zip(places, extents, axes, strict=True):
            if self._extents.equal(wanted, extent):
                continue
            are_related = (
                is_symbolic(wanted)
                and is_symbolic(extent)
                and variables(wanted) == variables(extent)
                and not self._extents.differ(wanted, extent)
                and "float" in _dtype(operands[place])
            )
            if not are_related:
                raise Refused(
                    f"its operands have the extents {wanted} and {extent}, which are not known to "
                    "be equal; give the inputs the same symbols or extents: shapes={...}"
                )
            self._require(
                tirx.EQ(wanted, extent),
                f"operands of one node have the extents {wanted} and {extent}, which must be equal",
            )
            yield place, indices.with_extent(self.bb, operands[place], axis, wanted)

    def _require(self, condition: tirx.Expr, reason: str) -> None:
        """Note a condition on symbolic extents that callers check before a call; a branch may not
        run."""
        parts = None if self._branches else condition_of(condition)
        if parts is not None:
            self.checks.append(ExtentCheck(parts, re.sub(_NUMBER, r"\1", reason)))

    def _learn(self, tensor: relax.Expr, least: int) -> None:
        """Take the extents of a tensor that is there to be no less than this; symbols of a branch
        may be undefined here."""
        if self._branches:
            return
        kind = tensor.ty
        for field in kind.fields if isinstance(kind, relax.TupleType) else [kind]:
            if isinstance(field, relax.TensorType) and isinstance(field.shape, relax.ShapeExpr):
                for extent in field.shape.values:
                    self._extents.learn(extent, least)

    def _convert_operator(
        self, op_name: str, inputs: list, attrs: dict, opset: int
    ) -> relax.Expr | None:
        name = attrs["tvm_custom"]["name"]
        attrs["tvm_custom"].update(
            draw=self._draw,
            known=self._operands,
            extents=self._extents,
            require=self._require,
        )
        try:
            result, inputs = None, onnx_frontend.onnx_input(inputs)
            if op_name == "Concat":
                inputs = onnx_frontend.onnx_input(self._joined(list(inputs), attrs["axis"]))
            elif op_name == "MatMul":
                inputs = onnx_frontend.onnx_input(self._multiplied(list(inputs)))
            elif op_name in _BROADCASTING:
                inputs = onnx_frontend.onnx_input(self._broadcast(list(inputs)))
            if op_name in _CONVERTERS:
                result = _CONVERTERS[op_name](self.bb, inputs, attrs, opset)
            if result is None:
                result = super()._convert_operator(op_name, inputs, attrs, opset)
            if self._branches:
                check_is_tensor(result)
            if not isinstance(result, relax.Expr):
                return result
            result = self.bb.normalize(result)
            refuse_small_results(op_name, inputs, result)
            self._learn(result, 1 if op_name in _WINDOWED else 0)
            return result
        except _Equal:
            raise
        except Refused as error:
            text = re.sub(_NUMBER, r"\1", str(error))
            raise UnsupportedOperatorError(f"{op_name} {name!r}: {text}") from error
        except Exception as error:
            refuse_small_operands(op_name, name, inputs, error)
            raise ValueError(
                f"TVM cannot import the node {op_name} {name!r}: {error}. {_advice(inputs)}"
            ) from error


#: Operators of windows, whose results have at least one element along each axis.
_WINDOWED = {"AveragePool", "Conv", "LpPool", "MaxPool"}

#: Operators whose operands are broadcast to each other.
_BROADCASTING = {
    "Add",
    "And",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Min",
    "Mod",
    "Mul",
    "Or",
    "Pow",
    "Sub",
    "Sum",
    "Where",
    "Xor",
}


def _advice(operands: Iterable[relax.Expr | None]) -> str:
    """Return the way out for a node that cannot be imported."""
    tensors = [operand for operand in operands if isinstance(operand, relax.Expr)]
    if not all(map(_has_constant_shape, tensors)):
        return (
            "If its shapes are known only at run time, give the extents of the inputs: "
            "shapes={...}; or simplify the model first: simplify=True"
        )
    kinds = ", ".join(str(tensor.ty) for tensor in tensors) or "none"
    return f"Its operands are {kinds}; cut the graph before it with onnx.utils.extract_model"


def _shape_of(value: relax.Expr | None) -> list | None:
    """Return the extents of a tensor, or None if they are unknown."""
    kind = getattr(value, "ty", None)
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    return list(map(plain, kind.shape.values))


def _shapes_of(values: Iterable[relax.Expr | None]) -> list[list] | None:
    """Return the extents of tensors, or None if the extents of one are unknown."""
    shapes = [_shape_of(value) for value in values]
    known = [shape for shape in shapes if shape is not None]
    return known if len(known) == len(shapes) else None


def _has_constant_shape(value: relax.Expr) -> bool:
    shape = value.ty.shape if isinstance(value.ty, relax.TensorType) else value
    return isinstance(shape, relax.ShapeExpr) and all(
        isinstance(extent, tirx.IntImm) for extent in shape.values
    )
