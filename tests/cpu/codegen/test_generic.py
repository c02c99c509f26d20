"""Machine code that functions share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from dispatched import HOST
from programs import build, tensor
from tvm import te, tirx
from tvm.relax import op

from relax_grad.cpu.codegen import compile as codegen
from relax_grad.cpu.codegen import compiler as groups
from relax_grad.cpu.codegen import generic, lower
from relax_grad.cpu.codegen.compiler import Compiled, Compiler, unit_of
from relax_grad.cpu.codegen.declarations import Declarations
from relax_grad.cpu.codegen.directory import Directory
from relax_grad.cpu.codegen.entries import linked
from relax_grad.cpu.codegen.objects import UnsupportedObject
from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.target import CPU
from relax_grad.training import AdamW, Trainer, train_step

RNG = np.random.default_rng(0)
TARGET = lower.optimizing(HOST)


def elementwise(name, shape, scale=2.0, dtype="float32"):
    """Return a scheduled function of two tensors of a shape: x * scale + y."""
    x, y = (te.placeholder(shape, dtype, name=name) for name in "xy")
    z = te.compute(shape, lambda *i: x[i] * tirx.const(scale, dtype) + y[i], name="z")
    return scheduled(name, [x, y, z])


def scheduled(name, tensors):
    function = schedule(te.create_prim_func(tensors), CPU.of(HOST))
    return function.with_attr("global_symbol", name)


def classes(*functions):
    """Return the names in each class of functions."""
    named = {str(function.attrs["global_symbol"]): function for function in functions}
    return sorted(sorted(code.values) for code in generic.shared(named))


def compiled(*functions, directory=None):
    """Return a library of functions, and the number of functions in its object files."""
    compiler = Compiler(TARGET, directory, Declarations())
    objects, entries = compiler.compile(functions)
    template = codegen._empty_module(TARGET)
    library = linked(template, objects, entries, codegen._checked(functions))
    return library, len({entry.code for entry in entries.values()})


def call(library, name, shape, dtype="float32"):
    x, y = (RNG.integers(-50, 50, shape).astype(dtype) for _ in range(2))
    z = tvm.runtime.tensor(np.zeros(shape, dtype))
    library[name](tvm.runtime.tensor(x), tvm.runtime.tensor(y), z)
    return x, y, z.numpy()


#: Extents with and without a rest of vectors, of one and of several threads and axes.
SHAPES = [(7,), (64,), (300,), (1021,), (16, 40, 3), (513, 257), (1024, 1024), (2, 3, 5, 7, 11)]


@pytest.mark.parametrize("options", [{}, {"tirx.disable_assert": True}], ids=["checked", "not"])
def test_one_function_for_extents_of_any_rank(options):
    functions = [elementwise(f"f{i}", shape) for i, shape in enumerate(SHAPES)]
    with tvm.transform.PassContext(config=options):
        library, number = compiled(*functions)
    assert number < len(SHAPES) / 2
    for i, shape in enumerate(SHAPES):
        x, y, z = call(library, f"f{i}", shape)
        np.testing.assert_array_equal(z, x * 2 + y)


def test_arguments_are_those_of_the_function():
    library, number = compiled(elementwise("first", (600,)), elementwise("second", (20, 40)))
    assert number == 1
    tensors = [tvm.runtime.tensor(np.zeros(600, "float32"))] * 3
    library["first"](*tensors)
    with pytest.raises(ValueError, match=r"second\(x: Tensor\(\[20, 40\], float32\)"):
        library["second"](*tensors)


def test_what_code_depends_on_is_not_shared():
    """Constants, types, conditions, short loops within loops, and extents that are read from
    tensors."""
    assert classes(elementwise("a", (512,)), elementwise("b", (768,))) == [["a", "b"]]
    for other in (
        elementwise("b", (768,), scale=3.0),
        elementwise("b", (768,), dtype="float64"),
        elementwise("b", (tirx.Var("n", "int64"),)),
    ):
        assert len(classes(elementwise("a", (512,)), other)) == 2

    def of_rows(name, rows, columns):
        x = te.placeholder((rows, columns), "float32", name="x")
        y = te.placeholder((rows,), "float32", name="y")
        z = te.compute(x.shape, lambda i, j: x[i, j] * y[i], name="z")
        return scheduled(name, [x, y, z])

    assert len(classes(of_rows("a", 9, 20), of_rows("b", 9, 24))) == 2
    assert len(classes(of_rows("a", 9, 500), of_rows("b", 7, 700))) == 1

    def of_condition(name, size, limit):
        x = te.placeholder((size,), "float32", name="x")
        z = te.compute(x.shape, lambda i: tirx.if_then_else(i < limit, x[i], 0.0), name="z")
        return scheduled(name, [x, z])

    assert len(classes(of_condition("a", 900, 700), of_condition("b", 900, 800))) == 2


def test_symbolic_extents_of_other_axes_are_not_shared():
    """The bodies of two functions are equal, and a variable is the extent of another axis."""

    def first(name, order):
        n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
        x = te.placeholder(order(n, m), "float32", name="x")
        z = te.compute(
            (512,), lambda i: tirx.Cast("float32", n) + tirx.Cast("float32", i), name="z"
        )
        return te.create_prim_func([x, z]).with_attr("global_symbol", name)

    assert len(classes(first("a", lambda n, m: (n, m)), first("b", lambda n, m: (m, n)))) == 2


def test_numbers_are_kept_in_a_directory(tmp_path):
    functions = [elementwise(f"f{i}", shape) for i, shape in enumerate(SHAPES)]
    directory = Directory(tmp_path)
    compiled(*functions, directory=directory)
    (entry,) = tmp_path.glob("*/*.o")
    library, number = compiled(*functions, directory=directory)  # reads the entry
    assert number < len(SHAPES)
    for i, shape in enumerate(SHAPES):
        x, y, z = call(library, f"f{i}", shape)
        np.testing.assert_array_equal(z, x * 2 + y)
    assert [*tmp_path.glob("*/*.o")] == [entry]


@pytest.mark.parametrize(
    "stored",
    [b"", b"no header", b"[1]\ndata", b'{"f": 1}\n', b'{"g": ["g", []]}'],
)
def test_other_contents_of_a_directory_are_refused(stored):
    with pytest.raises(UnsupportedObject):
        unit_of(Compiled.read(stored + b"\n"), {"f": "f"}, {"f": "label"})


def test_a_training_step_has_the_bits_of_functions_compiled_apart(monkeypatch):
    sizes = [33, 65, 129, 257, 40]
    shapes = {f"w{i}": pair for i, pair in enumerate(itertools.pairwise(sizes))}
    variables = [tensor("x", (4, sizes[0]), "float32")]
    variables += [tensor(name, shape, "float32") for name, shape in shapes.items()]

    def loss(bb, value, *weights):
        for weight in weights:
            value = bb.emit(op.tanh(bb.emit(op.matmul(value, weight))))
        return op.mean(value)

    values = {name: RNG.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    x = RNG.normal(size=(4, sizes[0])).astype("float32")

    module = build(variables, loss)

    def trained():
        step = train_step(module, AdamW(0.1), func_name="main", wrt=list(values))
        trainer = Trainer(step, values=values)
        for _ in range(3):
            trainer.step(x)
        return {name: value.numpy() for name, value in trainer.params.items()}

    found = []
    shared = generic.shared

    def counted(functions):
        found.append((len(functions), len(shared(functions))))
        return shared(functions)

    monkeypatch.setattr(groups, "shared", counted)
    actual = trained()
    assert sum(after for _, after in found) <= sum(before for before, _ in found) - 3

    def apart(functions):
        return [code for name, own in functions.items() for code in shared({name: own})]

    monkeypatch.setattr(groups, "shared", apart)
    for name, value in trained().items():
        np.testing.assert_array_equal(actual[name], value)
