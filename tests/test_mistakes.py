"""Mistakes of the first hour: each error names what came, what was expected and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Op

import relax_grad
from relax_grad.testing import check_gradients
from relax_grad.training import SGD, AdamW, Trainer, memory_of, train_step

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("safetensors")

from onnx import numpy_helper, parser  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402
from relax_grad.frontend.torch import from_module, wrap  # noqa: E402

from ._more_mistakes import ATTRIBUTES, MORE  # noqa: E402

nn = torch.nn
cross_entropy = nn.functional.cross_entropy
X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


class Fixture:
    """A model, its import, its step and its trainer, and files."""

    def __init__(self, folder):
        self.model = nn.Linear(3, 2)
        self.imported = from_module(self.model, (X,), loss=cross_entropy, targets=(Y,))
        self.step = train_step(self.imported, SGD(lr=0.1))
        self.trainer = Trainer(self.step)
        self.pt, self.text = folder / "w.pt", folder / "notes.txt"
        self.weights, self.state = folder / "w.safetensors", folder / "s.safetensors"
        torch.save(self.model.state_dict(), self.pt)
        self.text.write_text("these are no weights")
        self.imported.save(self.weights)
        self.trainer.save(self.state)
        self.module = function_of(relax.op.sum)
        self.folder, self.onnx, self.empty = folder, folder / "m.onnx", folder / "empty.onnx"
        self.empty.touch()
        onnx.save(onnx_model(), self.onnx)
        self.from_onnx = from_model(self.onnx)
        self.wrapped = wrap(self.model, (X,))

    def fit(self, **options):
        """Train a new trainer for two batches."""
        return Trainer(self.step).fit([(X, Y)] * 2, progress=False, **options)

    def of_onnx(self, loss=None, targets=None):
        return train_step(self.from_onnx, SGD(), loss=loss or onnx_loss, targets=targets)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Fixture(tmp_path_factory.mktemp("mistakes"))


def onnx_model():
    head = '<ir_version: 8, opset_import: ["": 18]>'
    body = "g (float[batch, 3] x) => (float[batch, 2] y) { y = MatMul(x, weight) }"
    model = parser.parse_model(head + body)
    weight = numpy_helper.from_array(np.ones((3, 2), "float32"), "weight")
    model.graph.initializer.append(weight)
    return model


def onnx_loss(bb, scores, labels):
    return bb.emit(relax.op.nn.nll_loss(bb.emit(relax.op.nn.log_softmax(scores)), labels))


def function_of(*operators):
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            value = x
            for operator in operators:
                value = bb.emit(operator(value))
            value = bb.emit_output(value)
        bb.emit_func_output(value)
    return bb.get()


def imported(of=None, **options):
    return from_module(of or nn.Linear(3, 2), (X,), **options)


def of_own_operator(made):
    register = tvm.ir._ffi_api.RegisterOp
    if "my.swish" not in Op.list_op_names():
        register("my.swish", "")
    check_gradients("my.swish", [np.ones((2, 3))])


MISTAKES = {
    "Trainer of an import": (
        lambda m: Trainer(m.imported),
        r"result of train_step, but it is a value of type Imported; write Trainer\(train_step\(imp",
    ),
    "Trainer of a model": (
        lambda m: Trainer(m.model),
        r"write Trainer\(train_step\(from_module\(model, \(x,\), loss=loss, targets=\(y,\)\), Adam",
    ),
    "Trainer of a module": (lambda m: Trainer(m.module), r"write .*module, .*wrt=\[.weight.\]"),
    "fit of a pair": (
        lambda m: m.trainer.fit((X, Y)),
        r"which is one batch: pass \[\(input, target\)\], or a torch.utils.data.DataLoader",
    ),
    "fit of two arguments": (lambda m: m.trainer.fit(X, Y), "which is one batch: pass"),
    "fit of a dict": (
        lambda m: m.trainer.fit({"input": X, "target": Y}),
        "which is one batch: pass",
    ),
    "fit of a dataset": (
        lambda m: m.trainer.fit(torch.utils.data.TensorDataset(X, Y)),
        r"a dataset, which gives single examples: pass torch.utils.data.DataLoader\(dataset, batch",
    ),
    "fit without targets": (
        lambda m: m.trainer.fit([X], progress=False),
        r"needs target too: it takes step\(input, target\), and fit, evaluate a list .* DataLoader",
    ),
    "fit of a generator": (
        lambda m: m.trainer.fit(((X, Y) for _ in range(2)), 9),
        "gives its batches only once",
    ),
    "epochs as text": (lambda m: m.trainer.fit([(X, Y)], "3"), "epochs must be a number of epochs"),
    "a rate as schedule": (
        lambda m: m.trainer.fit([(X, Y)], schedule=0.1),
        "schedule must be a function of the number of the update",
    ),
    "a loader as evaluate": (
        lambda m: m.trainer.fit([(X, Y)], evaluate=[(X, Y)]),
        r"such as lambda trainer: trainer.evaluate\(loader, metrics\), but it is a list with a tup",
    ),
    "a function as callbacks": (
        lambda m: m.trainer.fit([(X, Y)], callbacks=print),
        r"such as \[callback\]",
    ),
    "step of a list": (lambda m: m.trainer.step([X, Y]), r"got a list of 2: write step\(\*batch\)"),
    "step of a tuple": (lambda m: m.trainer.step((X, Y)), r"a tuple of 2: write step\(\*batch\)"),
    "step of a dict": (
        lambda m: m.trainer.step({"input": X, "target": Y}),
        r"mapping of them: write step\(\*\*batch\)",
    ),
    "step of unknown names": (lambda m: m.trainer.step(x=X, y=Y), "no input .* 'x'; it has input"),
    "step with a rate as text": (lambda m: m.trainer.step(X, Y, lr="0.1"), "lr must be a number"),
    "float64 in NumPy": (
        lambda m: m.trainer.step(X.numpy().astype("float64"), Y),
        r'float32, but .* float64: pass input.astype\("float32"\)',
    ),
    "float64 in PyTorch": (
        lambda m: m.trainer.step(X.double(), Y),
        r"pass input.to\(torch.float32\)",
    ),
    "classes as floats": (
        lambda m: m.trainer.step(X, Y.float()),
        r"target must have shape \(4,\) and dtype int64, .*: pass target.to\(torch.int64\)",
    ),
    "classes of another size": (lambda m: m.trainer.step(X, Y[:3]), "input has 4, target has 3"),
    "classes out of range": (
        lambda m: m.trainer.step(X, Y + 5),
        r"target\[0\] is 5, .* from 0 to 1",
    ),
    "one row without a batch": (
        lambda m: m.trainer.predict(X[0]),
        r"has \(3,\) and float32: pass input\[None\] for a batch of one row",
    ),
    "predict with targets": (
        lambda m: m.trainer.predict(X, Y),
        "takes input, without targets, but 2 tensors were given",
    ),
    "predict without averages": (
        lambda m: m.trainer.predict(X, ema=True),
        r"make it with train_step\(..., ema=0.999\)",
    ),
    "evaluate of a pair": (
        lambda m: m.trainer.evaluate((X, Y), {"a": np.mean}),
        "which is one batch: pass",
    ),
    "evaluate without metrics": (lambda m: m.trainer.evaluate([(X, Y)]), "metrics must be given"),
    "no loss": (
        lambda m: train_step(imported(), SGD()),
        r"no loss to differentiate; give one: from_module\(model, \(x,\), loss=",
    ),
    "targets forgotten": (
        lambda m: imported(loss=cross_entropy),
        r"with the output and 0 targets, but it takes input, target: .*, loss=loss, targets=\(y,\)",
    ),
    "targets without a tuple": (
        lambda m: imported(loss=cross_entropy, targets=Y),
        r"such as \(y,\), but it is a tensor of shape \(4,\)",
    ),
    "args without a tuple": (
        lambda m: from_module(m.model, X),
        r"such as \(x,\), but it is a tens",
    ),
    "a class as loss": (
        lambda m: imported(loss=nn.CrossEntropyLoss, targets=(Y,)),
        r"the class CrossEntropyLoss; give an instance: loss=CrossEntropyLoss\(\)",
    ),
    "a value as loss": (
        lambda m: imported(loss=cross_entropy(m.model(X), Y), targets=(Y,)),
        "such as torch.nn.functional.cross_entropy, but it is a tensor",
    ),
    "a class as module": (lambda m: from_module(nn.Linear, (X,)), "but it is the class Linear"),
    "an array as example": (
        lambda m: from_module(m.model, (X.numpy(),)),
        r"input is an array of NumPy; give a tensor: torch.from_numpy\(input\)",
    ),
    "an example in float64": (
        lambda m: from_module(m.model, (X.double(),)),
        "give examples in the dtype of the module",
    ),
    "classes as floats in the example": (
        lambda m: imported(loss=cross_entropy, targets=(Y.float(),)),
        r"classes must be integers: target.long\(\)",
    ),
    "an example of another width": (
        lambda m: from_module(m.model, (torch.ones(4, 5),)),
        r"examples must be arguments that the module takes .* input is a tensor of shape \(4, 5\)",
    ),
    "unknown names of extents": (
        lambda m: imported(dynamic_shapes={"x": {0: "batch"}}),
        "there is no input 'x'; the inputs are input",
    ),
    "unknown parameters": (lambda m: imported(trainable="head.*"), "there are weight, bias"),
    "wrap of a tensor": (lambda m: wrap(m.model, X), r"such as \(x,\), but it is a tensor"),
    "train_step of a model": (
        lambda m: train_step(m.model, SGD()),
        r"write train_step\(from_module\(model, \(x,\), loss=loss, targets=\(y,\)\), optimizer\)",
    ),
    "an optimizer of PyTorch": (
        lambda m: train_step(m.imported, torch.optim.SGD(m.model.parameters())),
        r"of relax_grad.training, such as AdamW\(lr=0.01\)",
    ),
    "a class as optimizer": (lambda m: train_step(m.imported, SGD), "but it is the class SGD"),
    "an optimizer of parameters": (
        lambda m: AdamW(m.model.parameters(), lr=0.1),
        r"gives it the parameters of the model: train_step\(imported, AdamW\(lr=0.01\)\)",
    ),
    "a file of torch.save": (
        lambda m: m.trainer.load(m.pt),
        r"but it is one of torch.save. .* model.load_state_dict\(torch.load\(path\)\)",
    ),
    "weights of torch.save": (lambda m: m.imported.load(m.pt), "but it is one of torch.save"),
    "text as state": (
        lambda m: m.trainer.load(m.text),
        "which Trainer.save writes: it begins with",
    ),
    "weights as state": (lambda m: m.trainer.load(m.weights), r"imported = imported.load\(path\)"),
    "a state as weights": (lambda m: m.imported.load(m.state), r"load it by trainer.load\(path\)"),
    "a trainer as values": (
        lambda m: m.imported.copy_to(m.model, m.trainer),
        "such as trainer.values, but it is Trainer",
    ),
    "copy_to another model": (
        lambda m: m.imported.copy_to(nn.Linear(4, 2)),
        r"weight has shape \(2, 4\) .* in the module, but the value has \(2, 3\)",
    ),
    "a GPU": (lambda m: m.trainer.export(m.pt.parent / "e", target="cuda"), "target must be a CPU"),
    "memory of a trainer": (lambda m: memory_of(m.trainer), r"memory_of\(trainer.train_step\)"),
    "memory of an import": (
        lambda m: memory_of(m.imported),
        "result of train_step, but it is a val",
    ),
    "value_and_grad of an import": (
        lambda m: relax_grad.value_and_grad(m.imported, "loss"),
        "but it is Imported; pass its module: imported.module",
    ),
    "value_and_grad of a function": (
        lambda m: relax_grad.value_and_grad(m.module["main"]),
        r'but it is Function; pass tvm.IRModule\(\{"main": function\}\)',
    ),
    "no such function": (lambda m: relax_grad.value_and_grad(m.module, "f"), "'f'; it has main"),
    "no such parameter": (
        lambda m: relax_grad.value_and_grad(m.module, wrt="w"),
        "main has no parameter 'w'; there are x",
    ),
    "no scalar": (
        lambda m: relax_grad.value_and_grad(function_of(relax.op.exp)),
        "reduce it, for example by relax.op.sum",
    ),
    "the variable of another function": (
        lambda m: relax_grad.transform.Gradient(
            "main", require_grads=function_of(relax.op.exp)["main"].params[0]
        )(m.module),
        "different variable with the name x, so give the name",
    ),
    "an operator without a gradient": (
        lambda m: relax_grad.value_and_grad(function_of(relax.op.nn.relu, unknown, relax.op.sum)),
        "1 binding has no gradient",
    ),
    "check of an operator of one's own": (
        of_own_operator,
        r'no FInferType; register it: tvm.ir.register_op_attr\("my.swish", "FInferType"',
    ),
    "check of a misspelt operator": (
        lambda m: check_gradients("conv2d", [np.ones(3)]),
        "no operator named 'conv2d', .* did you mean relax.nn.conv2d",
    ),
    "check of a function of PyTorch": (
        lambda m: check_gradients(torch.exp, [np.ones(3)]),
        r"must compute with Relax, such as relax.op.exp\(x\)",
    ),
    "an empty ONNX file": (
        lambda m: from_model(m.empty),
        "empty.onnx is no ONNX model with outputs; .* as torch.onnx.export writes",
    ),
    "a file of torch.save as ONNX": (
        lambda m: from_model(m.pt),
        r"w.pt must be an ONNX file, but it is one of torch.save; .*from_module\(model, \(x,\)\)",
    ),
    "a folder as ONNX": (lambda m: from_model(m.folder), "is a folder; give a file, .*onnx"),
    "a PyTorch model as ONNX": (
        lambda m: from_model(m.model),
        r"ModelProto, but it is Linear.*; write relax_grad.frontend.torch.from_module\(model, \(x,",
    ),
    "a path as module": (
        lambda m: from_module(str(m.pt), (X,)),
        r"it is .*w.pt'; make the model, and load its file: model.load_state_dict\(torch",
    ),
    "values as module": (
        lambda m: from_module(m.model.state_dict(), (X,)),
        r"make the model, and load the values: model.load_state_dict\(values\)",
    ),
    "a function as module": (
        lambda m: from_module(lambda x: x, (X,)),
        "make it the forward of a subclass of torch.nn.Module",
    ),
    "a scripted module": (
        lambda m: from_module(torch.jit.script(m.model), (X,)),
        "one of torch.jit; give the module from which torch.jit.script or trace made it",
    ),
    "a name as loss": (
        lambda m: imported(loss="cross_entropy", targets=(Y,)),
        "such as torch.nn.functional.cross_entropy, but it is 'cross_entropy'",
    ),
    "a loss for each row": (
        lambda m: imported(loss=nn.CrossEntropyLoss(reduction="none"), targets=(Y,)),
        r"shape \(4,\) .*; take the mean: loss=lambda \*tensors: loss\(\*tensors\).mean\(\)",
    ),
    "a frozen model": (
        lambda m: train_step(imported(of=nn.ReLU(), loss=torch.mean), SGD()),
        r"no trainable parameter; .* module.requires_grad_\(True\) before from_module",
    ),
    "no targets of an ONNX file": (
        lambda m: m.of_onnx(),
        r"with 0 targets the loss is called with 2 arguments, .*, and targets=",
    ),
    "an array as type of targets": (
        lambda m: m.of_onnx(targets={"labels": Y.numpy()}),
        r'such as \(\("batch",\), "int64"\), but it has an array of shape \(4,\)',
    ),
    "a tuple of targets": (
        lambda m: m.of_onnx(targets=(Y.numpy(),)),
        r'such as {"y": \(\(8,\), "int64"\)}, but it is a tuple with an array',
    ),
    "a loss of PyTorch for an ONNX file": (
        lambda m: m.of_onnx(cross_entropy, {"labels": (("batch",), "int64")}),
        "the loss is a function of torch, .* computes with Relax: lambda bb, output, target: bb.em",
    ),
    "an empty loader": (
        lambda m: m.trainer.fit([], progress=False),
        "the loader gave no batch; a DataLoader with drop_last=True gives none of fewer",
    ),
    "a callback without the trainer": (
        lambda m: m.fit(callbacks=[lambda: None]),
        r"each of callbacks is called with 1 argument, .* such as lambda trainer: print",
    ),
    "an evaluation without the trainer": (
        lambda m: m.fit(evaluate=lambda: {"a": 1.0}),
        r"evaluate is called with 1 argument, .* such as lambda trainer: trainer.evaluate\(loader,",
    ),
    "an evaluation that returns a number": (
        lambda m: m.fit(evaluate=lambda trainer: 0.5),
        r"as lambda trainer: trainer.evaluate\(loader, metrics\) does, but it returns 0.5",
    ),
    "a schedule that returns nothing": (
        lambda m: m.fit(schedule=lambda update: None),
        "schedule must return a number, but it returns None",
    ),
    "a schedule without the update": (
        lambda m: m.fit(schedule=lambda: 0.1),
        "schedule is called with 1 argument, .* such as lambda update: ",
    ),
    "names of metrics": (
        lambda m: m.trainer.evaluate([(X, Y)], ["accuracy"]),
        r'such as {"accuracy": lambda output, target: np.mean\(.*, but it is a list with',
    ),
    "a metric of the output alone": (
        lambda m: m.trainer.evaluate([(X, Y)], {"a": lambda output: 0.0}),
        "metrics: a is called with 2 arguments, .* such as lambda output, target: ...",
    ),
    "a metric that returns an array": (
        lambda m: m.trainer.evaluate([(X, Y)], {"a": lambda output, target: output}),
        r"must return a number, as np.mean\(...\) does, but it returns an array of shape \(4, 2\)",
    ),
    "a metric of PyTorch": (
        lambda m: m.trainer.evaluate([(X, Y)], {"a": lambda o, t: (o.argmax(1) == t).float()}),
        r"gets arrays of NumPy, but .* write np.mean\(...\), or torch.from_numpy\(output\)",
    ),
    "a step without rows": (
        lambda m: m.trainer.step(X[:0], Y[:0]),
        r"the batch has no rows: .*; leave it out, as DataLoader\(..., drop_last=True\) does",
    ),
    "an array of objects": (
        lambda m: m.trainer.step(np.full((4, 3), "a", object), Y),
        r'dtype object: pass input.astype\("float32"\)',
    ),
    "rows of different lengths": (
        lambda m: m.trainer.step([[1.0, 2.0, 3.0], [1.0]], [0, 0]),
        "whose rows must have the same length",
    ),
    "a tensor of another device": (
        lambda m: m.trainer.step(X.to("meta"), Y),
        r"input must be on the CPU, but it is on meta: pass input.cpu\(\)",
    ),
    "predict of a list": (
        lambda m: m.trainer.predict([X]),
        r"has \(1, 4, 3\) and float32: write predict\(x\), and step\(\*batch\), without a list",
    ),
    "predict of a loader": (
        lambda m: m.trainer.predict(torch.utils.data.DataLoader([1])),
        "DataLoader.*; pass one batch: for input, ... in loader: ...",
    ),
    "a folder to save to": (
        lambda m: m.trainer.save(m.folder),
        "is a folder; give a file, such as .*state.safetensors",
    ),
    "a file in no folder": (
        lambda m: m.trainer.save(m.folder / "runs/s.safetensors"),
        r"there is no folder .*runs' for s.safetensors; make it: os.makedirs\(",
    ),
    "a folder to load": (lambda m: m.trainer.load(m.folder), "is a folder; give a file, such as"),
    "a folder for weights": (
        lambda m: m.imported.save(m.folder),
        "is a folder; give a file, such as .*weights.safetensors",
    ),
    "a model as values": (
        lambda m: Trainer(m.step, values=m.model),
        "such as trainer.values, but it is Linear",
    ),
    "unknown values": (
        lambda m: Trainer(m.step, values={"w": X}),
        "the step has no tensor 'w'; there are weight, bias",
    ),
    "an unknown target": (
        lambda m: Trainer(m.step, target="cpu"),
        r"target is 'cpu', which is no target of TVM: .* such as relax_grad.target.host\(\)",
    ),
}


def unknown(x):
    """A call of a tensor function from another library, which has no gradient."""
    return relax.call_dps_packed("other.library", (x,), out_ty=x.ty)


@pytest.mark.parametrize("name", EVERY := MISTAKES | MORE)
def test_the_error_ends_in_the_remedy(made, name, capfd):
    call, words = EVERY[name]
    with pytest.raises(Exception, match=words) as caught:
        call(made)
    assert not isinstance(caught.value, (AttributeError, tvm.error.InternalError))
    assert len(str(caught.value)) < 600
    assert "BlockBuilder destroyed" not in capfd.readouterr().err


def test_each_mistake_is_in_one_table():
    assert len(EVERY) == len(MISTAKES) + len(MORE)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_names_of_other_trainers_lead_to_the_own_ones(made, name):
    with pytest.raises(AttributeError, match=f"{name}.; .*{ATTRIBUTES[name]}"):
        getattr(made.trainer, name)
    assert not hasattr(made.trainer, name)


def test_a_trainer_prints_its_progress(made):
    trainer = Trainer(made.step)
    trainer.fit([(X, Y)] * 2, epochs=2, progress=False)
    assert repr(trainer) == "Trainer(steps: 4; epochs: 2)"


def test_a_compiled_module_is_imported_as_its_module(made):
    compiled = torch.compile(made.model)
    again = from_module(compiled, (X,), loss=cross_entropy, targets=(Y,))
    assert (list(again.inputs), list(again.params)) == (["input"], ["weight", "bias"])
    again.copy_to(compiled, {"weight": np.full((2, 3), 0.5, "float32")})
    assert made.model.weight.eq(0.5).all()
    assert wrap(compiled, (X,))(X).shape == (4, 2)
