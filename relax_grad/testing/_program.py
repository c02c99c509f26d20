"""Building, differentiating and running the programs that the gradient checks compare.

The program of order 1 is ``L1(inputs, cotangents) = sum over outputs of <output,
cotangent>``. The program of order k + 1 is ``L(k+1)(..., directions) = sum over gradients of Lk of
<gradient, direction>``. It is built from the bindings of the differentiated program, so its
gradient is the gradient of the next order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar

from .._validation import described, is_integer
from ..cpu.codegen.compile import assembled
from ..errors import GradientCheckError
from ..ir.compat import dtype_of, set_type
from ..ir.module import copy_with_new_vars, ending_blocks
from ..transform import Gradient

_FLOATS = ("float16", "bfloat16", "float32", "float64")

#: The default target: the optimizations of LLVM take a third of the time of a check and are not its
#: subject.
UNOPTIMIZED = {"kind": "llvm", "opt-level": 0}

#: The passes that can differentiate a program, by name.
PASSES = {"relax_grad": Gradient, "tvm": relax.transform.Gradient}


@runtime_checkable
class _Tensor(Protocol):
    """An array of any library, including NumPy."""

    def __dlpack__(self, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Argument:
    """One tensor parameter of a checked program.

    Attributes
    ----------
    name : str
        The name of the parameter.
    value : np.ndarray
        Its value.
    type : relax.TensorType
        Its type.
    """

    name: str
    value: np.ndarray
    type: relax.TensorType

    @property
    def dtype(self) -> str:
        return dtype_of(self.type)

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS


@dataclass(frozen=True)
class Program:
    """A module whose function ``main`` returns a scalar, with the values of its parameters."""

    module: tvm.IRModule
    arguments: tuple[Argument, ...]

    def values(self) -> list[np.ndarray]:
        return [argument.value for argument in self.arguments]


def make_arguments(
    inputs: Sequence, dtype: str | None, symbolic: Mapping[int, Mapping[int, str]]
) -> list:
    """Convert the arrays among the inputs of a check to arguments; other inputs are unchanged.

    Parameters
    ----------
    inputs : Sequence
        Arrays, (nested) tuples and lists of arrays, and values that are passed through.
    dtype : str or None
        The dtype to cast floating-point arrays to; None leaves them unchanged.
    symbolic : Mapping[int, Mapping[int, str]]
        Names for the symbolic axes of an input, by input and axis.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            "inputs must be a list of arrays and of other arguments of the operator, but it is "
            f"{described(inputs)}: pass [x]"
        )
    _check_symbolic(inputs, symbolic)
    dims: dict[str, tirx.Var] = {}

    def argument(name: str, value: np.ndarray, names: Mapping[int, str]) -> Argument:
        if dtype is not None and value.dtype.name in _FLOATS:
            value = value.astype(numpy_dtype(dtype))
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        shape = [
            dims.setdefault(names[axis], tirx.Var(names[axis], "int64")) if axis in names else size
            for axis, size in enumerate(value.shape)
        ]
        return Argument(name, value, relax.TensorType(shape, value.dtype.name))

    def convert(name: str, value: Any, names: Mapping[int, str]) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            return argument(name, np.asarray(value), names)
        if isinstance(value, _Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(
                f"input {name} must be a NumPy array, but it is a {kind}; numpy.asarray may "
                "convert it"
            )
        if isinstance(value, (tuple, list)) and holds(value, (_Tensor, np.generic)):
            return tuple(convert(f"{name}_{i}", item, names) for i, item in enumerate(value))
        return value

    return [convert(f"x{i}", value, symbolic.get(i, {})) for i, value in enumerate(inputs)]


def _check_symbolic(inputs: Sequence, symbolic: Mapping[int, Mapping[int, str]]) -> None:
    """Refuse names of axes that do not exist, and one name for two different extents."""
    if not _is_symbolic(symbolic):
        raise TypeError(
            "symbolic must give names to axes of inputs, as {0: {0: 'n'}} does, but it is "
            f"{symbolic!r}"
        )
    extents: dict[str, int] = {}
    for i, names in symbolic.items():
        if not (0 <= i < len(inputs) and isinstance(inputs[i], np.ndarray)):
            raise ValueError(f"symbolic names axes of input {i}, which is not an array")
        shape = inputs[i].shape
        for axis, name in names.items():
            if not 0 <= axis < len(shape):
                raise ValueError(f"symbolic names axis {axis} of input {i}, whose shape is {shape}")
            if extents.setdefault(name, shape[axis]) != shape[axis]:
                raise ValueError(
                    f"symbolic gives the name {name!r} to the extents {extents[name]} and "
                    f"{shape[axis]}"
                )


def _is_symbolic(symbolic: Any) -> bool:
    """Tell whether a value is a mapping from integers to mappings from integers to strings."""

    return isinstance(symbolic, Mapping) and all(
        is_integer(i)
        and isinstance(names, Mapping)
        and all(is_integer(axis) and isinstance(name, str) for axis, name in names.items())
        for i, names in symbolic.items()
    )


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype of a TVM dtype, including bfloat16 (from ml_dtypes, a dependency of
    TVM)."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def first_order(
    function: Callable, arguments: list, attrs: Mapping, rng: np.random.Generator
) -> Program:
    """Build ``L1``: the inner product of the function's floating-point outputs with random
    cotangents."""
    tensors: list[Argument] = []
    params: list[relax.Var] = []

    def to_expr(argument: Any) -> Any:
        if isinstance(argument, Argument):
            tensors.append(argument)
            params.append(relax.Var(argument.name, argument.type))
            return params[-1]
        if isinstance(argument, tuple) and holds(argument, Argument):
            return relax.Tuple([to_expr(item) for item in argument])
        return argument

    call_args = [to_expr(argument) for argument in arguments]
    static = [
        relax.Var(tensor.name, relax.TensorType(tensor.value.shape, tensor.dtype))
        for tensor in tensors
    ]
    output_type = _output_type(function, params, call_args, attrs)
    outputs = float_leaves(output_type)
    if not outputs and any(tensor.is_float for tensor in tensors):
        raise TypeError(
            f"the function must return floating-point tensors, but its result is {output_type}"
        )
    # Cotangents need values, and the static types of the same outputs give their shapes.
    static_args = _substitute_all(call_args, params, static)
    leaves = [leaf for _, leaf in float_leaves(_output_type(function, static, static_args, attrs))]
    for leaf in leaves:
        if not isinstance(leaf.shape, relax.ShapeExpr):
            raise ValueError(
                f"an output has the type {leaf}, whose shape is not known even for inputs of known "
                "shape; reduce it in the checked function, for example by relax.op.sum"
            )
    cotangents = []
    for i, (leaf, (_, output)) in enumerate(zip(leaves, outputs, strict=True)):
        shape = [int(dim) for dim in leaf.shape.values]
        value = rng.uniform(-1, 1, shape).astype(numpy_dtype(dtype_of(leaf)))
        cotangents.append(Argument(f"cotangent{i}", value, output))
    weights = [relax.Var(argument.name, argument.type) for argument in cotangents]

    bb = relax.BlockBuilder()
    with ending_blocks(bb), bb.function("main", [*params, *weights]):
        with bb.dataflow():
            result = bb.emit(function(*call_args, **attrs))
            leaves = [_project(result, path) for path, _ in outputs]
            loss = bb.emit_output(_inner_products(bb, leaves, weights))
        bb.emit_func_output(loss)
    return Program(bb.get(), (*tensors, *cotangents))


def differentiate(
    program: Program, wrt: Sequence[str], through: str = "relax_grad"
) -> tvm.IRModule:
    """Return the module with ``main_adjoint``: ``main`` differentiated with respect to the named
    parameters.

    Parameters
    ----------
    through : str
        One of the :data:`PASSES`.

    Raises
    ------
    ValueError
        If there is no such pass, or if it cannot differentiate with respect to one of the
        parameters.
    """
    if through not in PASSES:
        raise ValueError(f"through must be one of {', '.join(PASSES)}, but it is {through!r}")
    if through == "tvm":
        for argument in program.arguments:
            if argument.name in wrt and argument.dtype == "bfloat16":
                raise ValueError(
                    f"{argument.name} is in bfloat16, which relax.transform.Gradient does not "
                    "take for a "
                    'parameter; differentiate through="relax_grad", or pass it in another dtype '
                    "and cast"
                )
    by_name = {param.name: param for param in program.module["main"].params}
    return PASSES[through]("main", [by_name[name] for name in wrt])(program.module)


def next_order(
    program: Program, differentiated: tvm.IRModule, wrt: Sequence[str], rng: np.random.Generator
) -> Program:
    """Build ``L(k+1)`` from the differentiated ``Lk``, with random directions as new parameters."""
    adjoint = copy_with_new_vars(differentiated["main_adjoint"])
    by_name = {argument.name: argument for argument in program.arguments}
    order = 1 + sum(argument.name.startswith("direction") for argument in program.arguments)
    directions = []
    for name in wrt:
        argument = by_name[name]
        value = rng.uniform(-1, 1, argument.value.shape).astype(argument.value.dtype)
        directions.append(replace(argument, name=f"direction{order}_{name}", value=value))
    # The copy has new symbolic variables, so directions take the types of the gradients in
    # the copy.
    (block,) = adjoint.body.blocks
    gradients = list(adjoint.body.body.fields[1].fields)
    params = [
        relax.Var(direction.name, gradient.ty)
        for direction, gradient in zip(directions, gradients, strict=True)
    ]
    callees = {
        variable: function
        for variable, function in differentiated.functions.items()
        if variable.name_hint not in ("main", "main_adjoint")
    }
    bb = relax.BlockBuilder(tvm.IRModule(callees))
    with ending_blocks(bb), bb.function("main", [*adjoint.params, *params]):
        with bb.dataflow():
            for binding in block.bindings:
                bb.emit_normalized(binding)
            loss = bb.emit_output(_inner_products(bb, gradients, params))
        bb.emit_func_output(loss)
    arguments = tuple(
        replace(argument, type=param.ty)
        for argument, param in zip(program.arguments, adjoint.params, strict=True)
    )
    directions = [
        replace(direction, type=param.ty)
        for direction, param in zip(directions, params, strict=True)
    ]
    return Program(bb.get(), (*arguments, *directions))


@contextmanager
def without_assertions() -> Iterator[None]:
    """Compile kernels without assertions about their arguments, which are half of the code and
    compile time.

    The context manager is also a decorator.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        yield


def compile_together(modules: Sequence[tvm.IRModule], target: Any) -> Callable:
    """Compile the modules together, as :func:`merge` combines them.

    The modules then share common kernels and the fixed cost of the passes over a module.
    """
    return compile_module(merge(modules), target)


def merge(modules: Sequence[tvm.IRModule]) -> tvm.IRModule:
    """Merge modules into one, with ``main_1``, ``main_2``, ... for ``main``, and their adjoint
    functions."""
    together = tvm.IRModule()
    for number, module in enumerate(modules, start=1):
        callees = {}
        for variable in module.functions:
            if variable.name_hint not in ("main", "main_adjoint"):
                callees[variable] = GlobalVar(f"{variable.name_hint}_of_{number}")
                set_type(callees[variable], variable.ty)
        for variable, function in module.functions_items():
            if callees and isinstance(function, relax.Function):
                function = _Renamed(callees).visit_expr(function)
            if variable in callees:  # calls refer to it by its variable
                together[callees[variable]] = function
            else:
                name = f"main_{number}{variable.name_hint.removeprefix('main')}"
                together[name] = function.with_attr("global_symbol", name)
    return together


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):
    """Replaces the callees of a function."""

    def __init__(self, callees: Mapping[GlobalVar, GlobalVar]):
        super().__init__()
        self._callees = callees

    def visit_global_var_(self, callee: GlobalVar) -> relax.Expr:
        return self._callees.get(callee, callee)


def compile_module(
    module: tvm.IRModule, target: Any
) -> Callable[[str, Sequence[np.ndarray]], object]:
    """Compile a module; return a callable that runs a function, by name, from arrays to (nested)
    arrays.

    A target of None is :data:`UNOPTIMIZED`.
    """
    target = tvm.target.Target(UNOPTIMIZED if target is None else target)
    device = tvm.runtime.Device(target.get_target_device_type(), 0)
    executable = tvm.compile(module, target=target)
    assemble(executable.mod, target)
    machine = relax.VirtualMachine(executable, device)

    def run(name: str, values: Sequence[np.ndarray]) -> Any:
        tensors = [_to_tensor(value, device) for value in values]
        result = to_numpy(machine[name](*tensors))
        for i, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if tensor.numpy().tobytes() != value.tobytes():
                raise GradientCheckError(f"{name} overwrote its parameter {i}")
        return result

    return run


def assemble(module: tvm.runtime.Module, target: tvm.target.Target) -> None:
    """Replace LLVM IR that an executable imports by machine code, if the target asks for no
    optimizations.

    TVM's runtime would compile the LLVM IR with the optimizations of the code generator.
    """
    if target.kind.name != "llvm" or target.export().get("opt-level") != 0:
        return
    imported = list(module.imports)
    if [module.kind for module in imported] == ["llvm"] and not list(imported[0].imports):
        module.clear_imports()
        module.import_module(assembled(imported[0], target))


def _to_tensor(value: np.ndarray, device: Any) -> tvm.runtime.Tensor:
    """Copy an array; ``tvm.runtime.tensor`` does not know NumPy's bfloat16."""
    return tvm.runtime.empty(value.shape, value.dtype.name, device).copyfrom(np.asarray(value))


def to_numpy(value: Any) -> Any:
    """Convert tensors in (nested) lists to arrays."""
    if hasattr(value, "numpy"):
        return value.numpy()
    return [to_numpy(item) for item in value]


def holds(value: Any, kind: type | tuple[type, ...]) -> bool:
    if isinstance(value, (tuple, list)):
        return any(holds(item, kind) for item in value)
    return isinstance(value, kind)


def _substitute_all(call_args: Sequence, variables: Sequence[relax.Var], values: Sequence) -> list:
    """Replace variables by values in the arguments of a call; other arguments stay unchanged."""
    known = dict(zip(variables, values, strict=True))
    return [_substitute(arg, known) for arg in call_args]


def _substitute(arg: Any, known: Mapping) -> Any:
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_substitute(field, known) for field in arg.fields])
    return known.get(arg, arg) if isinstance(arg, relax.Var) else arg


def _output_type(
    function: Callable, params: Sequence[relax.Var], call_args: Sequence, attrs: Mapping
) -> relax.Type:
    bb = relax.BlockBuilder()
    with ending_blocks(bb), bb.function("probe", params):
        try:
            result = function(*call_args, **attrs)
        except TypeError as error:
            raise TypeError(_of_call(error, function)) from error
        if not isinstance(result, relax.Expr):
            raise TypeError(
                f"the function must return floating-point tensors, but it returned {result!r}"
            )
        try:
            result = bb.emit(result)
        except TypeError as error:  # TVM's, which prints the whole operator
            text = _OPERATOR.sub(r"\1", str(error))
            if "float dtype" in text:
                text += '; give floating-point inputs: x.astype("float64")'
            raise TypeError(text) from error
        bb.emit_func_output(result)
    return result.ty


#: An operator as TVM prints it in errors; the group is its name.
_OPERATOR = re.compile(r'ir\.Op\(span=.*?name="([^"]+)".*?support_level=\d+\)')


def _of_call(error: TypeError, function: Callable) -> str:
    """Return the message for a function or a builder that does not take its arguments."""
    text = str(error)
    if "with `const`" in text:  # TVM's, for a number as an operand
        return f'a number must be a constant of Relax, such as relax.const(2.0, "float64"): {text}'
    if "ffi.Array" in text:
        return f"an input must be an array, such as numpy.ones((2, 3)), not a shape: {text}"
    if "Var" in text:
        return f"the function must compute with Relax, such as relax.op.exp(x): {text}"
    try:
        names = ", ".join(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return text
    return f"{text}; the inputs and attributes are {names}"


def float_leaves(output_type: relax.Type, path: tuple[int, ...] = ()) -> list:
    """Return the path and type of each floating-point tensor in a (nested) type."""
    if isinstance(output_type, relax.TupleType):
        return [
            leaf
            for i, field in enumerate(output_type.fields)
            for leaf in float_leaves(field, (*path, i))
        ]
    if isinstance(output_type, relax.TensorType) and dtype_of(output_type) in _FLOATS:
        return [(path, output_type)]
    return []


def _project(value: relax.Expr, path: tuple[int, ...]) -> relax.Expr:
    for index in path:
        value = relax.TupleGetItem(value, index)
    return value


def _inner_products(
    bb: relax.BlockBuilder, values: Sequence[relax.Expr], weights: Sequence[relax.Expr]
) -> relax.Expr:
    """Return the sum of the inner products of all pairs, as a scalar of float64 if any is, else
    float32."""
    dtypes = [dtype_of(weight.ty) for weight in weights]
    dtype = "float64" if "float64" in dtypes else "float32"
    total = None
    for value, weight, own in zip(values, weights, dtypes, strict=True):
        product = bb.emit(relax.op.multiply(value, weight))
        if own != dtype:
            product = bb.emit(relax.op.astype(product, dtype))
        term = bb.emit(relax.op.sum(product)) if product.ty.ndim else product
        total = term if total is None else bb.emit(relax.op.add(total, term))
    return total
