"""Training with relax.training, through the differentiation pass of relax_grad."""

from __future__ import annotations

import tvm
import tvm.relax.training
from tvm import relax
from tvm.relax.transform import DecomposeOpsForInference, LegalizeOps

from ._compat import types_differ
from .transform import Gradient
from .transform._forward import with_shapes


@tvm.transform.module_pass(opt_level=0, name="relax_grad.SetupTrainer")
class SetupTrainer:
    """Transform a backbone module to a complete trainer module, as ``relax.training.SetupTrainer`` does.

    The interface is that of TVM's pass; the module can be handed to ``relax.training.Trainer``. What
    differs is how the loss is differentiated:

    - by :class:`relax_grad.transform.Gradient`, with what it takes: a symbolic batch, for example;
    - without decomposing operators first, so that ``batch_norm`` follows its attribute ``training`` and
      normalisations over any axes are right.

    Parameters
    ----------
    loss : relax.training.loss.Loss
        The loss function, which is appended to the backbone.
    optimizer : relax.training.optimizer.Optimizer
        The optimizer.
    loss_args : list[relax.TensorType]
        The types that the loss function is called with.
    legalize : bool
        Whether to legalize the module.
    """

    def __init__(
        self,
        loss: relax.training.loss.Loss,
        optimizer: relax.training.optimizer.Optimizer,
        loss_args: list[relax.TensorType],
        legalize: bool = True,
    ):
        self._loss, self._optimizer = loss, optimizer
        self._loss_args, self._legalize = loss_args, legalize
        self._stock = relax.training.SetupTrainer(loss, optimizer, loss_args, legalize)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        stock = self._stock  # its checks, and the names of functions and attributes
        stock._check_well_formed(mod)
        backbone_loss = append_loss(
            mod[stock.BACKBONE_FUNC],
            self._loss(*self._loss_args),
            self._loss.num_backbone_outputs,
        )
        mod = tvm.IRModule(
            dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos
        )
        mod[stock.BACKBONE_LOSS_FUNC] = backbone_loss.with_attr(
            "global_symbol", stock.BACKBONE_LOSS_FUNC
        )
        param_num, state_num = (
            int(mod.attrs[key]) for key in (stock.PARAM_NUM_ATTR_KEY, stock.STATE_NUM_ATTR_KEY)
        )
        params = list(mod[stock.BACKBONE_LOSS_FUNC].params)
        input_num = len(mod[stock.BACKBONE_FUNC].params) - param_num - state_num
        params = params[input_num : input_num + param_num]
        mod = DecomposeOpsForInference(stock.BACKBONE_FUNC)(mod)
        mod = Gradient(stock.BACKBONE_LOSS_FUNC, params, target_index=0)(mod)
        self._optimizer.init(params)
        mod[stock.OPTIMIZER_FUNC] = self._optimizer.get_function().with_attr(
            "global_symbol", stock.OPTIMIZER_FUNC
        )
        mod = mod.with_attrs({"input_num": input_num, "optim_state": self._optimizer.state})
        return LegalizeOps()(mod) if self._legalize else mod


def append_loss(
    backbone: relax.Function, loss: relax.Function, num_backbone_outputs: int = 1
) -> relax.Function:
    """Return the function that runs a backbone and then a loss.

    As ``relax.training.AppendLoss`` does, but symbolic extents of the two need not be the same variables:
    those of the loss become what the backbone's outputs have in their place.

    Parameters
    ----------
    backbone : relax.Function
        Returns a tensor, or a tuple whose first elements go into the loss.
    loss : relax.Function
        Takes the outputs of the backbone and then parameters of its own, the targets for example.
    num_backbone_outputs : int
        How many of the backbone's outputs the loss takes.

    Returns
    -------
    function : relax.Function
        Takes the parameters of both; returns the loss, followed by the outputs that the loss does not
        take.

    Raises
    ------
    ValueError
        If the outputs do not fit the loss.
    """
    backbone = relax.utils.copy_with_new_vars(backbone)
    result = backbone.body.body
    outputs = list(result.fields) if isinstance(result, relax.Tuple) else [result]
    taken, rest = outputs[:num_backbone_outputs], outputs[num_backbone_outputs:]
    if len(taken) < num_backbone_outputs or len(loss.params) < num_backbone_outputs:
        raise ValueError(
            f"the loss takes {num_backbone_outputs} outputs of the backbone, but the backbone returns "
            f"{len(outputs)} and the loss has {len(loss.params)} parameters"
        )
    loss = with_shapes(loss, taken)
    arguments = []
    for param, output in zip(loss.params, taken, strict=False):
        if not isinstance(output.ty, relax.TensorType) or types_differ(output.ty, param.ty):
            raise ValueError(
                f"the backbone returns {output.ty} for the parameter {param.name} of the loss, whose type "
                f"is {param.ty}"
            )
        arguments.append(relax.VarBinding(param, output))
    params = [*backbone.params, *loss.params[num_backbone_outputs:]]
    blocks = [*backbone.body.blocks, relax.BindingBlock(arguments), *loss.body.blocks]
    value = loss.body.body
    body = relax.SeqExpr(blocks, relax.Tuple([value, *rest]) if rest else value)
    bb = relax.BlockBuilder()
    bb.begin_scope(params)
    body = bb.normalize(body)
    bb.end_scope()
    return relax.Function(params, body)
