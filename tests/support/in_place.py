"""Functions with in-place calls, and random programs of them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import tirx as T

#: The extent of each axis of the tensors.
SIZE = 4

#: The type of the tensors.
KIND = relax.TensorType((SIZE, SIZE), "float32")

#: Larger elements are normalized: float32 cannot hold the digits that the sine of a large number
#: needs.
LARGEST = 8


@T.prim_func(private=True, s_tir=True)
def add_to(A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32")):
    for i, j in T.grid(SIZE, SIZE):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            A[vi, vj] = A[vi, vj] + B[vi, vj]


class Program:
    """A function under construction, with the values of its variables.

    Attributes
    ----------
    values : dict[relax.Var, numpy.ndarray]
        The values of the readable variables. The overwritten argument of an in-place call is
        removed.
    """

    def __init__(self, bb: relax.BlockBuilder, helper: tvm.ir.GlobalVar | None = None):
        self.bb, self._helper = bb, helper
        self._add_to = bb.add_func(add_to, "add_to")
        self.values: dict[relax.Var, np.ndarray] = {}
        self._names: dict[relax.Var, relax.Var] = {}

    def emit(self, expr: relax.Expr, value: np.ndarray) -> relax.Var:
        var = self.bb.emit(expr)
        self.values[var] = value.astype("float32")
        return var

    def name(self, var: relax.Var) -> relax.Var:
        """Bind a second variable to a tensor."""
        other = self.emit(var, self.values[var])
        self._names[other] = self._original(var)
        return other

    def write(self, target: relax.Var, source: relax.Var, through_helper: bool = False):
        """Add one tensor to another in place, optionally through a Relax function."""
        kind, value = target.ty, self.values[target] + self.values[source]
        if through_helper:
            call = relax.Call(self._helper, [target, source])
        else:
            arguments = relax.Tuple([target, source])
            call = relax.op.call_tir_inplace(self._add_to, arguments, [0], kind)
        for other in list(self.values):
            if self._original(other).same_as(self._original(target)):
                del self.values[other]
        return self.emit(call, value)

    def _original(self, var: relax.Var) -> relax.Var:
        return self._names.get(var, var)


def with_helper(bb: relax.BlockBuilder) -> tvm.ir.GlobalVar:
    """Add a Relax function that overwrites its first argument."""
    target, source = relax.Var("target", KIND), relax.Var("source", KIND)
    function = bb.add_func(add_to, "add_to")
    with bb.function("helper", [target, source], private=True):
        with bb.dataflow():
            call = relax.op.call_tir_inplace(function, relax.Tuple([target, source]), [0], KIND)
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    (variable,) = [v for v in bb.get().get_global_vars() if v.name_hint == "helper"]
    return variable


def module_of(body, names=("x", "y"), *, dataflow: bool = True) -> tvm.IRModule:
    """Return the module of a function of tensors; ``body`` takes a builder, a writing function and
    the tensors.

    The writing function takes the tensor that it overwrites, the tensor to add, a name for the
    result, and ``through_helper``: whether a Relax function makes the call.
    """
    bb = relax.BlockBuilder()
    helper = with_helper(bb)
    callee = bb.add_func(add_to, "add_to")
    params = [relax.Var(name, KIND) for name in names]

    def write(a, b, name="", through_helper=False):
        if through_helper:
            return bb.emit(relax.Call(helper, [a, b]), name)
        return bb.emit(relax.op.call_tir_inplace(callee, relax.Tuple([a, b]), [0], KIND), name)

    with bb.function("main", params):
        if dataflow:
            with bb.dataflow():
                result = bb.emit_output(body(bb, write, *params))
        else:
            result = bb.emit(body(bb, write, *params))
        bb.emit_func_output(result)
    return bb.get()


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


#: Operators on a matrix, with their NumPy definitions.
UNARY = {
    "sin": (relax.op.sin, np.sin),
    "transpose": (relax.op.permute_dims, np.transpose),
    "reshape": (
        lambda x: relax.op.reshape(relax.op.reshape(x, (SIZE * SIZE,)), (SIZE, SIZE)),
        np.array,
    ),
    "expand": (
        lambda x: relax.op.squeeze(relax.op.expand_dims(x, 0), [0]),
        np.array,
    ),
    "softmax": (relax.op.nn.softmax, _softmax),
}
BINARY = {
    "add": (relax.op.add, np.add),
    "multiply": (relax.op.multiply, np.multiply),
    "matmul": (relax.op.matmul, np.matmul),
}


def random_function(
    bb: relax.BlockBuilder,
    name: str,
    helper: tvm.ir.GlobalVar,
    rng: np.random.Generator,
    steps: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Add a function of random operators and in-place calls; return arguments and the expected
    results."""
    kind = relax.TensorType((SIZE, SIZE), "float32")
    params = [relax.Var(param, kind) for param in ("x", "y", "w")]
    inputs = [rng.normal(size=(SIZE, SIZE)).astype("float32") for _ in params]
    with bb.function(name, params):
        with bb.dataflow():
            program = Program(bb, helper)
            program.values = dict(zip(params, inputs, strict=True))
            for _ in range(steps):
                _step(program, rng)
            chosen = [var for var in program.values if var not in params][-6:]
            results = [bb.emit_output(relax.op.multiply(v, relax.const(1.0))) for v in chosen]
        bb.emit_func_output(relax.Tuple(results))
    return inputs, [program.values[var] for var in chosen]


def _step(program: Program, rng: np.random.Generator) -> None:
    known = list(program.values)
    # Prefer recent values. Otherwise little would depend on the writes.
    a, b = (known[-1 - int(rng.integers(min(4, len(known))))] for _ in range(2))
    kind = rng.choice(["unary", "binary", "write", "name"], p=[0.4, 0.25, 0.28, 0.07])
    if kind == "write" and program._original(a).same_as(program._original(b)):
        kind = "unary"
    if max(np.abs(program.values[name]).max() for name in (a, b)) > LARGEST:
        program.emit(relax.op.nn.softmax(a), _softmax(program.values[a]))
    elif kind == "write" and rng.random() < 0.2:
        _transposed_product(program, a, b)
    elif kind == "write":
        program.write(a, b, through_helper=rng.random() < 0.3)
    elif kind == "name":
        program.name(a)
    elif kind == "unary":
        build, compute = UNARY[rng.choice(list(UNARY))]
        program.emit(build(a), compute(program.values[a]))
    else:
        build, compute = BINARY[rng.choice(list(BINARY))]
        program.emit(build(a, b), compute(program.values[a], program.values[b]))


def _transposed_product(program: Program, a: relax.Var, b: relax.Var) -> None:
    """Multiply by a transpose that is made before its source is overwritten."""
    transposed = program.emit(relax.op.permute_dims(a), program.values[a].T)
    product = program.values[b] @ program.values[a].T
    program.write(a, b)
    program.emit(relax.op.matmul(b, transposed), product)
