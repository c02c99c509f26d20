"""Training with relax.training, through the differentiation pass of relax_grad."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm.relax.training
from tvm import relax
from tvm.relax.transform import DecomposeOpsForInference, LegalizeOps

from .._validation import check_integer
from ..activity import holds_floats
from ..errors import NotWellFormedError
from ..ir.arguments import bind_param, with_shapes
from ..ir.compat import types_differ
from ..ir.dataflow import in_dataflow
from ..ir.inlining import write_out_calls
from ..ir.module import (
    ModulePass,
    copy_with_new_vars,
    diagnosis,
    normalized,
    relax_function,
    tuple_fields,
    with_functions,
)
from ..transform import Gradient

_NAMES = relax.training.Trainer  # the names of the functions

#: The types of integers in the attributes of a module.
_INTEGERS = (int, tvm.tirx.IntImm)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.SetupTrainer")
class SetupTrainer(ModulePass):
    """Transform a backbone module to a complete trainer module, as ``relax.training.SetupTrainer``
    does.

    It has the interface of TVM's pass; the module can be passed to
    ``relax.training.Trainer``. The differentiation of the loss differs:

    - It uses :class:`relax_grad.transform.Gradient` and accepts all its inputs: for example a
      symbolic batch, a backbone of several blocks, or a backbone that calls other functions of the
      module.
    - Operators are not decomposed first. ``batch_norm`` therefore follows its attribute
      ``training``, and normalisations over any axes are right.
    - The module is not legalized by default:
      ``tvm.compile(module, target, relax_pipeline="relax_grad")`` dispatches the operators to
      kernels.

    The module must have a Relax function ``backbone`` and the integer attributes ``param_num`` and
    ``state_num``. ``backbone`` takes inputs, parameters and states, and returns outputs and new
    states. The pass adds three functions:

    - ``backbone_loss`` takes the targets too and returns the loss and the new states.
    - ``backbone_loss_adjoint`` returns the same and the gradients of the parameters.
    - ``optimizer`` updates the parameters.

    Only ``backbone`` returns the outputs that the loss does not take. It predicts with the running
    statistics.

    Parameters
    ----------
    loss : relax.training.loss.Loss
        The loss function, which is appended to the backbone.
    optimizer : relax.training.optimizer.Optimizer
        The optimizer.
    loss_args : Sequence[relax.TensorType]
        The types of the arguments of the loss function: of the outputs of the backbone, and of the
        targets.
    legalize : bool
        Whether to legalize the module; by default False. A pipeline finds its kernels by the
        operators that legalization replaces, and every pipeline of ``tvm.compile`` legalizes by
        itself. To legalize here for a GPU, make the GPU the current target.

    Raises
    ------
    ValueError, TypeError
        If the module, the loss and its arguments do not fit each other; the message says how.
    """

    def __init__(
        self,
        loss: relax.training.loss.Loss,
        optimizer: relax.training.optimizer.Optimizer,
        loss_args: Sequence[relax.TensorType],
        legalize: bool = False,
    ):
        if not isinstance(loss_args, (list, tuple)) or not all(
            isinstance(ty, (tvm.ir.Type, relax.Var)) for ty in loss_args
        ):
            raise TypeError(
                "loss_args must be a list of the types that the loss is called with, for "
                "example [relax.TensorType((8, 10), 'float32'), relax.TensorType((8,), "
                f"'int64')]; got {loss_args!r}"
            )
        for name, value, kind in (
            ("loss", loss, relax.training.loss.Loss),
            ("optimizer", optimizer, relax.training.optimizer.Optimizer),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must be a relax.training.{name}.{kind.__name__}, not {value!r}"
                )
        self._loss, self._optimizer = loss, optimizer
        self._loss_args, self._legalize = list(loss_args), legalize

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        param_num, state_num = _checked_counts(mod)
        backbone = mod[_NAMES.BACKBONE_FUNC]
        backbone_loss = append_loss(
            backbone, self._loss(*self._loss_args), self._loss.num_backbone_outputs, state_num
        )
        _check_loss(backbone_loss, state_num)
        input_num = len(backbone.params) - param_num - state_num
        params = list(backbone_loss.params)[input_num : input_num + param_num]
        gradient = Gradient(_NAMES.BACKBONE_LOSS_FUNC, params, target_index=0)
        trained = gradient(  # type: ignore[operator]  # TVM's decorator makes a pass of the class
            with_functions(mod, {_NAMES.BACKBONE_LOSS_FUNC: backbone_loss})
        )
        self._optimizer.init(params)
        mod = with_functions(
            trained,
            {
                _NAMES.BACKBONE_FUNC: _for_inference(mod, backbone),
                _NAMES.OPTIMIZER_FUNC: self._optimizer.get_function(),
            },
        )
        mod = mod.with_attrs({"input_num": input_num, "optim_state": self._optimizer.state})
        return LegalizeOps()(mod) if self._legalize else mod


def append_loss(
    backbone: relax.Function,
    loss: relax.Function,
    num_backbone_outputs: int = 1,
    num_states: int | None = None,
) -> relax.Function:
    """Return the function that runs a backbone and then a loss.

    This extends ``relax.training.AppendLoss``: the backbone and the loss may have any number of
    blocks of any kind, and their symbolic extents may be different variables. The extents of the
    backbone's outputs replace the extents in the loss. Extents that are known in only one of the
    two are checked at run time.

    Parameters
    ----------
    backbone : relax.Function
        Returns a tensor, or a tuple whose first elements are arguments of the loss.
    loss : relax.Function
        Takes the outputs of the backbone and then further parameters, for example the targets.
    num_backbone_outputs : int
        The number of the backbone's outputs that the loss takes.
    num_states : int, optional
        The number of further outputs, counted from the end, to return after the loss; by default
        all.

    Returns
    -------
    function : relax.Function
        Takes the parameters of both. Returns the loss, followed by the kept outputs.

    Raises
    ------
    TypeError
        If the backbone or the loss is not a Relax function, or a number is not an integer.
    ValueError
        If the outputs do not fit the loss, or a number is negative.

    Examples
    --------
    >>> from relax_grad.training import append_loss
    >>> from tvm import relax
    >>> from tvm.relax.training.loss import MSELoss
    >>> kind = relax.TensorType((4,), "float32")
    >>> x = relax.Var("x", kind)
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("backbone", [x]):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sin(x)))
    >>> function = append_loss(bb.get()["backbone"], MSELoss()(kind, kind))
    >>> [param.name for param in function.params]
    ['x', 'targets']
    """
    for name, function in (("backbone", backbone), ("loss", loss)):
        if not isinstance(function, relax.Function):
            raise TypeError(f"{name} must be a Relax function, but it is {function!r}")
    for name, count in (
        ("num_backbone_outputs", num_backbone_outputs),
        ("num_states", 0 if num_states is None else num_states),
    ):
        check_integer(name, count, 0)
    backbone = copy_with_new_vars(backbone)
    result = backbone.body.body
    outputs = tuple_fields(result) if isinstance(result.ty, relax.TupleType) else [result]
    taken, rest = outputs[:num_backbone_outputs], outputs[num_backbone_outputs:]
    if len(taken) < num_backbone_outputs or len(loss.params) < num_backbone_outputs:
        raise ValueError(
            f"the loss takes {num_backbone_outputs} outputs of the backbone, but the backbone "
            f"returns {len(outputs)} and the loss has {len(loss.params)} parameters"
        )
    if num_states is not None:
        if num_states > len(rest):
            raise ValueError(
                f"the backbone must return {num_states} new states after the "
                f"{num_backbone_outputs} outputs that the loss takes, but it returns "
                f"{len(outputs)} elements in all"
            )
        rest = rest[len(rest) - num_states :]
    loss = with_shapes(loss, taken)
    arguments = []
    for param, output in zip(loss.params, taken, strict=False):
        if not isinstance(output.ty, relax.TensorType) or types_differ(output.ty, param.ty):
            raise ValueError(
                f"the backbone returns {output.ty} for the parameter {param.name} of the loss, "
                f"whose type is {param.ty}"
            )
        arguments += bind_param(param, output)
    params = [*backbone.params, *loss.params[num_backbone_outputs:]]
    value = loss.body.body
    body = relax.SeqExpr(
        [*backbone.body.blocks, relax.BindingBlock(arguments), *loss.body.blocks],
        relax.Tuple([value, *rest]) if rest else value,
    )
    return in_dataflow(
        relax.Function(
            params,
            normalized(params, body),
            is_pure=backbone.is_pure and loss.is_pure,
            attrs=backbone.attrs,
        )
    )


def _for_inference(mod: tvm.IRModule, backbone: relax.Function) -> relax.Function:
    """Return the backbone for inference: it and its callees normalise by the running statistics."""
    name = _NAMES.BACKBONE_FUNC
    others = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function) and variable.name_hint != name
    }
    inlined = with_functions(mod, {name: write_out_calls(backbone, others)})
    return DecomposeOpsForInference(name)(inlined)[name]


def _checked_counts(mod: tvm.IRModule) -> tuple[int, int]:
    """Return the numbers of parameters and states of the backbone, or raise if it does not fit a
    trainer."""
    backbone = relax_function(mod, _NAMES.BACKBONE_FUNC)
    if not relax.analysis.check_well_formed(mod):
        raise NotWellFormedError(f"the module of the backbone is not well-formed{diagnosis(mod)}")
    taken = {variable.name_hint for variable in mod.get_global_vars()}
    for name in (_NAMES.BACKBONE_LOSS_FUNC, _NAMES.ADJOINT_FUNC, _NAMES.OPTIMIZER_FUNC):
        if name in taken:
            raise ValueError(f"the module has a function {name} already; SetupTrainer adds it")
    counts = []
    for key, least in (("param_num", 1), ("state_num", 0)):
        value = mod.attrs[key] if mod.attrs is not None and key in mod.attrs else None
        if not isinstance(value, _INTEGERS) or int(value) < least:
            raise ValueError(
                f"the module must have the attribute {key}, an integer of at least {least}, but "
                f"{'it has none' if value is None else f'it is {value!r}'}; set it with "
                "mod.with_attrs({'param_num': ..., 'state_num': ...})"
            )
        counts.append(int(value))
    if sum(counts) > len(backbone.params):
        raise ValueError(
            f"{_NAMES.BACKBONE_FUNC} must take {counts[0]} parameters and {counts[1]} states after "
            f"its inputs, as param_num and state_num say, but it takes {len(backbone.params)} in "
            "all"
        )
    return counts[0], counts[1]


def _check_loss(backbone_loss: relax.Function, state_num: int) -> None:
    """Refuse a loss that is not a floating-point scalar."""
    result = backbone_loss.ret_ty
    value = result.fields[0] if state_num else result
    is_scalar = isinstance(value, relax.TensorType) and value.ndim == 0
    if not is_scalar or not holds_floats(value):
        raise ValueError(
            f"the loss must be a floating-point scalar, but its type is {value}; choose the "
            "reduction 'mean' or 'sum'"
        )
