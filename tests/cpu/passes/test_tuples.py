"""Elements of tuples that a function builds itself are used directly, and the tuples are
dropped."""

from __future__ import annotations

import numpy as np
from programs import is_sound, run
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_grad.cpu.passes.tuples import resolve_tuples
from relax_grad.ir.bindings import bindings_of, used

X = np.arange(12, dtype="float32").reshape(3, 4)


def values(module):
    return [binding.value for binding in bindings_of(module["main"].body)]


def test_elements_are_used_directly():
    """Nested tuples, and elements used as arguments of calls, are resolved too."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                both = (y, x)
                again = (both, x)
                inner = again[0]
                first = inner[0]
                second = both[1]
                joined = R.concat((first, second), axis=0)
                split = R.split(joined, 2, axis=0)
                half = split[1]
                z = R.multiply(first, half)
                R.output(z)
            return z

    resolved = resolve_tuples(Module)
    is_sound(resolved)
    resolved_values = values(resolved)
    assert sum(isinstance(value, relax.TupleGetItem) for value in resolved_values) == 1  # of split
    assert not any(isinstance(value, relax.Tuple) for value in resolved_values)
    for pipeline in ("default", "relax_grad"):
        np.testing.assert_array_equal(run(resolved, "main", X, pipeline=pipeline), 2 * X * X)


def test_results_of_blocks_and_tuples_that_are_returned_stay():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                both = (y, x)
                first = both[0]
                z = R.multiply(first, x)
                R.output(z, both, first)
            return (z, both, first)

    resolved = resolve_tuples(Module)
    is_sound(resolved)
    _, (doubled, same), first = run(resolved, "main", X, pipeline="relax_grad")
    np.testing.assert_array_equal(doubled, 2 * X)
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(first, 2 * X)


def test_nothing_to_resolve():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                parts = R.split(x, 2, axis=1)
                z = R.multiply(parts[0], parts[1])
                R.output(z)
            return z

    assert resolve_tuples(Module)["main"].same_as(Module["main"])


def test_nothing_unused_is_left():
    """TVM would remove unused bindings one by one."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                a = (x, x)
                b = (a[0], a[1])
                c = (b[0], b[1])
                z = R.add(c[0], c[1])
                R.output(z)
            return z

    resolved = resolve_tuples(Module)
    is_sound(resolved)
    bindings = list(bindings_of(resolved["main"].body))
    needed = {variable for binding in bindings for variable in used(binding.value)}
    needed |= set(used(resolved["main"].body.body))
    assert all(binding.var in needed for binding in bindings)
    assert len(bindings) == 1


def test_second_names_are_dropped():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                same = y
                again = same
                z = R.multiply(again, y)
                kept = z
                R.output(kept)
            return kept

    resolved = resolve_tuples(Module)
    is_sound(resolved)
    assert len(values(resolved)) == 3
    np.testing.assert_array_equal(run(resolved, "main", X), 4 * X * X)
