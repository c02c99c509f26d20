"""Aliasing of tensors, and the bindings between which a value stays the same."""

from __future__ import annotations

import pytest
from in_place import KIND, SIZE, module_of
from tvm import relax
from tvm.relax import op
from tvm.script import from_source

from relax_grad.ir.aliases import Memory, kept_copies, may_write, writing_functions


def function_of(body, names=("x", "y")):
    """Return the function ``main`` of :func:`in_place.module_of`."""
    return module_of(body, names)["main"]


def bindings(function):
    return {b.var.name: b for block in function.body.blocks for b in block.bindings}


def holds(function, name, at):
    """Tell whether a variable and its operands keep their values until another variable is
    bound."""
    by_name = bindings(function)
    return Memory(function).holds(by_name[name].var, by_name[name].value, by_name[at].var)


ALIASES = {
    "itself": lambda bb, a: a,
    "a name": lambda bb, a: bb.emit(a),
    "a view": lambda bb, a: bb.emit(op.memory.view(a, (SIZE, SIZE))),
    "a reshape": lambda bb, a: bb.emit(op.reshape(a, (SIZE * SIZE,))),
    "a tuple": lambda bb, a: bb.emit(relax.Tuple([a])),
    "an element": lambda bb, a: bb.emit(relax.TupleGetItem(bb.emit(relax.Tuple([a, a])), 1)),
    "a cast": lambda bb, a: bb.match_cast(a, KIND),
    "an unknown function's": lambda bb, a: bb.emit(op.call_pure_packed("f", a, ty_args=KIND)),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_aliases_share_memory(alias):
    """A write through either name makes the other one, and values computed from it, impossible to
    recompute."""

    def body(bb, write, x, y):
        a = bb.emit(op.exp(x), "a")
        other = alias(bb, a)
        bb.emit(op.sin(a), "of_a")
        bb.emit(relax.Tuple([other]), "of_other")
        bb.emit(op.cos(y), "before")
        write(a, y)
        bb.emit(op.cos(y), "behind")
        return y

    function = function_of(body)
    for name in ("a", "of_a", "of_other"):
        assert holds(function, name, "before")
        assert not holds(function, name, "behind")
    assert holds(function, "before", "behind")


def test_the_result_of_a_call_in_place_is_its_argument():
    def body(bb, write, x, y):
        a = bb.emit(op.exp(x), "a")
        b = write(a, y)
        bb.emit(op.sin(b), "c")
        bb.emit(op.cos(y), "first")
        write(b, y)
        bb.emit(op.cos(y), "second")
        return y

    function = function_of(body)
    assert holds(function, "c", "first")
    assert not holds(function, "c", "second")
    assert not Memory(function).is_settled(bindings(function)["a"].var)
    assert Memory(function).is_settled(bindings(function)["first"].value)


def test_a_call_in_place_cannot_be_computed_again():
    """The call overwrites its own operand."""

    def body(bb, write, x, y):
        a = bb.emit(op.exp(x), "a")
        b = write(a, y)
        bb.emit(op.sin(b), "c")
        return b

    function = function_of(body)
    name = next(name for name, b in bindings(function).items() if may_write(b.value))
    assert not holds(function, name, "c")
    memory, by_name = Memory(function), bindings(function)
    assert not memory.changed(by_name[name].var, by_name["c"].var)
    assert memory.changed(by_name["a"].var, by_name["c"].var)


def test_without_writes_everything_holds():
    function = function_of(lambda bb, _, x, y: bb.emit(op.add(bb.emit(op.exp(x), "a"), y), "b"))
    memory, unknown = Memory(function), relax.Var("unknown", KIND)
    assert not memory.is_written
    assert memory.holds(unknown, unknown, unknown)


def test_unknown_variables_do_not_hold_among_writes():
    function = function_of(lambda bb, write, x, y: write(x, y))
    memory, unknown = Memory(function), relax.Var("unknown", KIND)
    last = list(bindings(function).values())[-1].var
    assert not memory.holds(unknown, relax.Tuple([]), last)
    assert not memory.is_settled(unknown)


FUNCTIONS = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def add_to(A: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + T.float32(1)

    @R.function(private=True)
    def to_its_own(x: R.Tensor((4, 4), "float32")):
        cls = Module
        with R.dataflow():
            a = R.exp(x)
            b = R.call_tir_inplace(
                cls.add_to, (a,), inplace_indices=[0], out_ty=[R.Tensor((4, 4), "float32")]
            )
            R.output(b)
        return b

    @R.function(private=True)
    def to_a_view(x: R.Tensor((4, 4), "float32")):
        cls = Module
        with R.dataflow():
            a = R.memory.view(x, R.shape([4, 4]))
            b = R.call_tir_inplace(
                cls.add_to, (a,), inplace_indices=[0], out_ty=[R.Tensor((4, 4), "float32")]
            )
            R.output(b)
        return b

    @R.function(private=True)
    def through_another(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        y: R.Tensor((4, 4), "float32") = Module.to_a_view(x)
        return y

    @R.function(private=True)
    def through_another_to_its_own(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        a = R.exp(x)
        y: R.Tensor((4, 4), "float32") = Module.to_a_view(a)
        return y

    @R.function(pure=False, private=True)
    def to_an_unknown_function(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        y = R.call_packed("unknown", x, ty_args=R.Tensor((4, 4), "float32"))
        return y

    @R.function(pure=False, private=True)
    def that_prints(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        _ = R.print(x, format="{}")
        return x

    @R.function(private=True)
    def of_a_closure(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        @R.function
        def local(y: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
            z: R.Tensor((4, 4), "float32") = R.add(x, y)
            return z

        w: R.Tensor((4, 4), "float32") = local(x)
        return w

    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        y = R.exp(x)
        return y
"""


def test_functions_that_write_to_their_arguments():
    mod = from_source(FUNCTIONS)
    names = {variable.name_hint for variable in writing_functions(mod)}
    assert names == {
        "add_to",
        "to_a_view",
        "through_another",
        "to_an_unknown_function",
        "of_a_closure",
    }


def test_functions_of_which_copies_stay_copies():
    """Functions with writes, and functions that a module with writes calls."""
    mod = from_source(FUNCTIONS)
    names = {variable.name_hint for variable in kept_copies(mod)}
    assert names == {
        "to_its_own",
        "to_a_view",
        "through_another",
        "through_another_to_its_own",
        "to_an_unknown_function",
        "of_a_closure",
    }
    assert (
        kept_copies(
            from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        y = R.exp(x)
        return y
""")
        )
        == {}
    )


LOCAL = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def add_to(A: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + T.float32(1)

    @R.function
    def main(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        cls = Module
        a = R.exp(x)
        b = R.permute_dims(a)
        k = R.permute_dims(x)

        @R.function
        def local(y: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
            z: R.Tensor((4, 4), "float32") = R.matmul(y, b)
            return z

        c = R.call_tir_inplace(
            cls.add_to, (a,), inplace_indices=[0], out_ty=[R.Tensor((4, 4), "float32")]
        )
        w: R.Tensor((4, 4), "float32") = local(c)
        return w
"""


def test_a_local_function_reads_when_it_is_called():
    """No write precedes the definition of the function, but one precedes its call."""
    function = from_source(LOCAL)["main"]
    by_name = bindings(function)
    (inner,) = [b.value for b in by_name.values() if isinstance(b.value, relax.Function)]
    (at,) = [b.var for block in inner.body.blocks for b in block.bindings][-1:]
    memory = Memory(function)
    assert not memory.holds(by_name["b"].var, by_name["b"].value, at)
    # An unknown closure may write to its captured variables and its arguments. x is neither.
    assert memory.holds(by_name["k"].var, by_name["k"].value, at)


def test_a_branch_that_writes():
    mod = from_source("""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def add_to(A: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + T.float32(1)

    @R.function
    def main(x: R.Tensor((4, 4), "float32"), cond: R.Tensor((), "bool")):
        cls = Module
        a = R.exp(x)
        b = R.permute_dims(a)
        if cond:
            t = R.call_tir_inplace(
                cls.add_to, (a,), inplace_indices=[0], out_ty=[R.Tensor((4, 4), "float32")]
            )
            c = t
        else:
            s = R.sin(x)
            c = s
        d = R.matmul(c, b)
        return d
""")
    function = mod["main"]
    assert not holds(function, "b", "d")
    assert not Memory(function).is_settled(bindings(function)["c"].var)
