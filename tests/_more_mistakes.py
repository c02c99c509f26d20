"""Mistakes of the first hour, for ``tests/test_mistakes.py``: calls with a ``Fixture`` of that
file, and words of their errors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Op

import relax_grad
from relax_grad.distributed import data_parallel
from relax_grad.frontend.onnx import from_model
from relax_grad.frontend.torch import from_exported_program, from_module, wrap
from relax_grad.testing import check_against_torch, check_gradients
from relax_grad.training import SGD, AdamW, Trainer, lora, memory_of, train_step

torch = pytest.importorskip("torch")
nn = torch.nn
cross_entropy = nn.functional.cross_entropy
X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
ONES = [np.ones((2, 3))]


def imported(**options):
    return from_module(nn.Linear(3, 2), (X,), **options)


def with_loss(loss):
    return imported(loss=loss, targets=(Y,))


def of_onnx(made, loss, dtype="int64"):
    """A step of the ONNX model with a loss, and targets of a dtype."""
    return made.of_onnx(loss, {"labels": (("batch",), dtype)})


def of_module(made, **options):
    """A step of the module of Relax, whose function has the name main."""
    return train_step(made.module, SGD(), wrt="x", **options)


def of_rule(name, rule):
    """A check of an operator of one's own with this rule."""
    if name not in Op.list_op_names():
        tvm.ir._ffi_api.RegisterOp(name, "")
        attributes = {
            "FInferType": lambda call, ctx: call.args[0].ty,
            "FPurity": True,
            "FLegalize": lambda bb, call: relax.op.exp(call.args[0]),
            "FPrimalGradient": rule,
        }
        for attribute, value in attributes.items():
            tvm.ir.register_op_attr(name, attribute, value)
    check_gradients(name, ONES)


FRONTEND = {
    "a loss by position": (
        lambda m: from_module(m.model, (X,), cross_entropy),
        "kwargs must be a mapping .*; a loss is given as loss=..., targets=",
    ),
    "examples in a dict": (
        lambda m: from_module(m.model, {"input": X}),
        r"a dict with 'input': a tensor of shape \(4, 3\).*: pass args=\(\), kwargs=",
    ),
    "an unknown keyword argument": (
        lambda m: from_module(m.model, (), {"x": X}),
        r"do not fit Linear.forward\(input\): missing a required argument: 'input'",
    ),
    "a shape as examples": (
        lambda m: from_module(m.model, (4, 3)),
        r"for this shape, pass the tensor \(torch.zeros\(4, 3\),\)",
    ),
    "numbers as an example": (
        lambda m: from_module(m.model, [[1.0, 2.0, 3.0]]),
        r"args\[0\] must be a tensor, but it is a list of numbers; write torch.tensor\(list\)",
    ),
    "parameters as trainable": (
        lambda m: imported(trainable=m.model.parameters()),
        r"trainable must be names .*; names are such as \[name for name, _ in model.named_param",
    ),
    "targets in a dict": (
        lambda m: imported(loss=cross_entropy, targets={"target": Y}),
        r"a dict with 'target': a tensor .*: pass tuple\(targets.values\(\)\)",
    ),
    "a loss that returns a tuple": (
        lambda m: with_loss(lambda output, target: (output.mean(), target)),
        r"it returns a tuple .*; return the loss alone: loss=lambda \*tensors: loss\(\*tensors\)",
    ),
    "a loss that returns a number": (
        lambda m: with_loss(lambda output, target: float(output.mean())),
        r"Leave out float\(\), int\(\) and .item\(\) of tensors",
    ),
    "a loss that returns a constant": (
        lambda m: with_loss(lambda output, target: 0.5),
        r"it returns 0.5; compute it with torch, and leave out float\(\)",
    ),
    "a loss in NumPy": (
        lambda m: with_loss(lambda output, target: np.mean(output.detach().numpy())),
        r"Compute with torch: .numpy\(\) ends the trace",
    ),
    "a number in dynamic_shapes": (
        lambda m: imported(dynamic_shapes={"input": {0: 32}}),
        r'Name the extent in dynamic_shapes, as {0: "batch"}, or fix it by batch=',
    ),
    "a module as exported program": (
        lambda m: from_exported_program(m.model),
        r"it is a module Linear; write from_module\(model, \(x,\)\), or torch.export.export\(",
    ),
    "a path as exported program": (
        lambda m: from_exported_program("m.pt2"),
        r"it is 'm.pt2'; write torch.export.load\(path\)",
    ),
    "weights as ONNX": (
        lambda m: from_model(m.weights),
        "is no ONNX model: .*; give a file that torch.onnx.export or onnx.save writes",
    ),
    "a dtype of PyTorch as type of targets": (
        lambda m: of_onnx(m, lambda bb, y, t: bb.emit(relax.op.sum(y)), torch.int64),
        'and torch.int64: write the dtype as text, such as "int64"',
    ),
    "an ONNX loss in NumPy": (
        lambda m: of_onnx(m, lambda bb, y, t: np.mean(y)),
        r"for an ONNX import it computes with Relax: relax.const\(2.0",
    ),
    "a state_dict to copy to": (
        lambda m: m.imported.copy_to(m.model.state_dict()),
        r"it is a OrderedDict with 'weight': .*; write imported.copy_to\(model, trainer.params\)",
    ),
    "an array for a wrapped module": (
        lambda m: m.wrapped(X.numpy()),
        r"an array of shape \(4, 3\) and dtype float32; write torch.from_numpy\(input\)",
    ),
    "a list for a wrapped module": (
        lambda m: m.wrapped([1.0, 2.0]),
        "the arguments are a list with 1.0, but the examples of wrap are a tensor of shape .*again",
    ),
    "wrap of keyword arguments": (
        lambda m: wrap(m.model, {"input": X}),
        r"such as \(x,\), .*: pass args=\(\), kwargs=",
    ),
}

RELAX = {
    "value_and_grad of a PyTorch model": (
        lambda m: relax_grad.value_and_grad(m.model),
        r"but it is Linear; pass from_module\(model, \(x,\), loss=loss, targets=\(y,\)\).module",
    ),
    "value_and_grad of a program": (
        lambda m: relax_grad.value_and_grad(tvm.compile(m.module, "llvm")),
        "it is VMExecutable; differentiate the module first, and then compile the result",
    ),
    "value_and_grad of a name": (
        lambda m: relax_grad.value_and_grad("main", m.module),
        "it is str; the module comes first, and then the name",
    ),
    "value_and_grad by integers": (
        lambda m: relax_grad.value_and_grad(m.imported.module, "loss", wrt="target"),
        "^wrt: only tensors of floating-point numbers .*; there are input, weight, bias",
    ),
    "a function with another name": (
        lambda m: of_module(m),
        "no function 'loss'; it has main: write func_name=\"main\"",
    ),
    "values forgotten": (
        lambda m: Trainer(of_module(m, func_name="main")),
        'values: x is missing; .*: pass values={"x": array}',
    ),
    "a number without relax.const": (
        lambda m: check_gradients(lambda x: x * 2, ONES),
        r'a number must be a constant of Relax, such as relax.const\(2.0, "float64"\)',
    ),
    "an unknown attribute": (
        lambda m: check_gradients("relax.sum", ONES, dim=1),
        "argument 'dim'; the inputs and attributes are x, axis, keepdims",
    ),
    "an input too few": (
        lambda m: check_gradients("relax.add", ONES),
        "argument: 'x2'; the inputs and attributes are x1, x2",
    ),
    "a shape as input": (
        lambda m: check_gradients("relax.exp", [(2, 3)]),
        r"an input must be an array, such as numpy.ones\(\(2, 3\)\), not a shape",
    ),
    "integers as input": (
        lambda m: check_gradients("relax.exp", [np.ones((2, 3), "int64")]),
        r'^relax.exp requires .* float dtype.*; give floating-point inputs: x.astype\("float64"\)',
    ),
    "an array as inputs": (
        lambda m: check_gradients("relax.exp", np.ones((2, 3))),
        r"it is an array of shape \(2, 3\) and dtype float64: pass \[x\]",
    ),
    "PyTorch's function without the module": (
        lambda m: check_against_torch("relax.sum", ONES, torch.sum),
        "is called with the module torch and the tensors, such as lambda torch, x: torch.exp",
    ),
    "arguments of check_against_torch in another order": (
        lambda m: check_against_torch("relax.exp", torch.exp, ONES),
        r"callable, such as lambda torch, x: torch.exp\(x\), but it is a list with an array",
    ),
    "a rule of a misspelt operator": (
        lambda m: relax_grad.register_gradient("relax.expp")(print),
        "no operator named 'relax.expp'; did you mean relax.exp",
    ),
    "a rule before the operator": (
        lambda m: relax_grad.register_gradient("company.zzz")(print),
        r'register an operator of yours first: tvm.ir._ffi_api.RegisterOp\("company.zzz", ""\)',
    ),
    "a rule of two parameters": (
        lambda m: of_rule("my.pair", lambda x, output_grad: [output_grad]),
        "gradient of my.pair, binding .* takes 2 positional arguments but 4 were given",
    ),
    "a rule that returns an expression": (
        lambda m: of_rule("my.bare", lambda var, call, output_grad, ctx: output_grad),
        "the rule must return a list of 1 expression, one for each argument, but it returned",
    ),
}

TRAINING = {
    "groups of parameters as in PyTorch": (
        lambda m: train_step(m.imported, [{"params": m.model.parameters(), "lr": 0.1}]),
        r'groups have patterns: {"\*.bias": AdamW\(weight_decay=0.0\), ',
    ),
    "a loss for the step of an import": (
        lambda m: train_step(m.imported, SGD(), loss=cross_entropy),
        r"pass them to the import: from_module\(model, \(x,\), loss=loss, targets=\(y,\)\)",
    ),
    "a dtype as precision": (
        lambda m: train_step(m.imported, SGD(), precision=torch.bfloat16),
        'it is torch.bfloat16: write precision="bf16"',
    ),
    "a path as model": (
        lambda m: train_step(str(m.onnx), SGD()),
        r"import the file first, such as from_model\(path\)",
    ),
    "Trainer of a model and an optimizer": (
        lambda m: Trainer(m.model, AdamW()),
        r"Trainer takes one step, .*; write Trainer\(train_step\(from_module\(model",
    ),
    "options of another compiler": (
        lambda m: Trainer(m.step, compile_options={"opt_level": 3}),
        "must be arguments of tvm.compile, but one is 'opt_level'; there are relax_pipeline",
    ),
    "a path as values": (
        lambda m: Trainer(m.step, values=str(m.weights)),
        r"read the file: safetensors.numpy.load_file\(path\), or trainer.load\(path\)",
    ),
    "values in float64": (
        lambda m: Trainer(m.step, values={"weight": np.ones((2, 3))}),
        r'but it has \(2, 3\) and float64: pass weight.astype\("float32"\)',
    ),
    "one-hot classes": (
        lambda m: m.trainer.step(X, nn.functional.one_hot(Y, 2)),
        r"\(4, 2\) and int64: pass target.argmax\(1\), if its rows are one-hot",
    ),
    "a column of classes": (
        lambda m: m.trainer.step(X, Y[:, None]),
        r"\(4, 1\) and int64: pass target\[:, 0\]",
    ),
    "a path as loader": (
        lambda m: m.trainer.fit("train.csv"),
        r"it is 'train.csv'; read the file to arrays first, such as numpy.loadtxt\(path, delim",
    ),
    "a class as loader": (
        lambda m: m.trainer.fit(torch.utils.data.DataLoader),
        r"the class DataLoader; make one: DataLoader\(dataset, batch_size=32\)",
    ),
    "a function as loader": (
        lambda m: m.trainer.fit(lambda: [(X, Y)]),
        r"pass what it returns, loader=function\(\)",
    ),
    "an optimizer as schedule": (
        lambda m: m.trainer.fit([(X, Y)], schedule=torch.optim.SGD(m.model.parameters())),
        "a scheduler of torch.optim.lr_scheduler, but it is a value of type SGD",
    ),
    "a name as progress": (
        lambda m: m.trainer.fit([(X, Y)], progress="bar"),
        "progress must be True or False, but it is 'bar'",
    ),
    "a monitor without evaluate": (
        lambda m: m.trainer.fit([(X, Y)], monitor="accuracy"),
        r"needs evaluate, .*, such as evaluate=lambda trainer: trainer.evaluate\(loader, metrics",
    ),
    "a tensor in more": (
        lambda m: m.trainer.save(m.folder / "a.safetensors", {"best": X}),
        r"more\['best'\] is a tensor of shape \(4, 3\) .*: pass more\['best'\].tolist\(\)",
    ),
    "text as more": (
        lambda m: m.trainer.save(m.folder / "a.safetensors", "best"),
        'more must be values by their names, such as {"note": "a text"}, but it is',
    ),
    "a number as path": (lambda m: m.trainer.save(3), "path must be a path, such as .*it is 3"),
    "a state_dict to load": (
        lambda m: m.trainer.load(m.model.state_dict()),
        r"path must be a path, .*; Trainer\(step, values=values\) takes values by their names",
    ),
    "an empty state": (
        lambda m: m.trainer.load(m.empty),
        "empty.onnx is damaged: it is empty; Trainer.save writes such files",
    ),
    "the name of a target": (
        lambda m: m.trainer.export(m.folder / "e", target="wasm"),
        r"target is 'wasm', which is no target of TVM: .*, arm\(\"cortex-a72\"\) or wasm\(\)",
    ),
    "a target without a call": (
        lambda m: m.trainer.export(m.folder / "e", target=relax_grad.target.wasm),
        r"no target of TVM: .*; call it: wasm\(\)",
    ),
    "memory of a symbolic batch": (
        lambda m: memory_of(
            train_step(imported(loss=torch.mean, dynamic_shapes={"input": {0: "n"}}), SGD())
        ),
        'upper bound of n is missing; .*: pass extents={"n": 32}',
    ),
    "adapters of a PyTorch model": (
        lambda m: lora(m.model, 2, "weight"),
        r"write lora\(from_module\(model, \(x,\), loss=loss, targets=\(y,\)\), rank, targets\)",
    ),
    "adapters twice": (
        lambda m: lora(lora(m.imported, 1, "weight"), 1, "weight"),
        "it has adapters already: give all targets to one call of lora",
    ),
    "a trainer to merge": (
        lambda m: lora(m.imported, 1, "weight").merged(m.trainer),
        "values must be the parameters of the adapters .*; write trainer.params",
    ),
    "adapters of a step": (
        lambda m: lora(m.step, 2, "weight"),
        r"value of type TrainStep; write train_step\(lora\(imported, rank, targets\), optimizer\)",
    ),
    "a number as session": (
        lambda m: data_parallel(m.step, 2),
        r"session, but it is 2; write with session\(2\) as workers: ..., and pass workers",
    ),
    "two arguments of a wrapped module": (
        lambda m: m.wrapped(X, X),
        r"the wrapped module takes the arguments of its examples, \(input\): too many positional",
    ),
    "rows of a wrapped module": (
        lambda m: m.wrapped(X[:2]),
        r"has shape \(2, 3\) .* or wrap the module again \(dynamic_shapes makes extents symbolic",
    ),
}

MORE = {**FRONTEND, **RELAX, **TRAINING}

#: Attributes that trainers of other libraries have, and words of the errors.
ATTRIBUTES = {
    "state_dict": r"trainer.save\(path\) writes a state",
    "load_state_dict": r"write trainer.load\(path\)",
    "parameters": "trainer.params has copies",
    "train": r"write trainer.fit\(loader, epochs=3\)",
    "eval": r"trainer.predict\(x\) computes in evaluation mode",
    "model": r"imported.copy_to\(model, trainer.params\)",
    "zero_grad": r"trainer.step\(\*batch\) computes the gradients",
}
