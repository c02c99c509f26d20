"""TVM's importer with other converters, and a check of every node against PyTorch's shape
and dtype."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from torch.utils import _pytree as pytree
from tvm import relax, tirx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ...ir.compat import Analyzer, dtype_of, shapes_agree, shapes_may_differ
from ...ir.extent_checks import ExtentCheck, condition_of, with_extent_checks
from ...ir.module import ending_blocks, unused
from ._clamped import Clamped
from ._converters import CONVERTERS, Refused
from ._operators import GRADIENT
from ._problems import Problem, problem
from ._symbols import Symbols
from ._tensors import copied
from .export import regions
from .export.program import Program
from .tracing.functions import levels, operands_of

#: The operators that check something at run time or bound symbols.
_CHECKS = {
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "_linalg_check_errors.default",
    "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
}

#: The libraries whose operators TVM has converters for.
_LIBRARIES = {
    *("aten", "prims", "torchvision", "_operator", "higher_order", "relax_grad"),
    regions.__name__,
}


#: The end of the message on extents for which a graph does not hold.
_RANGE = (
    ", by dynamic_shapes, its own comparisons or slices such as x[3:] and x[-3:]; import it with "
    "other dynamic_shapes"
)

#: The end of the message on a slice of few rows.
_FEWER = ", which other extents or numbers of the graph do not follow; leave out such batches"

#: A number in the text of an extent.
_NUMBER = re.compile(r"T\.int64\((-?\d+)\)")

#: More elements than an axis has.
_MOST_ELEMENTS = tirx.IntImm("int64", 2**40)

#: Functions of numbers that symbolic extents make.
_NUMBERS = {
    "sym_float": lambda data: data,
    "add": relax.op.add,
    "sub": relax.op.subtract,
    "mul": relax.op.multiply,
    "truediv": relax.op.divide,
    "pow": relax.op.power,
    "neg": relax.op.negative,
    "_sym_sqrt": relax.op.sqrt,
    "_sym_log2": lambda data: relax.op.divide(
        relax.op.log(data), relax.op.log(relax.const(2.0, "float64"))
    ),
}


class Importer(ExportedProgramImporter):
    """Builds a Relax function of a graph; the converters of this package come before TVM's.

    Parameters
    ----------
    block_builder : relax.BlockBuilder
        It takes the functions.
    custom : Mapping[str, Callable]
        The user's converters, ``(node, importer) -> relax.Var``, which come first.

    freezes_batch_norm : bool
        Whether batch normalisation uses its running statistics in training mode too.

    Attributes
    ----------
    seed : relax.Var or None
        The seed of the random numbers; None before the first function.
    problems : list[Problem]
        The nodes that cannot be imported.
    symbols : Symbols
        The symbolic extents of the function.
    level : tuple[int, ...]
        The calls of functions with a custom gradient whose backward function is converted.
    leaves : set[relax.Var] or None
        In a branch or a backward function, the variables from outside that depend on no other
        variable.
    levels : dict[fx.Node, tuple[int, ...]]
        The level of each node.
    """

    def __init__(
        self,
        block_builder: relax.BlockBuilder,
        custom: Mapping[str, Callable],
        freezes_batch_norm: bool = False,
    ):
        super().__init__()
        self.block_builder = block_builder
        self.seed: relax.Var | None = None
        self.problems: list[Problem] = []
        self.symbols = Symbols({})
        self.level: tuple[int, ...] = ()
        self.leaves: set[relax.Var] | None = None
        self.levels: dict[fx.Node, tuple[int, ...]] = {}
        self.freezes_batch_norm = freezes_batch_norm
        self._custom = custom
        self._streams = 0
        self._checks: list[ExtentCheck] = []

    def args(self, node: fx.Node) -> tuple:
        """Return the arguments of a node with Relax values instead of nodes."""
        return self.retrieve_args(node)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a variable."""
        return self.block_builder.emit(expr)

    def stream(self) -> int:
        """Return the number of a random operation: another one for each, in the order of the
        graph."""
        self._streams += 1
        return self._streams - 1

    def require(self, condition: tirx.Expr | bool, reason: str) -> None:
        """Note a condition on extents, which calls of the function check.

        Raises
        ------
        Refused
            If the condition does not hold for all extents.
        """
        if hasattr(condition, "asobject"):  # of == and !=
            condition = condition.asobject()
        known = condition if isinstance(condition, bool) else Analyzer().simplify(condition)
        if isinstance(known, bool | tirx.IntImm):
            if not known:
                raise Refused(f"{reason}; give examples of other extents")
            return
        parts = condition_of(condition)
        if parts is not None:
            reason = _NUMBER.sub(r"\1", reason).replace("+ -", "- ")
            self._checks.append(ExtentCheck(parts, reason))

    def _require_extent(self, extent: tirx.Expr) -> None:
        """Require that an extent is no negative number, such as n - 2 in a batch of one row."""
        if isinstance(extent, tirx.Var | tirx.IntImm):
            return
        analyzer = Analyzer()
        for symbol in self.symbols.variables:
            analyzer.bind(symbol, tvm.ir.Range.from_min_extent(0, _MOST_ELEMENTS))
        if not analyzer.can_prove(extent >= 0):
            self.require(extent >= 0, f"a tensor of the module has {extent} elements along an axis")

    def type_of(self, value: torch.Tensor) -> relax.TensorType:
        """Return the Relax type of a tensor or of a fake tensor."""
        shape = self.symbols.extents(value.shape)
        return relax.TensorType(shape, self._convert_data_type(value.dtype))

    def function(
        self,
        name: str,
        program: Program,
        values: Mapping[str, torch.Tensor],
        layout: Callable[[list, Mapping[str, relax.Var]], relax.Expr],
        *,
        keeps_seed: bool,
    ) -> list[relax.Var]:
        """Add a function to the module, and return its parameters.

        Parameters
        ----------
        name : str
            Its name.
        program : Program
            The graph.
        values : Mapping[str, torch.Tensor]
            The parameters, frozen parameters and states, in their order.
        layout : Callable
            ``layout(results, tensors)`` returns the result of the function, of the results of the
            graph and the variables of the parameters.
        keeps_seed : bool
            Whether the first parameter is a seed even if nothing is drawn.
        """
        clamped = Clamped(program.exported.graph_module)
        self.symbols = Symbols(program.symbols, clamped.extents)
        self.problems = list(program.problems)
        self._streams, self._checks = 0, []
        for condition, text in self.symbols.conditions(program.exported):
            self.require(condition, f"the module is imported for {text}{_RANGE}")
        for symbol, number in clamped.refused:
            extent = self.symbols.expression(symbol)
            reason = f"a slice of the module has no elements for {extent} = {number}"
            self.require(extent != number, f"{reason}{_FEWER}")
        nodes = {node.name: node for node in program.exported.graph.nodes}
        self.seed = relax.Var("seed", relax.TensorType((), "int64"))
        taken = {"seed", *values}
        inputs = {
            place: self._variable(unused(name, taken), nodes[place].meta["val"])
            for name, place in program.inputs.items()
        }
        tensors = {key: self._variable(key, tensor) for key, tensor in values.items()}
        self.env = {nodes[place]: variable for place, variable in inputs.items()}
        self.env |= {nodes[place]: tensors[key] for place, key in program.tensors.items()}
        self.env |= {nodes[place]: constant(tensor) for place, tensor in program.constants.items()}
        params = [self.seed, *inputs.values(), *tensors.values()]
        bb, count = self.block_builder, len(inputs)
        branches = any(node.target is torch.ops.higher_order.cond for node in nodes.values())
        with (
            ending_blocks(bb),
            bb.function(name, params, attrs={"num_input": count + 1}),
        ):
            with contextlib.nullcontext() if branches else bb.dataflow():
                results = self._run(program.exported.graph_module)
                result = layout(results, tensors)
                result = bb.emit(result) if branches else bb.emit_output(result)
            variable = bb.emit_func_output(result)
        if not keeps_seed and not self._streams:
            params = params[1:]
            function = bb.get()[variable]
            function = relax.Function(params, function.body, function.ret_ty, attrs=function.attrs)
            bb.update_func(variable, function.with_attr("num_input", count))
        bb.update_func(variable, with_extent_checks(bb.get()[variable], self._checks))
        return params

    def _variable(self, name: str, value: torch.Tensor) -> relax.Var:
        """Return a parameter of the function."""
        try:
            return relax.Var(name, self.type_of(value))
        except NotImplementedError:
            raise ValueError(
                f"{name} has the dtype {value.dtype}, which the import does not have; convert "
                "it, complex numbers by torch.view_as_real"
            ) from None

    def _run(self, module: fx.GraphModule) -> list:
        self.levels.update(levels(module.graph))
        for node in module.graph.nodes:
            if node.op == "output":
                self._check_operands(node)
                return list(self._retrieve_args(node.args[0]))
            if node.op == "get_attr":
                attribute = getattr(module, node.target)
                self.env[node] = (
                    constant(attribute) if isinstance(attribute, torch.Tensor) else attribute
                )
            elif node.op == "call_function" and self.levels[node] == self.level:
                self.convert(node)
        raise ValueError("the graph has no output")

    def convert(self, node: fx.Node) -> None:
        """Enter the value of a node, or note a problem."""
        self._check_operands(node)
        try:
            result = self._converted(node)
        except Refused as error:
            self._fail(node, str(error))
            return
        if any(user.target is GRADIENT and node in user.args[1] for user in node.users):
            result = self.emit(result)  # never the variable of an operand, which has other uses
        self.env[node] = result

    def _check_operands(self, node: fx.Node) -> None:
        """Refuse operands that only the backward function of a torch.autograd.Function computes."""
        for operand in operands_of(node):
            if operand.op == "call_function" and operand not in self.env:
                self._fail(
                    operand,
                    "a backward function writes to a tensor, or computes a value that others take",
                )

    def branch(self, module: fx.GraphModule, operands: Sequence[relax.Expr]) -> relax.SeqExpr:
        """Return the body of a branch as an expression of the operands."""
        # The builder of the function takes the tensor functions of converters too.
        bb, env, leaves = self.block_builder, self.env, self.leaves
        self.leaves = set()
        places = module.graph.find_nodes(op="placeholder")
        self.env = dict(zip(places, operands, strict=True))
        bb._begin_binding_block()
        try:
            result = bb.emit(relax.Tuple(self._run(module)))
        finally:
            block, self.env, self.leaves = bb._end_block(), env, leaves
        return relax.SeqExpr([block], result)

    def _converted(self, node: fx.Node) -> relax.Expr | tuple[relax.Expr | None, ...] | None:
        value, name = node.meta.get("val"), node.target.__name__
        if _only_checks(node):
            return None
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return self.symbols.expression(value)
        if isinstance(value, (torch.SymFloat, float)):
            return self._number(node, name)
        convert = self._converter(node, name)
        if name not in self._custom and any(map(_is_complex, pytree.tree_leaves(value))):
            raise Refused("its result has complex numbers, which Relax does not have")
        try:
            result = convert()
        except Refused:
            raise
        except Exception as error:  # the converters raise every kind
            dtypes = _float_dtypes(node)
            if len(dtypes) > 1 and name not in self._custom:
                raise Refused(
                    f"its operands have the dtypes {', '.join(dtypes)}; give examples in the "
                    "dtype of the module, or convert the module before the import"
                ) from error
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise Refused(f"its converter fails: {message}") from error
        return self._checked(node, result, value)

    def _number(self, node: fx.Node, name: str) -> Any:
        """Return a number that symbolic extents make: a tensor of float64 without axes."""
        if name == "_local_scalar_dense.default":
            raise Refused(
                "it makes a number of Python of a value (item, float, int); compute with the tensor"
            )
        function = _NUMBERS.get(name)
        if function is None:
            raise Refused("it has no form for symbolic numbers")

        def operand(value: Any) -> relax.Expr:
            value = self.env[value] if isinstance(value, fx.Node) else value
            if isinstance(value, (int, float)):
                return relax.const(float(value), "float64")
            if isinstance(value.ty, relax.TensorType):
                return value
            sizes = self.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
            whole = self.emit(relax.op.reshape(sizes, ()))
            return self.emit(relax.op.astype(whole, "float64"))

        return self.emit(function(*map(operand, node.args)))

    def _converter(self, node: fx.Node, name: str) -> Callable:
        if name in self._custom:
            return lambda: self._custom[name](node, self)
        library = getattr(node.target, "namespace", node.target.__module__)
        if library in _LIBRARIES:
            if name in CONVERTERS:
                return lambda: CONVERTERS[name](self, node)
            if name in self.convert_map:
                return lambda: self.convert_map[name](node)
        raise Refused("it has no converter")

    def _checked(
        self,
        node: fx.Node,
        result: relax.Expr | tuple[relax.Expr | None, ...],
        value: Any,
    ) -> relax.Expr | tuple[relax.Expr | None, ...]:
        """Return the value of a node if it has PyTorch's shape and dtype."""
        if isinstance(value, (tuple, list)):
            if isinstance(result, relax.Expr):
                result = self.block_builder.normalize(result)
                if not isinstance(result.ty, relax.TupleType):
                    raise Refused(f"its converter returns one tensor, PyTorch {len(value)}")
                count = len(result.ty.fields)
                result = [self.emit(relax.TupleGetItem(result, i)) for i in range(count)]
            if len(result) != len(value):
                raise Refused(f"its converter returns {len(result)} results, PyTorch {len(value)}")
            taken = _taken(node)
            return tuple(
                None if expected is None or i not in taken else self._checked(node, item, expected)
                for i, (item, expected) in enumerate(zip(result, value, strict=True))
            )
        if not isinstance(value, torch.Tensor):
            return result
        if not isinstance(result, relax.Expr):
            raise Refused(f"its converter returns {result!r}, which is no tensor")
        result = self.block_builder.normalize(result)
        if not isinstance(result, relax.Var):
            result = self.emit(result)
        wanted = self.type_of(value)
        if not isinstance(result.ty, relax.TensorType) or shapes_may_differ(result.ty, wanted):
            raise Refused(f"its converter returns {result.ty}, but PyTorch's result is {wanted}")
        for extent in wanted.shape.values:
            self._require_extent(extent)
        if not shapes_agree(result.ty, wanted):
            # Operators infer no type of operands whose extents are equal but not provably so.
            result = self.block_builder.match_cast(
                result, relax.TensorType(wanted.shape, dtype_of(result.ty))
            )
        dtype, expected = dtype_of(result.ty), dtype_of(wanted)
        if dtype != expected:
            if "float" in dtype and not _is_wider(dtype, expected):
                raise Refused(f"its converter computes in {dtype}, but PyTorch in {expected}")
            result = self.emit(relax.op.astype(result, expected))
        return result

    def _fail(self, node: fx.Node, reason: str) -> None:
        """Note a problem, and continue with a value of the right type to find the others."""
        self.problems.append(problem(node, reason))
        self.env[node] = self._substitute(node.meta.get("val"))

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._substitute, value))
        if isinstance(value, torch.SymFloat):
            return relax.const(0.0, "float64")
        if not isinstance(value, torch.Tensor):
            return value
        try:
            kind = self.type_of(value)
        except Exception:  # an extent or a dtype that Relax has no form for: listed with its node
            kind = relax.TensorType([1] * value.ndim, "float32")
        return self.emit(relax.op.zeros(kind.shape, dtype_of(kind)))


def _float_dtypes(node: fx.Node) -> list[str]:
    """Return the floating-point dtypes of the operands of a node."""
    values = (operand.meta.get("val") for operand in node.all_input_nodes)
    floats = (
        item for item in values if isinstance(item, torch.Tensor) and item.is_floating_point()
    )
    return sorted({str(item.dtype) for item in floats})


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _only_checks(node: fx.Node) -> bool:
    """Tell whether a node checks something, or is a condition that only checks take."""
    if node.target.__name__ in _CHECKS:
        return True
    checked = node.args[0] if node.target is operator.getitem else node
    if checked.target is torch.ops.higher_order.with_effects:
        return checked.args[1].__name__ in _CHECKS
    is_condition = isinstance(node.meta.get("val"), torch.SymBool)
    return is_condition and all(user.target.__name__ in _CHECKS for user in node.users)


def _is_wider(dtype: str, than: str) -> bool:
    """Tell whether a floating-point dtype holds all numbers of another dtype."""
    if "float" not in than:
        return False
    return int(dtype.lstrip("bfloat")) > int(than.lstrip("bfloat"))


def _taken(node: fx.Node) -> set[int]:
    """Return the positions of the results of a node that other nodes take."""
    if any(user.target is not operator.getitem for user in node.users):
        return set(range(len(node.meta["val"])))
    return {user.args[1] for user in node.users}


def constant(tensor: torch.Tensor) -> relax.Constant:
    """Return a tensor as a constant."""
    return relax.const(copied(tensor))
