"""Argument checks of compiled functions: they accept and refuse the same arguments as TVM's own
checks."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST
from tvm import te, tirx
from tvm.script import from_source

from relax_grad.cpu.codegen import compile as codegen
from relax_grad.cpu.codegen import lower
from relax_grad.cpu.codegen.arguments import Parameter, parameters
from relax_grad.cpu.codegen.compiler import Compiler
from relax_grad.cpu.codegen.declarations import Declarations

RNG = np.random.default_rng(0)

#: Signatures of functions: the shape and dtype of each parameter.
SIGNATURES = [
    [((3, 5), "float32"), ((3, 5), "float32")],
    [((), "float64"), ((4,), "int8"), ((2, 1, 3), "bool")],
    [((1, 7, 1), "int64"), ((0, 3), "float32"), ((2, 3, 4, 2), "uint8")],
    [((6,), "float16"), ((6,), "bfloat16")],
]


def function(signature, name="function"):
    """Return a function that takes tensors and writes 1 to each element of the last one."""
    params = [
        te.placeholder(shape, dtype, name=f"a{i}") for i, (shape, dtype) in enumerate(signature)
    ]
    shape, dtype = signature[-1]
    result = te.compute(shape, lambda *_: tirx.const(1, dtype), name="result")
    return te.create_prim_func([*params, result]).with_attr("global_symbol", name)


def compiled(*functions):
    """Return a library of functions compiled by relax_grad."""
    target = lower.optimizing(HOST)
    objects, entries = Compiler(target, None, Declarations()).compile(functions)
    checked = codegen._checked(functions)
    return codegen.linked(codegen._empty_module(target), objects, entries, checked)


def array(shape, dtype):
    stored = RNG.integers(0, 2, shape)
    return tvm.runtime.empty(shape, dtype) if dtype == "bfloat16" else stored.astype(dtype)


def tensors(signature):
    """Return arguments for a signature; the last tensor receives the result."""
    made = [array(*kind) for kind in [*signature, signature[-1]]]
    return [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in made]


def wrong_ones(shape, dtype):
    """Yield tensors of other shapes or dtypes, and objects that are not tensors."""
    other = "int32" if dtype != "int32" else "float32"
    yield tvm.runtime.empty(shape, other)
    yield tvm.runtime.empty((*shape, 1), dtype)
    if shape:
        yield tvm.runtime.empty(shape[1:], dtype)
    for axis, extent in enumerate(shape):
        for changed in {extent + 1, max(extent - 1, 0)} - {extent}:
            yield tvm.runtime.empty((*shape[:axis], changed, *shape[axis + 1 :]), dtype)
    yield from (None, 3, 2.5, "text")


def outcome(run, arguments):
    """Return the type of the exception that a call raises, or None if it succeeds."""
    try:
        run(*arguments)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("signature", SIGNATURES, ids=str)
def test_as_tvm_checks_them(signature):
    made = function(signature)
    ours = compiled(made).get_function("function")
    theirs = tvm.compile(made, HOST)["function"]
    right = tensors(signature)
    ours(*right)
    np.testing.assert_array_equal(right[-1].numpy().astype("float64"), 1)
    for arguments in (right[:-1], [*right, right[0]], []):
        assert outcome(ours, arguments) is outcome(theirs, arguments) is TypeError
    count = 0
    for i, kind in enumerate([*signature, signature[-1]]):
        for wrong in wrong_ones(*kind):
            arguments = [*right[:i], wrong, *right[i + 1 :]]
            error = outcome(ours, arguments)
            assert error is not None, (i, wrong)
            assert error is outcome(theirs, arguments), (i, wrong)
            count += 1
    assert count > 10


def test_other_objects_are_no_tensors():
    """TVM's own check would read the memory of any object as a tensor."""
    run = compiled(function([((2,), "float32")])).get_function("function")
    for wrong in (tvm.runtime.ShapeTuple([1]), [1, 2], "a text of many characters", run):
        with pytest.raises(
            TypeError, match=r"(?s)Mismatched type on argument #0 .*expected Tensor"
        ):
            run(wrong, tvm.runtime.empty((2,), "float32"))


def test_strides_and_offsets(torch):
    """A tensor must be contiguous, starting at its data pointer."""
    shape = (3, 1, 4)
    signature = [(shape, "float32")]
    run = compiled(function(signature)).get_function("function")
    result = tvm.runtime.empty(shape, "float32")
    whole = torch.zeros(6, 2, 8)
    for good in (whole[:3, :1, 4:].contiguous(), torch.zeros(3, 4).as_strided(shape, (4, 99, 1))):
        run(good, result)
    for bad in (whole[::2, :1, :4], whole[:3, :1, ::2], torch.zeros(4, 1, 3).permute(2, 1, 0)):
        with pytest.raises(ValueError, match=r"(?s)a0\.strides on argument #0 .*compact"):
            run(bad, result)


def test_empty_tensors_may_have_any_strides(torch):
    run = compiled(function([((0, 4), "float32")])).get_function("function")
    run(torch.zeros(4, 0).t(), torch.zeros(0, 4))


def test_names_of_all_kinds():
    """Errors name the right function and argument: one name is a prefix of another, one function
    has many arguments."""
    many = [((2,), "float32")] * 30
    library = compiled(function(many, "f"), function([((2,), "int64")], "f1"))
    arguments = tensors(many)
    arguments[17] = tvm.runtime.empty((3,), "float32")
    with pytest.raises(
        ValueError, match=r"(?s)a17.shape on argument #17 when calling:\n  `f\(.*\[2\]$"
    ):
        library.get_function("f")(*arguments)
    with pytest.raises(TypeError, match=r"(?s)dtype on argument #1 .*`f1\(.*expected int64$"):
        library.get_function("f1")(tvm.runtime.empty((2,), "int64"), arguments[0])


def test_functions_that_check_themselves():
    """Computed extents, scalar parameters and explicit strides are left to TVM's own checks."""
    assert parameters(function([((2, 3), "bool")])) == (
        Parameter("a0", (2, 3), "bool"),
        Parameter("result", (2, 3), "bool"),
    )
    sources = [
        """
@T.prim_func(s_tir=True)
def function(a: T.handle, b: T.handle):
    n = T.int64()
    A = T.match_buffer(a, (n,), "float32")
    B = T.match_buffer(b, (n * 2,), "float32")
    for i in range(n):
        B[i] = A[i]
""",
        """
@T.prim_func(s_tir=True)
def function(A: T.Buffer((4,), "float32"), n: T.int64):
    A[n] = T.float32(1)
""",
        """
@T.prim_func(s_tir=True)
def function(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (4, 4), "float32", strides=(8, 1))
    B = T.match_buffer(b, (4, 4), "float32")
    for i, j in T.grid(4, 4):
        B[i, j] = A[i, j]
""",
    ]
    for source in sources:
        assert parameters(from_source(source)) is None, source


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_symbolic_extents(dtype):
    """A symbolic extent must have the same value at every occurrence, in the dtype of its
    variable."""
    n, m = (tirx.Var(name, dtype) for name in "nm")
    made = function([((n, 3), "float32"), ((m,), "int8"), ((2, m, n), "float32")])
    ours = compiled(made).get_function("function")
    theirs = tvm.compile(made, HOST)["function"]

    def empty(*shapes):
        kinds = ("float32", "int8", "float32", "float32")
        return [tvm.runtime.empty(*form) for form in zip(shapes, kinds, strict=True)]

    for good in [((4, 3), (5,), *2 * [(2, 5, 4)]), ((1, 3), (7,), *2 * [(2, 7, 1)])]:
        arguments = empty(*good)
        assert outcome(ours, arguments) is outcome(theirs, arguments) is None
        np.testing.assert_array_equal(arguments[-1].numpy(), 1)
    for bad in [
        ((4, 3), (5,), (2, 5, 4), (2, 4, 4)),
        ((4, 3), (5,), (2, 4, 5), (2, 5, 4)),
        ((4, 2), (5,), (2, 5, 4), (2, 5, 4)),
        ((4, 3), (5,), (5, 4), (2, 5, 4)),
    ]:
        arguments = empty(*bad)
        assert outcome(ours, arguments) is outcome(theirs, arguments) is ValueError
    with pytest.raises(ValueError, match=r"(?s)a2.shape on .*`function\(a0: Tensor\(\[n, 3\]"):
        ours(*empty((4, 3), (5,), (2, 4, 5), (2, 5, 4)))


def test_extents_that_their_type_does_not_hold(torch):
    """TVM's checks compare only the lower 32 bits of such an extent."""
    n = tirx.Var("n", "int32")
    run = compiled(function([((n,), "int8")])).get_function("function")
    with pytest.raises(ValueError, match="expected \\[n\\]"):
        run(torch.zeros(1, dtype=torch.int8).expand(2**32 + 1), tvm.runtime.empty((1,), "int8"))


def test_a_function_with_assertions_keeps_them():
    checked = from_source(
        """
@T.prim_func(s_tir=True)
def function(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "int32")):
    for i in range(4):
        assert B[i] >= 0, "negative"
        A[i] = T.float32(1)
"""
    ).with_attr("global_symbol", "function")
    run = compiled(checked, function([((2,), "float32")], "other")).get_function("function")
    result = tvm.runtime.empty((4,), "float32")
    run(result, tvm.runtime.tensor(np.arange(4, dtype="int32")))
    with pytest.raises(Exception, match="negative"):
        run(result, tvm.runtime.tensor(np.arange(-1, 3, dtype="int32")))
    with pytest.raises(ValueError, match=r"Invalid|Mismatched"):
        run(tvm.runtime.empty((5,), "float32"), tvm.runtime.tensor(np.arange(4, dtype="int32")))


def test_checks_are_left_out_on_request():
    signature = [((4,), "float32")]
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        run = compiled(function(signature)).get_function("function")
    wrong = tvm.runtime.empty((5,), "float32")
    run(wrong, wrong)
