"""The pass by which a library of operators computes the calls that it has a function for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import tvm
from tvm import relax
from tvm.ir import Op

from ..ir.bindings import bindings_of, with_value
from ..ir.dataflow import with_changed_bindings
from ..ir.module import ModulePass
from . import torch_library
from .call import BackwardCall
from .primitives import PRIMITIVES

__all__ = ["DispatchLibrary"]

#: The libraries: the function that registers each with TVM, and the prefix of its names.
_LIBRARIES: dict[str, tuple[Callable[[], None], str]] = {
    "torch": (torch_library.register, torch_library.PREFIX)
}

_PRECISIONS = ("float32", "tf32")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchLibrary")
class DispatchLibrary(ModulePass):
    """A pass that lets a library compute convolutions, matrix products and attention, forward and
    backward.

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
        For products and convolutions of float32 on a GPU: ``"float32"``, or ``"tf32"`` to round
        their operands to 10 bits of mantissa for tensor cores. PyTorch's own defaults are float32
        for products and tf32 for convolutions.

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
        self._tf32 = int(precision == "tf32")

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            variable: with_changed_bindings(function, self._dispatched)
            if isinstance(function, relax.Function)
            else function
            for variable, function in mod.functions_items()
        }
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
        for variable, function in mod.functions_items():
            if not isinstance(function, relax.Function):
                continue
            found: dict[str, int | str] = {}
            for call in _calls(function):
                refusal = PRIMITIVES[call.op_name].refuses(call)
                before = found.get(call.op_name, 0)
                count = before if isinstance(before, int) else 0
                found[call.op_name] = count + 1 if refusal is None else count or refusal
            if found:
                explained[variable.name_hint] = found
        return explained

    def _dispatched(self, binding: relax.Binding) -> relax.Binding:
        """Return a binding with a call of the library instead of an operator."""
        call = _known(binding)
        if call is None:
            return binding
        primitive = PRIMITIVES[call.op_name]
        if primitive.refuses(call) is not None:
            return binding
        tensors = [call.arguments[name] for name in primitive.operands if name in call.arguments]
        numbers = [_number(value) for value in (*primitive.numbers(call), self._tf32)]
        kind = call.type
        types = list(kind.fields) if isinstance(kind, relax.TupleType) else kind
        name = self._prefix + call.op_name.removeprefix("relax.")
        value = relax.op.call_dps_packed(name, relax.Tuple([*tensors, *numbers]), types)
        return with_value(binding, value)


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    names = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {names}, but it is {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {names}, but it is {value!r}")


def _number(value: float) -> relax.Expr:
    is_integer = isinstance(value, int)
    return relax.prim_value(tvm.tirx.const(value, "int64" if is_integer else "float64"))


def _known(binding: relax.Binding) -> BackwardCall | None:
    """Return the call of a binding, if libraries have a function for its operator."""
    value = binding.value
    if not isinstance(value, relax.Call) or not isinstance(value.op, Op):
        return None
    return BackwardCall.of(value) if value.op.name in PRIMITIVES else None


def _calls(function: relax.Function) -> Iterator[BackwardCall]:
    yield from filter(None, map(_known, bindings_of(function.body)))
