"""The registration of gradient rules, legalizations and other operator attributes with TVM.

TVM keeps one value per operator attribute together with a level. A higher level replaces a lower
one; an equal level is an error. TVM itself and users who give no level register at
:data:`TVM_LEVEL`. Two levels let a user's own registration win, before and after the import:

- An attribute that TVM lacks is registered one level below (:data:`NEW_LEVEL`).
- A correction of TVM's own attribute takes over TVM's level: the stock value is replaced by ours. A
  user who overrides a stock rule needs a level above ``TVM_LEVEL``, with
  and without relax_grad.

Modules declare with :func:`register_gradient`, :func:`register_nondifferentiable`,
:func:`register_legalize`, :func:`register_infer_type` and :func:`register_infer_layout`.
``import relax_grad`` calls :func:`install`, which registers the declarations once. :func:`classify`
reports whether and by whose rule an operator is differentiable.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Op
from tvm.relax.op.grad import no_grad as _no_grad

from ._validation import alternatives, near_names
from .errors import GradientError
from .ir import corrections, legalizations
from .ir.partials import check_length, check_partial, failing_as, guarded

TVM_LEVEL = 10
NEW_LEVEL = TVM_LEVEL - 1


GradientRule = Callable[
    [relax.Var, relax.Call, relax.Var, relax.BlockBuilder],
    "list[relax.Expr]",
]
LegalizeRule = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
InferTypeRule = Callable[[relax.Call, relax.BlockBuilder], relax.Type]
InferLayoutRule = Callable[[relax.Call, Mapping, Mapping], object]


@dataclass(frozen=True)
class Declaration:
    """One attribute that relax_grad gives to one operator.

    Attributes
    ----------
    op_name : str
        The operator, for example ``"relax.nn.conv2d"``.
    attr : str
        The attribute: ``"FPrimalGradient"``, ``"FLegalize"``, ``"FInferType"`` or
        ``"FRelaxInferLayout"``.
    function : Callable
        The value of the attribute.
    corrects : str or None
        The defect of TVM's own value, where this one replaces it. None where TVM has no value.
    """

    op_name: str
    attr: str
    function: Callable
    corrects: str | None


@dataclass(frozen=True)
class Classification:
    """The status of the gradient of one operator of the running TVM.

    Attributes
    ----------
    op_name : str
        The operator.
    kind : str
        ``"differentiable"``, ``"non-differentiable"`` or ``"unclassified"``.
    rule : str or None
        The owner of the rule: ``"relax_grad"``, ``"TVM"``, ``"the pass"`` (the Gradient pass itself
        handles the operator) or ``"user"`` (registered over relax_grad's rule). None without a
        rule.
    reason : str or None
        Why the operator is not differentiable. None for the other operators.
    refused : bool
        Whether a gradient that reaches the operator is an error. The other operators without a
        gradient count as constants.
    corrects : str or None
        The defect of TVM's own rule, where this rule replaces it.
    """

    op_name: str
    kind: str
    rule: str | None = None
    reason: str | None = None
    refused: bool = False
    corrects: str | None = None


#: Operators that the Gradient pass handles itself.
_PASS_OPS = frozenset(
    (
        *("relax.call_tir", "relax.call_tir_inplace", "relax.call_tir_with_grad"),
        *("relax.grad.end_checkpoint", "relax.grad.start_checkpoint"),
    )
)

_reasons: dict[str, str] = {}
_refused: dict[str, str] = {}
_declarations: dict[tuple[str, str], Declaration] = {}
#: The function that TVM holds for each installed declaration; a user's registration differs from
#: it.
_installed: dict[tuple[str, str], object] = {}
#: TVM's own functions that installed corrections have replaced.
_stock: dict[tuple[str, str], object] = {}
#: Operators that relax_grad has added.
_own: set[str] = set()
#: The backward operators that TVM declares, and its marks for the Gradient pass.
_BACKWARD_OF_TVM = (
    "relax.grad.avg_pool2d_backward",
    "relax.grad.end_checkpoint",
    "relax.grad.max_pool2d_backward",
    "relax.grad.nll_loss_backward",
    "relax.grad.no_grad",
    "relax.grad.start_checkpoint",
    "relax.grad.take_backward",
)
_ready = False
_lock = threading.RLock()


def declarations() -> list[Declaration]:
    """Return all declarations of relax_grad, in order of operator name.

    Examples
    --------
    >>> from relax_grad.registry import declarations
    >>> sorted({each.attr for each in declarations()})
    ['FInferType', 'FLegalize', 'FPrimalGradient', 'FRelaxInferLayout']
    """
    return [_declarations[key] for key in sorted(_declarations)]


def register_gradient(
    op_name: str, *, corrects: str | None = None, quantized: bool = False
) -> Callable[[GradientRule], GradientRule]:
    """Declare the gradient rule of an operator.

    Parameters
    ----------
    op_name : str
        The operator's name.
    corrects : str, optional
        The defect of TVM's own rule in one line, where this rule replaces it.
    quantized : bool
        True for an operator that reads quantized numbers. The partial of an integer or float8
        argument may then be a float32 tensor: the gradient with respect to the numbers that the
        argument encodes.

    Returns
    -------
    decorator : Callable
        Takes a rule ``(orig_var, orig_call, output_grad, ctx) -> list[Expr]`` that returns one
        partial for each argument of the call, and returns it unchanged.
        ``docs/own_operator.md`` and ``docs/rules.md`` have examples.

    Raises
    ------
    TypeError
        If the rule is not callable.
    ValueError
        If the running TVM has no such operator, or the operator has a rule already and ``corrects``
        is not given.
    """

    def decorate(rule: GradientRule) -> GradientRule:
        _check_callable(rule, op_name)
        checked = guarded(op_name, rule, quantized)
        _declare(Declaration(op_name, "FPrimalGradient", checked, corrects))
        return rule

    return decorate


def register_legalize(
    op_name: str, *, corrects: str | None = None
) -> Callable[[LegalizeRule], LegalizeRule]:
    """Declare the legalization of an operator; see :func:`register_gradient`."""

    def decorate(rule: LegalizeRule) -> LegalizeRule:
        _declare(Declaration(op_name, "FLegalize", rule, corrects))
        return rule

    return decorate


def register_infer_type(op_name: str, *, corrects: str) -> Callable[[InferTypeRule], InferTypeRule]:
    """Declare the type inference of one of TVM's operators; see :func:`register_gradient`."""

    def decorate(rule: InferTypeRule) -> InferTypeRule:
        _declare(Declaration(op_name, "FInferType", rule, corrects))
        return rule

    return decorate


def register_infer_layout(
    op_name: str, *, corrects: str | None = None
) -> Callable[[InferLayoutRule], InferLayoutRule]:
    """Declare an operator's rule for ``relax.transform.ConvertLayout``; see
    :func:`register_gradient`.

    Most rules are written in terms of :mod:`relax_grad.op._layout`.
    """

    def decorate(rule: InferLayoutRule) -> InferLayoutRule:
        _declare(Declaration(op_name, "FRelaxInferLayout", rule, corrects))
        return rule

    return decorate


def register_nondifferentiable(
    op_name: str, reason: str, *, remedy: str | None = None, stock: bool = False
) -> None:
    """Declare that an operator has no gradient.

    Parameters
    ----------
    op_name : str
        The operator's name.
    reason : str
        Why it has none.
    remedy : str, optional
        The advice to the user, for an operator whose result does depend on floating-point
        arguments. A gradient that reaches the operator is then a :class:`relax_grad.GradientError`.
        Without a remedy the operator counts as a constant.
    stock : bool
        Whether TVM has such a rule, which stays in place.

    Raises
    ------
    ValueError
        If the running TVM has no such operator, or it has a rule or a declaration already.
    """
    _check_operator(op_name)
    if op_name in _reasons:
        raise ValueError(f"{op_name} is declared non-differentiable twice")

    def constant(
        orig_var: relax.Var,
        orig_call: relax.Call,
        output_grad: relax.Var,
        ctx: relax.BlockBuilder,
    ) -> list[relax.Expr]:
        return [_no_grad(argument) for argument in orig_call.args]

    def refused(
        orig_var: relax.Var,
        orig_call: relax.Call,
        output_grad: relax.Var,
        ctx: relax.BlockBuilder,
    ) -> list[relax.Expr]:
        raise GradientError(refusal(orig_call))

    if not stock:
        register_gradient(op_name)(constant if remedy is None else refused)
    _reasons[op_name] = reason
    if remedy is not None:
        _refused[op_name] = remedy


def refusal(call: relax.Call) -> str:
    """Return why the call of a refused operator has no gradient, the function that it calls, and
    the remedy."""
    name = call.op.name
    called = call.args[0] if call.args else None
    of = f" ({called.global_symbol})" if isinstance(called, relax.ExternFunc) else ""
    return f"{_reasons[name]}{of}; {_refused[name]}"


def operators() -> list[str]:
    """Return the names of all Relax operators of the running TVM, including relax_grad's."""
    return sorted(name for name in Op.list_op_names() if name.startswith("relax."))


def classify(op_name: str) -> Classification:
    """Return the status of the gradient of an operator.

    Raises
    ------
    ValueError
        If the running TVM has no such operator.
    """
    _check_operator(op_name)
    if op_name in _PASS_OPS:
        return Classification(op_name, "differentiable", "the pass")
    registered = Op.get(op_name).get_attr("FPrimalGradient")
    key = (op_name, "FPrimalGradient")
    if registered is None:
        return Classification(op_name, "unclassified")
    if key in _declarations and key not in _installed:  # taken back by uninstall
        return Classification(op_name, "differentiable", "TVM")
    if key in _installed and registered != _installed[key]:
        return Classification(op_name, "differentiable", "user")
    rule = "relax_grad" if key in _installed else "TVM"
    if op_name in _reasons:
        return Classification(
            op_name, "non-differentiable", rule, _reasons[op_name], op_name in _refused
        )
    corrects = _declarations[key].corrects if key in _installed else None
    return Classification(op_name, "differentiable", rule, corrects=corrects)


def install() -> None:
    """Register every declaration that is not yet registered with the running TVM.

    ``import relax_grad`` calls this. From then on a declaration takes effect at once.
    """
    global _ready
    with _lock:
        _ready = True
        known_ops = set(Op.list_op_names())
        for key, declaration in _declarations.items():
            # Releases of TVM differ in their sets of operators.
            if key not in _installed and declaration.op_name in known_ops:
                _install(declaration)
        legalizations.note()
        corrections.install()


def uninstall() -> None:
    """Restore the attributes that TVM's operators had before ``import relax_grad``, and TVM's
    functions that the import corrects.

    A user's registrations made in the meantime stay. Additions under new names stay too: the
    backward operators of relax_grad, with all the attributes that they need to compile, and its
    pipeline. :func:`install` brings everything back.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.uninstall()
    >>> relax_grad.registry.classify("relax.tile").kind
    'unclassified'
    >>> relax_grad.registry.classify("relax.nn.conv2d").rule
    'TVM'
    >>> relax_grad.install()
    >>> relax_grad.registry.classify("relax.tile").kind
    'differentiable'
    """
    global _ready
    with _lock:
        _ready = False
        for key in [key for key in _installed if key[0] not in _own]:
            function, (op_name, attr) = _installed.pop(key), key
            op = Op.get(op_name)
            if op.get_attr(attr) == function:
                op.reset_attr(attr)
                if key in _stock:
                    op.set_attr(attr, _stock[key], TVM_LEVEL)
            _stock.pop(key, None)
        corrections.uninstall()


def own_operator(op_name: str) -> None:
    """Record that relax_grad, not TVM, defines an operator."""
    _own.add(op_name)


def is_backward_operator(op_name: str) -> bool:
    """Tell whether an operator is one of ``relax.grad``: a backward operator, or a mark of
    differentiation."""
    return op_name in _own or op_name in _BACKWARD_OF_TVM


def _check_operator(op_name: str) -> None:
    """Refuse a name that is no string or no operator.

    An unknown operator is refused only after :func:`install`: releases of TVM differ in their
    operators.
    """
    if not isinstance(op_name, str) or (_ready and not is_operator(op_name)):
        names = Op.list_op_names()
        raise ValueError(
            f"this TVM has no operator named {op_name!r}; {alternatives(str(op_name), names)}"
            if near_names(str(op_name), names)
            else f"this TVM has no operator named {op_name!r}; register an operator of yours "
            f'first: tvm.ir._ffi_api.RegisterOp("{op_name}", "")'
        )


def is_operator(op_name: str) -> bool:
    """Tell whether TVM has an operator. The list of all names would take a hundred times as
    long."""
    try:
        Op.get(op_name)
    except (AttributeError, tvm.error.InternalError):  # the latter by TVM 0.26
        return False
    return True


def _check_callable(function: object, op_name: str) -> None:
    if not callable(function):
        raise TypeError(
            f"the rule or attribute of {op_name} must be a function, but it is {function!r}"
        )


def _check_free(op_name: str, attr: str) -> None:
    """Refuse a declaration without effect: the attribute is registered with TVM already."""
    if Op.get(op_name).get_attr(attr) is None:
        return
    message = (
        f"{attr} of {op_name} is registered with TVM already; to replace it, describe its error "
        "with corrects="
    )
    if attr == "FPrimalGradient":
        message += f", or call relax.op.register_gradient({op_name!r}, rule, level={TVM_LEVEL + 1})"
    raise ValueError(message)


def _declare(declaration: Declaration) -> None:
    _check_operator(declaration.op_name)
    key = (declaration.op_name, declaration.attr)
    _check_callable(declaration.function, declaration.op_name)
    if key in _declarations:
        raise ValueError(
            f"{declaration.attr} of {declaration.op_name} is declared twice; to override it, "
            "register your own with TVM, for example by relax.op.register_gradient"
        )
    if _ready and declaration.corrects is None:
        _check_free(*key)
    _declarations[key] = declaration
    if _ready:
        install()


def _install(declaration: Declaration) -> None:
    op = Op.get(declaration.op_name)
    function = _as_ffi(declaration)
    _installed[declaration.op_name, declaration.attr] = function
    level = NEW_LEVEL if declaration.corrects is None else TVM_LEVEL
    try:
        op.set_attr(declaration.attr, function, level)
    except tvm.error.InternalError:
        # A value is registered at exactly this level. At TVM's level it is the stock value.
        # One level below it is a user's, which wins.
        if declaration.corrects is not None:
            _stock[declaration.op_name, declaration.attr] = op.get_attr(declaration.attr)
            op.reset_attr(declaration.attr)
            op.set_attr(declaration.attr, function, level)


@functools.cache
def _as_ffi(declaration: Declaration) -> tvm_ffi.Function:
    """Return a declaration's function as the FFI object that TVM holds, the same object each
    time."""
    return tvm_ffi.convert(declaration.function)


def apply_rule(
    rule: GradientRule,
    orig_var: relax.Var,
    orig_call: relax.Call,
    output_grad: relax.Var,
    ctx: relax.BlockBuilder,
    arguments: Sequence[relax.Expr],
    is_wanted: Callable[[relax.Expr], bool],
) -> list[relax.Expr]:
    """Return the partials of a call by the rule that TVM holds for its operator.

    The rules of relax_grad check their own results. The results of any other rule are checked here;
    types only for the arguments whose gradient is wanted. For a call that is recomputed,
    ``arguments`` belong to the original call.

    Raises
    ------
    GradientError
        If the rule fails or returns an invalid partial. The message names the operator and the
        binding.
    """
    op_name = orig_call.op.name
    if _installed.get((op_name, "FPrimalGradient")) == rule:
        return rule(orig_var, orig_call, output_grad, ctx)
    with failing_as(f"gradient of {op_name}, binding {orig_var.name!r}"):
        partials = rule(orig_var, orig_call, output_grad, ctx)
        check_length(partials, len(arguments))
        return [
            check_partial(ctx, partial, argument, is_wanted)
            for partial, argument in zip(partials, arguments, strict=True)
        ]
