"""Constants of a function as parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np
import tvm
from tvm import relax

from ..ir.compat import constant_tensor, dtype_of, map_constants
from ..ir.module import normalized, relax_function, unused, with_functions

#: A function of the name and the value of a constant, or constants by the names of their
#: parameters.
Select = Callable[[str, np.ndarray], bool | str | None] | Mapping[str, relax.Expr]


class Lifted(NamedTuple):
    """The result of :func:`lift_constants`.

    Attributes
    ----------
    module : tvm.IRModule
        The module, whose function has the new parameters.
    values : dict[str, tvm.runtime.Tensor]
        The value of each new parameter by its name, in the order of the parameters.
    """

    module: tvm.IRModule
    values: dict[str, tvm.runtime.Tensor]


def lift_constants(
    mod: tvm.IRModule,
    select: Select | None = None,
    func_name: str = "main",
    *,
    prefix: str = "constant",
) -> Lifted:
    """Turn floating-point constants of a function into parameters at its end.

    A constant that is used several times is one parameter. Integer and boolean constants stay, as
    do extents, axes and attributes, which are no tensors. Constants of callees stay too. The
    attribute ``num_input``, the number of parameters that are inputs, is set to the previous number
    of parameters where it is missing, and is kept otherwise.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    select : Callable or Mapping, optional
        The constants to lift.

        - A function ``(name, value) -> bool or str``. It takes the default name and the value, a
          NumPy array that is read only. It returns whether to lift the constant, or the name of the
          parameter.
        - A mapping from names to constants of the function, which are found by identity.
        - By default, all constants with more than one element.
    func_name : str
        The function.
    prefix : str
        The default names are the prefix and the number of the constant, counted over all
        floating-point constants.

    Returns
    -------
    lifted : Lifted
        The module and the values of the new parameters.

    Raises
    ------
    TypeError, ValueError
        If ``mod`` or ``func_name`` does not fit, a mapping names something other than a
        floating-point constant of the function, or two parameters get the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.frontend import lift_constants
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     y = bb.emit(relax.op.matmul(x, relax.const(np.ones((3, 4), "float32"))))
    ...     _ = bb.emit_func_output(y)
    >>> rule = lambda name, value: "weight" if value.ndim == 2 else False
    >>> lifted = lift_constants(bb.get(), rule)
    >>> [param.name for param in lifted.module["main"].params]
    ['x', 'weight']
    """
    function = relax_function(mod, func_name)
    choose, wanted = _chooser(select)
    taken = {param.name for param in function.params}
    values: dict[str, tvm.runtime.Tensor] = {}
    params: list[relax.Var] = []
    seen: dict[relax.Expr, relax.Expr] = {}  # by identity

    def replaced(constant: relax.Expr) -> relax.Expr:
        if constant in seen:
            return seen[constant]
        if "float" not in dtype_of(constant.ty):
            return constant
        default = unused(f"{prefix}{len(seen)}", taken)
        name = choose(default, constant)
        replacement = constant
        if name:
            name = default if name is True else name
            if name in taken:
                raise ValueError(
                    f"{func_name} has a parameter {name!r} already; select must return another name"
                )
            taken.add(name)
            replacement = relax.Var(name, constant.ty)
            values[name] = tvm.runtime.tensor(_value(constant))
            params.append(replacement)
        seen[constant] = replacement
        return replacement

    body = map_constants(function.body, replaced)
    missing = [name for name in wanted if name not in values]
    if missing:
        raise ValueError(
            f"select: {', '.join(missing)} is no floating-point constant of {func_name}; take "
            "the constants from the bindings of the function itself, since copies are other "
            "constants"
        )
    if not values:
        return Lifted(mod, {})
    count = len(function.params)
    every = [*function.params, *params]
    lifted = relax.Function(
        every, normalized(every, body), is_pure=function.is_pure, attrs=function.attrs
    )
    if function.attrs is None or "num_input" not in function.attrs:
        lifted = lifted.with_attr("num_input", count)
    return Lifted(with_functions(mod, {func_name: lifted}), values)


def _value(constant: relax.Constant) -> np.ndarray:
    return cast(tvm.runtime.Tensor, constant_tensor(constant)).numpy()


def _chooser(select: Select | None) -> tuple[Callable, list[str]]:
    """Return the function that names a constant, and the names that must occur."""
    if select is None:
        return (lambda name, constant: _value(constant).size > 1), []
    if isinstance(select, Mapping):
        if not all(isinstance(name, str) for name in select):
            raise TypeError(
                "select must map names to constants of the function, but its keys are "
                f"{list(select)!r}"
            )

        def named(name: str, constant: relax.Constant) -> str | None:
            return next(
                (key for key, candidate in select.items() if constant.same_as(candidate)), None
            )

        return named, list(select)
    if not callable(select):
        raise TypeError(f"select must be a function, a mapping or None, but it is {select!r}")

    def chosen(name: str, constant: relax.Constant) -> str | bool:
        value = _value(constant)
        value.flags.writeable = False
        choice = select(name, value)
        if not (choice is None or isinstance(choice, (bool, np.bool_, str))):
            raise TypeError(f"select must return a bool or a name, but it returns {choice!r}")
        return choice if isinstance(choice, str) else bool(choice)

    return chosen, []
