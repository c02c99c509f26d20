"""Patterns of backward operators for ``relax.transform.FuseOpsByPattern``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tvm.ir import Op
from tvm.relax.backend import _ffi_api
from tvm.relax.backend.pattern_registry import register_patterns
from tvm.relax.dpl import DFPattern, is_op, wildcard
from tvm.relax.transform import PatternCheckContext

from ..op.rank import RANKS
from ..registry import is_backward_operator
from .call import ROOT, BackwardCall

Check = Callable[[BackwardCall], bool]
#: Name, pattern, annotations and check, the format of TVM's ``register_patterns``.
Pattern = tuple[
    str, DFPattern, Mapping[str, DFPattern], Callable[[PatternCheckContext], bool] | None
]

#: The gradients of convolution with respect to data (dgrad) and weight (wgrad).
CONV_BACKWARD = tuple(
    f"relax.grad.conv{rank}d_backward_{argument}"
    for rank in RANKS
    for argument in ("data", "weight")
)
#: The gradients of pooling.
POOL_BACKWARD = tuple(
    f"relax.grad.{kind}_pool{rank}d_backward"
    for kind in ("max", "avg", "adaptive_avg")
    for rank in RANKS
)


def make_backward_pattern(op_name: str) -> tuple[DFPattern, Mapping[str, DFPattern]]:
    """Make the pattern of one call of a backward operator.

    Parameters
    ----------
    op_name : str
        The operator, for example ``"relax.grad.conv2d_backward_weight"``.

    Returns
    -------
    pattern : DFPattern
        Matches a call of the operator with any arguments and attributes.
    annotations : Mapping[str, DFPattern]
        The arguments by the operator's names for them (``"output_grad"``, ``"data"`` and
        ``"weight_shape"`` for the example), and ``"root"``, the call itself. Optional arguments
        match without a name.

    Raises
    ------
    ValueError
        If there is no such backward operator.

    Examples
    --------
    >>> from relax_grad.backend import CONV_BACKWARD, make_backward_pattern
    >>> CONV_BACKWARD[3]
    'relax.grad.conv2d_backward_weight'
    >>> pattern, annotations = make_backward_pattern(CONV_BACKWARD[3])
    >>> sorted(annotations)
    ['data', 'output_grad', 'root', 'weight_shape']
    """
    if not isinstance(op_name, str) or not is_backward_operator(op_name):
        raise ValueError(
            f"there is no backward operator {op_name!r}; their names begin with 'relax.grad.'"
        )
    arguments = Op.get(op_name).arguments
    annotations = {
        argument.name: wildcard()
        for argument in arguments
        if not argument.type_info.startswith("Optional")
    }
    optional = len(annotations) < len(arguments)
    root = is_op(op_name)(*annotations.values(), varg_default_wildcard=optional)
    return root, {**annotations, ROOT: root}


def backward_patterns(
    backend: str, operators: Iterable[str] = CONV_BACKWARD, check: Check | None = None
) -> list[Pattern]:
    """Make a pattern for each backward operator, named ``<backend>.<operator>``.

    Parameters
    ----------
    backend : str
        The backend; its code generator is ``relax.ext.<backend>``.
    operators : Iterable[str]
        The operators with a primitive in the backend.
    check : Callable[[BackwardCall], bool], optional
        Tells whether the backend accepts a call; by default it accepts all calls.

    Returns
    -------
    patterns : list[Pattern]
        The patterns for ``FuseOpsByPattern``. The names omit ``"relax.grad."``, for example
        ``"my_backend.conv2d_backward_weight"``.

    Raises
    ------
    ValueError
        If the name of the backend is empty or contains a dot, which TVM takes for the end of the
        name, or if there is no such operator.
    TypeError
        If the operators are not names, or the check is not callable.

    Examples
    --------
    >>> from relax_grad.backend import POOL_BACKWARD, backward_patterns
    >>> patterns = backward_patterns("my_backend", POOL_BACKWARD)
    >>> patterns[0][0]
    'my_backend.max_pool1d_backward'
    """
    if not isinstance(backend, str) or not backend or "." in backend:
        raise ValueError(f"backend must be a name without a dot, but it is {backend!r}")
    if check is not None and not callable(check):
        raise TypeError(f"check must be a function of a call, but it is {check!r}")
    if isinstance(operators, str) or not isinstance(operators, Iterable):
        raise TypeError(f"operators must be names of operators, but it is {operators!r}")
    patterns = ((op_name, make_backward_pattern(op_name)) for op_name in operators)
    return [
        (
            f"{backend}.{op_name.removeprefix('relax.grad.')}",
            *pattern,
            None if check is None else _on_context(check),
        )
        for op_name, pattern in patterns
    ]


def register_backward_patterns(
    backend: str, operators: Iterable[str] = CONV_BACKWARD, check: Check | None = None
) -> list[Pattern]:
    """Register :func:`backward_patterns` with TVM, like the patterns of ``tvm.relax.backend``.

    ``tvm.relax.backend.pattern_registry.get_patterns_with_prefix(f"{backend}.")`` then returns them
    together with the backend's other patterns. A new pattern replaces a registered pattern of the
    same name.

    Parameters
    ----------
    backend, operators, check
        As for :func:`backward_patterns`.

    Returns
    -------
    patterns : list[Pattern]
        The registered patterns.
    """
    patterns = backward_patterns(backend, operators, check)
    _ffi_api.RemovePatterns([name for name, *_ in patterns])
    register_patterns(patterns)
    return patterns


def _on_context(check: Check) -> Callable[[PatternCheckContext], bool]:
    def checked(context: PatternCheckContext) -> bool:
        return bool(check(BackwardCall.of(context.annotated_expr[ROOT])))

    return checked
