"""The import of an ONNX model, and its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from ..._packages import is_usable, load
from ..._progress import shown
from ..._validation import check_integer
from ...ir.module import unused, with_functions
from ...ir.summary import summary
from ...training import Trainer
from ...transform import FuseAttention
from .._arguments import Trainable, check_trainable
from .._batch import BATCH, Batch, first_extent
from .._explanation import Explanation
from ._arguments import (
    DynamicShapes,
    Origin,
    Shapes,
    check_constants,
    check_dynamic_shapes,
    check_shapes,
    check_tied,
)
from ._loss import Targets, loss_of, results_of
from ._selection import chosen, explained, wanted

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from ._convert import Prepared


@dataclass(frozen=True)
class Imported:
    """An imported model.

    The parameters of ``main`` and of ``loss`` are in the order of the attributes: inputs,
    parameters, frozen parameters, states. If the model draws random numbers, the seed comes before
    them.

    Attributes
    ----------
    module : tvm.IRModule
        With ``main(*inputs, *params, *frozen, *states)``, which returns the outputs of the model
        and then the new states: a tuple, unless there is only one tensor. If the model draws random
        numbers, it is ``main(seed, *inputs, ...)``. Its attribute ``num_input`` is the number of
        inputs, including the seed. If ``main`` computes in training mode, with dropout or with
        statistics of the batch, ``inference(*inputs, *params, *frozen, *states)`` computes the
        outputs in inference.
    inputs : dict[str, relax.TensorType]
        The inputs of the model with their types.
    outputs : dict[str, relax.TensorType]
        The outputs of the model with their types, without the states.
    params : dict[str, tvm.runtime.Tensor]
        The trainable parameters: the initial values by the names of the initializers.
    frozen : dict[str, tvm.runtime.Tensor]
        The other floating-point tensors: weights that are not trained, tables of the program, and
        the running statistics of normalisations in inference.
    states : dict[str, tvm.runtime.Tensor]
        The running statistics of normalisations in training, which each call returns anew.
    draws : bool
        Whether the model draws random numbers: it has dropout in training mode. The seed is an
        int64 tensor of shape (). Calls with the same seed drop the same elements.
    """

    module: tvm.IRModule
    inputs: dict[str, relax.TensorType]
    outputs: dict[str, relax.TensorType]
    params: dict[str, tvm.runtime.Tensor]
    frozen: dict[str, tvm.runtime.Tensor]
    states: dict[str, tvm.runtime.Tensor]
    draws: bool = False
    _explanation: Explanation = field(default_factory=Explanation, repr=False)
    _origin: Origin | None = field(default=None, repr=False)
    _batch: Batch | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        types = {"inputs": self.inputs, "outputs": self.outputs}
        counts = {"params": self.params, "frozen": self.frozen, "states": self.states}
        return summary("Imported", types, counts)

    def explain(self) -> Explanation:
        """Return whether each floating-point constant of the model is trained, and why.

        Returns
        -------
        explanation : dict[str, Role]
            By the names of the constants, each with ``kind`` and ``reason``. The kind is
            ``"trained"``, ``"frozen"``, ``"state"`` (a running statistic that training updates), or
            ``"constant"``: a frozen number, or a shape, a bound or a scale, that is part of the
            program. As text, it is a table with a line for each constant, and for the numbers of
            rows that a :class:`relax_grad.training.Trainer` takes, if the model has one number.

        Examples
        --------
        >>> import numpy as np
        >>> from onnx import TensorProto, helper, numpy_helper
        >>> from relax_grad.frontend.onnx import from_model
        >>> values = {"w": np.ones((4, 3), "float32"), "eps": np.array(1e-6, "float32")}
        >>> graph = helper.make_graph(
        ...     [
        ...         helper.make_node("MatMul", ["x", "w"], ["h"]),
        ...         helper.make_node("Add", ["h", "eps"], ["y"]),
        ...     ],
        ...     "graph",
        ...     [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        ...     [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        ...     [numpy_helper.from_array(value, name) for name, value in values.items()],
        ... )
        >>> opsets = [helper.make_opsetid("", 17)]
        >>> model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        >>> print(from_model(model).explain())
        w    trained   it is a weight of the MatMul h
        eps  constant  it has the name of a constant table or setting
        """
        explanation = Explanation(self._explanation)
        explanation._rows = self._batch or ""
        return explanation

    def write_to(
        self,
        path: str | os.PathLike,
        values: Trainer | Mapping[str, object],
        *,
        ema: bool | Mapping[str, object] = False,
        inference: bool = False,
    ) -> None:
        """Write the file of the model with other values of its weights and running statistics.

        Everything else is as in the model that was imported, which is read again: a path, bytes or
        a ``ModelProto`` must be as they were. The values replace the model's: in
        initializers, in ``Constant`` nodes and in branches. If the model has external data, or is
        larger than 2 GB, large tensors stand in a second file, with ``.data`` at the end of its
        name.

        Parameters
        ----------
        path : str or os.PathLike
            The file. It is complete or as it was, also after a crash, if it has no second file.
        values : Trainer or Mapping[str, array or tensor]
            The trainer whose parameters and states are written; or values by the names of the
            import, such as ``trainer.values`` or ``lora.merged(trainer.params)``. Other tensors
            keep their values.
        ema : bool or Mapping[str, array or tensor]
            Whether to write the trainer's moving averages of the parameters; or these averages by
            the names of the parameters or of the optimizer's state, such as
            ``trainer.optimizer_state``.
        inference : bool
            Whether normalisation by the statistics of a batch and dropout are set to inference.

        Raises
        ------
        ValueError
            If a name is unknown, a value has another shape, there are no averages, or the model has
            changed.
        TypeError
            If an argument has another type.

        Examples
        --------
        >>> import numpy as np
        >>> import tempfile
        >>> from onnx import TensorProto, helper, numpy_helper
        >>> from relax_grad.frontend.onnx import from_model
        >>> graph = helper.make_graph(
        ...     [helper.make_node("MatMul", ["x", "w"], ["y"])],
        ...     "graph",
        ...     [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        ...     [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        ...     [numpy_helper.from_array(np.ones((4, 3), "float32"), "w")],
        ... )
        >>> opsets = [helper.make_opsetid("", 17)]
        >>> model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        >>> imported = from_model(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     imported.write_to(f"{folder}/trained.onnx", {"w": np.zeros((4, 3), "float32")})
        ...     float(from_model(f"{folder}/trained.onnx").params["w"].numpy().max())
        0.0
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a path, but it is {path!r}")
        if not isinstance(inference, bool):
            raise TypeError(f"inference must be True or False, but it is {inference!r}")
        from . import _write

        places = {} if self._origin is None else dict(self._origin.places)
        source = None if self._origin is None else self._origin.model
        old = {**self.params, **self.frozen, **self.states}
        arrays = {
            name: _write.array_of(name, value, old.get(name), places)
            for name, value in _write.given_values(values, ema).items()
        }
        for copy in () if self._origin is None else self._origin.copies:
            if copy.original in arrays:
                value = arrays[copy.original]
                arrays[copy.name] = value.T if copy.is_transposed else value
                places[copy.name] = copy.place
        _write.write(source, path, arrays, places, inference)

    @property
    def values(self) -> list[tvm.runtime.Tensor]:
        """The arguments of ``main`` after the inputs: the values of parameters, frozen parameters
        and states."""
        return [*self.params.values(), *self.frozen.values(), *self.states.values()]

    def with_loss(
        self,
        loss_fn: Callable[..., relax.Expr],
        targets: Targets | None = None,
    ) -> tvm.IRModule:
        """Return the module with a function ``loss`` that runs the model and then a loss.

        Parameters
        ----------
        loss_fn : Callable
            ``loss_fn(bb, *outputs, *targets)`` builds the loss with the block builder and returns
            it: a tensor of one element without axes.
        targets : Mapping, optional
            The type of each target by its name: a type, or a shape and a dtype. A string in the
            shape is an extent of the model of that name, such as ``(("batch",), "int64")``.

        Returns
        -------
        module : tvm.IRModule
            With ``loss(*inputs, *targets, *params, *frozen, *states)``, which returns the loss; for
            a model with states, a tuple of the loss and the new states. If the model draws random
            numbers, the seed comes first. ``relax_grad.value_and_grad(module, "loss",
            wrt=list(imported.params))`` differentiates it.

        Raises
        ------
        ValueError
            If a target has the name of another parameter, or a shape has an unknown symbol.
        TypeError
            If ``loss_fn`` is no function, or returns something other than an expression, or
            ``targets`` is no mapping from names to types.
        """
        loss = self._loss("main", loss_fn, targets)
        return with_functions(self.module, {"loss": loss})

    def _with_losses(
        self, loss_fn: Callable[..., relax.Expr], targets: Targets | None
    ) -> tvm.IRModule:
        """Return the module with ``loss``, which returns the loss, the outputs and the new states.

        If the module has ``inference``, it gets ``inference_loss``, which returns the loss in
        evaluation mode.
        """
        functions = {"loss": self._loss("main", loss_fn, targets, True)}
        if self._infers:
            functions["inference_loss"] = self._loss("inference", loss_fn, targets)
        return with_functions(self.module, functions)

    def _loss(
        self, name: str, loss_fn: Callable, targets: Targets | None, returns_outputs: bool = False
    ) -> relax.Function:
        """Return the function that runs a function of the module and then a loss."""
        return loss_of(self.module[name], list(self.outputs), loss_fn, targets, returns_outputs)

    @property
    def _infers(self) -> bool:
        """Whether the module has a function for inference beside ``main``."""
        return any(variable.name_hint == "inference" for variable in self.module.get_global_vars())


def from_model(
    model: str | os.PathLike | bytes | onnx.ModelProto,
    *,
    trainable: Trainable | None = None,
    batch: int | None = None,
    shapes: Shapes | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    constants: Mapping[str, np.typing.ArrayLike] | None = None,
    dropout: bool = True,
    tied: bool | Mapping[str, str] = True,
    simplify: bool | str = "auto",
) -> Imported:
    """Import an ONNX model to train it.

    TVM's importer translates the operators. The weights become parameters under the names of the
    initializers; a weight in a ``Constant`` node has the name of the node's result. Trained by
    default are the tensors that a training framework makes parameters: the weights and biases of
    layers by their use, and others by their names. :meth:`Imported.explain` lists all tensors with
    the reasons. Other tensors are frozen parameters. Numbers, shapes, bounds, axes and integers
    stay constants. Values that depend only on the shapes of the inputs are computed before the
    import.

    Parameters
    ----------
    model : str or os.PathLike or bytes or onnx.ModelProto
        The model, or the file that holds it.
    trainable : str or Sequence[str] or Callable, optional
        The tensors to train. A name selects any floating-point tensor of :meth:`Imported.explain`
        that is no setting and no running statistic. A pattern such as ``"head.*"`` selects among
        those that are trained by default or, if it matches none of them, among the others. A
        function of the name returns whether to train a tensor that is trained by default.
    batch : int, optional
        The number of rows of each batch: the first axis of the inputs, instead of that in the
        model. By default a :class:`relax_grad.training.Trainer` takes batches of any size if the
        model does. Its step for the model's own number is the fastest. The first batch of another
        size imports and compiles a step for all other sizes.
    shapes : Mapping[str, Sequence[int or str]], optional
        The shapes of inputs, which replace the shapes in the model. A string is a symbol.
    dynamic_shapes : Mapping[str, Mapping[int, str]], optional
        Symbols for axes of inputs, such as ``{"x": {0: "batch"}}``. Other axes keep the model's
        extent or symbol.
    constants : Mapping[str, array_like], optional
        Values of inputs that are fixed, such as a sampling rate that selects a branch. They are no
        parameters.
    dropout : bool
        Whether nodes of dropout in training mode drop random elements, by a seed that is the first
        parameter of ``main``. If False, they are imported as the identity.
    tied : bool or Mapping[str, str]
        Whether a weight that the exporter stores a second time, maybe transposed, is one parameter:
        PyTorch's newer exporter names the parameter at the nodes that take the copy. A mapping
        names the copies and their originals instead. :meth:`Imported.explain` tells of weights with
        equal values.
    simplify : bool or str
        Whether the package ``onnxsim`` simplifies the model: always, never, or ``"auto"``, where
        TVM cannot import it otherwise and the package is installed.

    Returns
    -------
    imported : Imported
        The module and the values of its parameters.

    Raises
    ------
    ImportError
        If ``onnx`` is not installed, or ``onnxsim`` is not and ``simplify`` is True.
    UnsupportedOperatorError
        If TVM has no converter for operators of the model, all of which are listed, or a node has a
        form that would be imported with another meaning.
    TypeError
        If an argument has another type.
    ValueError
        If an argument does not fit the model, or TVM cannot import a node.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import numpy_helper, parser
    >>> from relax_grad.frontend.onnx import from_model
    >>> head = '<ir_version: 8, opset_import: ["": 18]>'
    >>> body = "g (float[batch, 3] x) => (float[batch, 2] y) { y = MatMul(x, weight) }"
    >>> model = parser.parse_model(head + body)
    >>> weight = numpy_helper.from_array(np.ones((3, 2), "float32"), "weight")
    >>> model.graph.initializer.extend([weight])
    >>> from_model(model)
    Imported(inputs: x (batch, 3) float32; outputs: y (batch, 2) float32; params: 1)
    """
    load("onnx", "relax_grad.frontend.onnx.from_model")
    if simplify not in (True, False, "auto"):
        raise ValueError(f'simplify must be True, False or "auto", but it is {simplify!r}')
    if not isinstance(dropout, bool):
        raise TypeError(f"dropout must be True or False, but it is {dropout!r}")
    check_trainable(trainable)
    check_shapes(shapes)
    check_dynamic_shapes(dynamic_shapes)
    check_constants(constants)
    check_tied(tied)
    if simplify is True:
        load("onnxsim", "simplify=True")
    if batch is not None:
        batch = check_integer("batch", batch, 1)
        if dynamic_shapes is not None:
            raise ValueError("batch fixes the number of rows and dynamic_shapes frees it; give one")
    from . import _convert

    prepare = partial(
        _convert.prepare, model, shapes, dynamic_shapes, constants, dropout, tied, wanted(trainable)
    )

    def again(rows: int | str | None) -> Imported:
        return _imported(prepare(rows), model, trainable, simplify)

    with shown("importing the model"):
        imported = again(batch)
    if dynamic_shapes is not None:
        return imported
    return replace(imported, _batch=_batch_of(imported, batch, partial(again, BATCH)))


def _batch_of(imported: Imported, batch: int | None, again: Callable[[], Imported]) -> Batch | None:
    """Return the numbers of rows that an import takes; None if it has a symbol for them."""
    firsts = [ty for ty in imported.inputs.values() if ty.ndim]
    rows = first_extent(firsts[0]) if firsts else None
    if rows is None:
        return None
    how = "from_model(model, batch={rows})"
    if batch is not None:
        return Batch(rows, imported, None, how, f"batch={batch} fixes it")
    return Batch(rows, imported, again, how)


def _imported(
    prepared: Prepared, model: object, trainable: Trainable | None, simplify: bool | str
) -> Imported:
    """Return the import of a model that is prepared."""
    roles = prepared.roles
    params = chosen(trainable, roles)
    others = [*roles.weights, *roles.frozen, *roles.statistics]
    others = [name for name in others if name not in params]
    frozen = [name for name in others if name not in roles.states]
    groups = (params, frozen, list(roles.states))
    names = [name for group in groups for name in group]
    inference = prepared.in_inference()
    values, places = prepared.values_of(names), prepared.places
    kinds = {
        tensor.name: (tensor.data_type, list(tensor.dims))
        for tensor in prepared.model.graph.initializer
    }
    prepared.lift(names, roles.states)
    has_onnxsim = is_usable("onnxsim")
    module, draws = prepared.imported(simplify, has_onnxsim)
    count = len(module["main"].params) - len(values)
    main = module["main"].with_attr("num_input", count)
    module = with_functions(module, {"main": main})
    if inference is not None:
        inference.lift(names, {}, kinds)
        other, _ = inference.imported(simplify, has_onnxsim)
        module = _with_inference(module, other, len(values))
    trained, untrained, states = ({name: values[name] for name in group} for group in groups)
    return Imported(
        FuseAttention()(module),
        {param.name: param.ty for param in main.params[draws:count]},
        {name: result.ty for name, result in zip(prepared.outputs, results_of(main), strict=False)},
        params=trained,
        frozen=untrained,
        states=states,
        draws=draws,
        _explanation=explained(roles, params, trainable),
        _origin=Origin(model, {name: places[name] for name in names}, prepared.copies),
    )


def _with_inference(module: tvm.IRModule, other: tvm.IRModule, num_values: int) -> tvm.IRModule:
    """Return a module with the function ``main`` of another one as ``inference``, and with the
    functions that it calls."""
    taken = {global_var.name_hint for global_var in module.get_global_vars()}
    main = other["main"]
    main = main.with_attr("num_input", len(main.params) - num_values)
    called = {
        global_var: global_var
        for global_var in other.get_global_vars()
        if global_var.name_hint != "main"
    }
    for global_var in called:
        name = unused(global_var.name_hint, taken)
        taken.add(name)
        called[global_var] = GlobalVar(name)

    def renamed(variable: object) -> object:
        return called.get(variable, variable)

    main = tvm_ffi.structural_map(main, ((GlobalVar,), renamed), order="pre") if called else main
    functions = dict(module.functions_items())
    functions[GlobalVar("inference")] = main.with_attr("global_symbol", "inference")
    for global_var, new in called.items():
        functions[new] = other[global_var].with_attr("global_symbol", new.name_hint)
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)
