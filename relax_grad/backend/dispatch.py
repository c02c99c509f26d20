"""The pass by which a library of operators computes the calls that it has a function for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Op

from ..ir.aliases import Memory, writing_functions
from ..ir.bindings import bindings_of, blocks_of, used, with_value, without_unused
from ..ir.dataflow import with_changed_lists
from ..ir.module import ModulePass
from . import torch_library
from .call import BackwardCall
from .joins import JOINS
from .library_call import Calls, LibraryCall
from .primitives import PRIMITIVES, Primitive, results_of

__all__ = ["DispatchLibrary"]

#: The libraries: the function that registers each with TVM, and the prefix of its names.
_LIBRARIES: dict[str, tuple[Callable[[], None], str]] = {
    "torch": (torch_library.register, torch_library.PREFIX)
}

#: The precisions of products of float32; the functions take their places.
_PRECISIONS = ("float32", "tf32", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchLibrary")
class DispatchLibrary(ModulePass):
    """A pass that lets a library compute convolutions, matrix products, attention, normalisations,
    softmax and losses, forward and backward.

    Each call of an operator that the library has a function for becomes a call of that function.
    TVM compiles the others, on any target. The libraries are:

    - ``"torch"``: PyTorch's operators (ATen), on the CPU or GPU of the operands, on TVM's stream.
      On a GPU, PyTorch calls cuDNN and cuBLAS. The process that runs the program needs PyTorch
      and ``relax_grad.backend``.

    The pass runs on a differentiated module: the functions of a library have no gradients.

    Parameters
    ----------
    library : str
        The name of the library.
    precision : str
        For products, convolutions and attention of float32: ``"float32"``; ``"tf32"``, which on a
        GPU rounds operands of products and convolutions to 10 bits of mantissa for tensor cores;
        or ``"bfloat16"``, which rounds operands and results to bfloat16, with sums in float32.
        PyTorch's own defaults are float32 for products and tf32 for convolutions.

    Raises
    ------
    ImportError
        If the library's package is missing; the message says how to install it.
    TypeError
        If the library or the precision is not a string.
    ValueError
        If the library or the precision is unknown.

    Methods
    -------
    explain(mod)
        Return, for each Relax function of a module and each operator in it that libraries know, the
        number of calls that the library computes or, if it computes none, the reason.

    Examples
    --------
    >>> import relax_grad, tvm
    >>> from tvm import relax
    >>> from relax_grad.backend import DispatchLibrary
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> weight = relax.Var("weight", relax.TensorType((3, 2), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x, weight]):
    ...     with bb.dataflow():
    ...         y = bb.emit(relax.op.matmul(x, weight))
    ...         loss = bb.emit_output(relax.op.mean(y))
    ...     _ = bb.emit_func_output(loss)
    >>> module = relax_grad.value_and_grad(bb.get(), wrt="weight")
    >>> dispatch = DispatchLibrary("torch")
    >>> dispatch.explain(module)["main_adjoint"]
    {'relax.matmul': 2}
    >>> executable = tvm.compile(dispatch(module), "llvm")
    """

    def __init__(self, library: str = "torch", precision: str = "float32"):
        _check_choice("library", library, _LIBRARIES)
        _check_choice("precision", precision, _PRECISIONS)
        register, self._prefix = _LIBRARIES[library]
        register()
        self._precision = _PRECISIONS.index(precision)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for variable, function, plan in _plans(mod):
            if plan.calls:
                functions[variable] = without_unused(
                    with_changed_lists(function, partial(self._dispatched, plan.calls))
                )
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def explain(self, mod: tvm.IRModule) -> dict[str, dict[str, int | str]]:
        """Return the calls that the library computes, and why it does not compute others.

        Parameters
        ----------
        mod : tvm.IRModule
            The module that the pass would change.

        Returns
        -------
        calls : dict[str, dict[str, int | str]]
            For each Relax function that calls such operators, and for each of them: the number of
            its calls that the library computes or, if it computes none, the reason.
        """
        explained: dict[str, dict[str, int | str]] = {}
        for variable, _, plan in _plans(mod):
            found: dict[str, int | str] = {}
            for op_name, refusal in plan.known:
                before = found.get(op_name, 0)
                count = before if isinstance(before, int) else 0
                found[op_name] = count + 1 if refusal is None else count or refusal
            if found:
                explained[variable.name_hint] = found
        return explained

    def _dispatched(
        self, planned: dict[relax.Var, LibraryCall], bindings: list[relax.Binding]
    ) -> list[relax.Binding]:
        """Return bindings with calls of the library instead of operators."""
        changed: list[relax.Binding] = []
        made: set[LibraryCall] = set()
        for binding in bindings:
            call = planned.get(binding.var)
            if call is None:
                changed.append(binding)
                continue
            if call.is_single:
                changed.append(with_value(binding, self._value(call)))
                continue
            if call not in made:
                made.add(call)
                changed.append(relax.VarBinding(call.variable, self._value(call)))
            changed.append(with_value(binding, call.value(call.values[binding.var])))
        return changed

    def _value(self, call: LibraryCall) -> relax.Expr:
        """Return the call of the library as an expression of Relax."""
        numbers = [_number(value) for value in (*call.numbers, self._precision)]
        types = call.results[0] if call.is_single else call.results
        operands = relax.Tuple([*call.operands, *numbers])
        return relax.op.call_dps_packed(self._prefix + call.function, operands, types)


class _Plan:
    """The calls of a library in a function, by the variables that they replace, and the known
    operators, each with the reason why the library does not compute it, or None.
    """

    def __init__(self, function: relax.Function, memory: Memory):
        self.calls: dict[relax.Var, LibraryCall] = {}
        self.known: list[tuple[str, str | None]] = []
        uses = Counter(relax.analysis.free_vars(function.body.body))
        for binding in bindings_of(function.body):
            uses.update(used(binding.value))
        for block in blocks_of(function.body):
            self._add(Calls(block.bindings[:], memory, uses))

    def _add(self, calls: Calls) -> None:
        """Plan the calls of a block."""
        refusals: dict[relax.Var, tuple[str, str | None]] = {}
        for binding in calls.bindings:
            call = _known(binding)
            if call is None:
                continue
            primitive = PRIMITIVES[call.op_name]
            reason = primitive.refuses(call)
            made = _joined(calls, binding.var, call) if reason is None else None
            if made is None and reason is None and binding.var not in calls.joined:
                reason = primitive.alone
                made = _single(primitive, binding.var, call) if reason is None else None
            refusals[binding.var] = call.op_name, reason
            if made is not None:
                calls.joined.update(dict.fromkeys(made.values, made))
        self.calls.update(calls.joined)
        for var, (op_name, reason) in refusals.items():
            self.known.append((op_name, None if var in calls.joined else reason))


def _plans(mod: tvm.IRModule) -> Iterator[tuple[GlobalVar, relax.Function, _Plan]]:
    """Yield the Relax functions of a module, each with its plan."""
    writers = writing_functions(mod)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            yield variable, function, _Plan(function, Memory(function, writers))


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    names = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {names}, but it is {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {names}, but it is {value!r}")


def _joined(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    """Return the call of the library for this call together with others, or None."""
    join = JOINS.get(call.op_name)
    made = None if join is None else join(calls, var, call)
    return None if made is None else calls.placed(made)


def _single(primitive: Primitive, var: relax.Var, call: BackwardCall) -> LibraryCall:
    """Return the call of the library for one call."""
    results = results_of(call.type)
    is_tuple = isinstance(call.type, relax.TupleType)
    return LibraryCall(
        call.op_name.removeprefix("relax."),
        [call.arguments[name] for name in primitive.operands if name in call.arguments],
        primitive.numbers(call),
        results,
        {var: tuple(range(len(results))) if is_tuple else 0},
    )


def _number(value: float) -> relax.Expr:
    is_integer = isinstance(value, int)
    return relax.prim_value(tvm.tirx.const(value, "int64" if is_integer else "float64"))


def _known(binding: relax.Binding) -> BackwardCall | None:
    """Return the call of a binding, if libraries have a function for its operator."""
    value = binding.value
    if not isinstance(value, relax.Call) or not isinstance(value.op, Op):
        return None
    return BackwardCall.of(value) if value.op.name in PRIMITIVES else None
