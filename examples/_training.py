"""Turn a network into a program that trains it, and keep its parameters and statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from _compile import compile_module
from _network import CHANNELS, SIZE, Layers, Network, Slot, draw_all
from tvm import relax, tirx
from tvm.relax.training.optimizer import Optimizer

import relax_grad


def loss_module(
    network: Network, batch_size: int, layout: str, dtype: str = "float32"
) -> tuple[tvm.IRModule, Layers]:
    """Build the function ``loss`` and its gradient, ``loss_adjoint``.

    ``loss`` takes images, labels, the parameters and the running statistics, and returns the loss,
    the scores and the new running statistics. relax_grad.value_and_grad adds ``loss_adjoint``,
    which returns these results and then the gradient of the loss with respect to each parameter.

    Returns
    -------
    module : tvm.IRModule
        The module with the two functions.
    layers : Layers
        The parameters and the running statistics, in the order in which the functions take them.
    """
    images = relax.Var("images", relax.TensorType((batch_size, CHANNELS, SIZE, SIZE), dtype))
    labels = relax.Var("labels", relax.TensorType((batch_size,), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("loss"):
        with bb.dataflow():
            layers = Layers(bb, layout, dtype, training=True)
            scores = network.scores(layers, layers.enter(images))
            results = [network.loss(bb, scores, labels), scores, *layers.new_statistics]
            results = [bb.emit_output(result) for result in results]
        parameters = _vars(layers.parameters)
        bb.emit_func_output(
            relax.Tuple(results), [images, labels, *parameters, *_vars(layers.statistics)]
        )
    return relax_grad.value_and_grad(bb.get(), "loss", wrt=parameters), layers


def training_module(
    network: Network, batch_size: int, layout: str, optimizer: Optimizer
) -> tuple[tvm.IRModule, Layers]:
    """Build a whole training step and the prediction as the functions of one module.

    ``train_step`` takes images, labels, and the parameters, running statistics and optimizer state
    as tuples; it returns the loss, the scores and the new tuples. ``predict`` takes images, in any
    number, and the parameters and running statistics one by one, and returns the scores.
    """
    module, layers = loss_module(network, batch_size, layout)
    images, labels = (relax.Var(var.name, var.ty) for var in module["loss"].params[:2])
    parameters = _tuple_var("parameters", layers.parameters)
    statistics = _tuple_var("statistics", layers.statistics)
    bb = relax.BlockBuilder(module)
    adjoint = module.get_global_var("loss_adjoint")
    optimizer.init(_vars(layers.parameters))
    update = bb.add_func(optimizer.get_function(), "update")
    state = relax.Var("optimizer_state", update.ty.params[2])
    with bb.function("train_step", [images, labels, parameters, statistics, state]):
        with bb.dataflow():
            arguments = [images, labels, *_fields(parameters), *_fields(statistics)]
            results = bb.emit(adjoint(*arguments))
            outputs, gradients = _fields(results)
            updated = bb.emit(update(parameters, gradients, state))
            loss, scores, *new_statistics = _fields(outputs)
            new_parameters, new_state = _fields(updated)
            kept = [new_parameters, relax.Tuple(new_statistics), new_state]
            result = bb.emit_output(relax.Tuple([loss, scores, *kept]))
        bb.emit_func_output(result)
    _add_predict(bb, network, layout)
    return relax.transform.DeadCodeElimination(["train_step", "predict"])(bb.get()), layers


def _add_predict(bb: relax.BlockBuilder, network: Network, layout: str) -> None:
    batch_size = tirx.Var("n", "int64")
    images = relax.Var("images", relax.TensorType((batch_size, CHANNELS, SIZE, SIZE), "float32"))
    with bb.function("predict"):
        with bb.dataflow():
            layers = Layers(bb, layout, "float32", training=False)
            scores = bb.emit_output(network.scores(layers, layers.enter(images)))
        kept = [*_vars(layers.parameters), *_vars(layers.statistics)]
        bb.emit_func_output(scores, [images, *kept])


class Trainer:
    """A network in training: the compiled program, and the state that changes from step to step.

    Attributes
    ----------
    parameters, statistics, optimizer_state : list of tvm.runtime.Tensor
        The results of the last step; they stay on the device.
    layers : Layers
        The descriptions of the parameters and running statistics.
    """

    def __init__(
        self,
        network: Network,
        batch_size: int,
        layout: str,
        optimizer: Optimizer,
        target: tvm.target.Target,
        seed: int,
    ):
        module, self.layers = training_module(network, batch_size, layout, optimizer)
        self._machine = compile_module(module, target)
        self._device = tvm.runtime.Device(target.get_target_device_type(), 0)
        self.parameters = self._to_device(draw_all(self.layers.parameters, seed))
        self.statistics = self._to_device(draw_all(self.layers.statistics, seed))
        self.optimizer_state = [tensor.copyto(self._device) for tensor in optimizer.state]

    def step(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
        """Train on one batch; return its loss and its scores from before the update."""
        loss, scores, *kept = self._machine["train_step"](
            *self._to_device([images, labels]),
            self.parameters,
            self.statistics,
            self.optimizer_state,
        )
        self.parameters, self.statistics, self.optimizer_state = map(list, kept)
        return float(loss.numpy()), scores.numpy()

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return the scores of any number of images, normalised by the running statistics."""
        (images,) = self._to_device([images])
        return self._machine["predict"](images, *self.parameters, *self.statistics).numpy()

    def _to_device(self, arrays: Sequence[np.ndarray]) -> list[tvm.runtime.Tensor]:
        return [tvm.runtime.tensor(array, self._device) for array in arrays]


def _vars(slots: Sequence[Slot]) -> list[relax.Var]:
    return [slot.var for slot in slots]


def _tuple_var(name: str, slots: Sequence[Slot]) -> relax.Var:
    return relax.Var(name, relax.TupleType([slot.var.ty for slot in slots]))


def _fields(value: relax.Expr) -> list[relax.Expr]:
    return [relax.TupleGetItem(value, i) for i in range(len(value.ty.fields))]
