"""Random programs, differentiated by our pass, by TVM's and by PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from drawn_programs import programs
from hypothesis import given
from programs import bindings_in, is_sound
from sweep import at_length, batches
from tvm import relax

from relax_grad import functional
from relax_grad.testing.fuzz.differential import (
    Reference,
    call,
    compile_all,
    float_leaves,
    has_local_functions,
    parse,
    variables,
)
from relax_grad.testing.fuzz.gradients import OF_STOCK, for_stock
from relax_grad.transform import Gradient

#: Programs per compilation. Fewer than for single operators, since one program equals some fifty of
#: these.
BATCH = 20

#: Programs that TVM's pass differentiates.
STOCK = programs(OF_STOCK).map(for_stock)

#: The features of programs for products with vectors, which are taken with respect to parameters.
OF_PARAMETERS = ("symbolic", "match_cast", "blocks", "branches", "calls", "tuple_parameters")


def check_beside_tvm(torch, batch):
    """Assert the same type, no more bindings and the same numbers as TVM's pass."""
    modules = []
    for i, program in enumerate(batch):
        module = parse(program, f"p{i}")
        wrt = variables(module, f"p{i}", program)
        ours = Gradient(f"p{i}", wrt)(module)[f"p{i}_adjoint"]
        stock = relax.transform.Gradient(f"p{i}", wrt)(module)[f"p{i}_adjoint"]
        assert tvm_ffi.structural_equal(ours.ret_ty, stock.ret_ty), program
        assert bindings_in(ours) <= bindings_in(stock), program
        modules.append({f"p{i}_ours": ours, f"p{i}_stock": stock})
    machine = compile_all(modules)
    for i, program in enumerate(batch):
        ours, stock = (
            call(machine, f"p{i}_{which}", program.values()) for which in ("ours", "stock")
        )
        for result, wanted in zip(ours, stock, strict=True):
            assert_close(float_leaves(result), float_leaves(wanted), f"p{i}: {program}")


def check_gradients(torch, batch):
    """Assert PyTorch's gradients and well-formed adjoint functions."""
    modules, compiled = [], []
    for i, program in enumerate(batch):
        module = parse(program, f"p{i}")
        wrt = variables(module, f"p{i}", program)
        module = Gradient(f"p{i}", wrt, program.target or 0)(module)
        assert relax.analysis.check_well_formed(module), program
        assert tvm_ffi.structural_equal(relax.transform.Normalize()(module), module), program
        if i % 4 == 0:  # printing and parsing takes a third of the time
            is_sound(module)
        if not has_local_functions(module[f"p{i}_adjoint"]):
            modules.append(without(module, f"p{i}"))
            compiled.append((i, program))
    machine = compile_all(modules)
    for i, program in compiled:
        result, gradients = call(machine, f"p{i}_adjoint", program.values())
        reference = Reference(torch, program)
        label = f"p{i}: {program}"
        assert_close(float_leaves(result), float_leaves(reference.result), label)
        assert_close(float_leaves(gradients), reference.gradients(), label)


def check_products(torch, batch):
    """Check products of the Jacobian and the Hessian with vectors. The Jacobian must agree with its
    transpose."""
    modules = []
    for i, program in enumerate(batch):
        names = [value.name for value in program.wrt]
        for kind in ("vjp", "jvp", "hvp"):  # unique names, since they are compiled together
            module = parse(program, f"p{i}_{kind}")
            modules.append(getattr(functional, kind)(module, f"p{i}_{kind}", names))
        for mod in modules[-3:]:
            assert relax.analysis.check_well_formed(mod), program
    machine = compile_all(modules)
    rng = np.random.default_rng(0)
    for i, program in enumerate(batch):
        label = f"p{i}: {program}"
        reference = Reference(torch, program)
        u, w = ([rng.uniform(-1, 1, leaf.shape) for leaf in reference.zeros()] for _ in range(2))
        values = program.values()
        v = [np.array(rng.uniform(-1, 1))]
        _, pulled = call(machine, f"p{i}_vjp_vjp", [*values, *v])
        _, pushed = call(machine, f"p{i}_jvp_jvp", [*values, *u])
        pulled, pushed = float_leaves(pulled), float_leaves(pushed)
        assert_close(pulled, [float(v[0]) * slope for slope in reference.gradients()], label)
        assert_close([inner(v, pushed)], [inner(pulled, u)], label)
        products = [call(machine, f"p{i}_hvp_hvp", [*values, *vector])[1] for vector in (u, w)]
        products = [float_leaves(product) for product in products]
        assert_close(products[0], hessian_products(torch, reference, u), label)
        assert_close([inner(products[0], w)], [inner(products[1], u)], label)


def hessian_products(torch, reference, vectors):
    """Return the products of the Hessian of a target with vectors."""
    vhp = torch.autograd.functional.vhp  # the Hessian is symmetric
    vectors = tuple(map(torch.from_numpy, vectors))
    return vhp(lambda *d: reference.target_at(d), tuple(reference.zeros()), vectors)[1]


def assert_close(actual, wanted, label):
    """Compare arrays relative to the largest number."""
    assert len(actual) == len(wanted), label
    for i, (result, other) in enumerate(zip(actual, wanted, strict=True)):
        other = np.asarray(other.detach() if hasattr(other, "detach") else other)
        assert result.shape == other.shape, f"{label}: element {i}"
        scale = max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(
            result / scale, other / scale, 1e-7, 1e-7, err_msg=f"{label} {i}"
        )


def inner(ones, others) -> np.ndarray:
    return np.array(sum(np.sum(left * other) for left, other in zip(ones, others, strict=True)))


def without(module, name):
    """Return the functions of a module except one."""
    return {variable: f for variable, f in module.functions_items() if variable.name_hint != name}


@at_length(12, 6, derandomize=True)
@given(batches(STOCK, 6))
def test_beside_tvm(torch, batch):
    check_beside_tvm(torch, batch)


@at_length(24, 12, derandomize=True)
@given(batches(programs(), 12))
def test_gradients(torch, batch):
    check_gradients(torch, batch)


@at_length(6, 3, derandomize=True)
@given(batches(programs(OF_PARAMETERS), 3))
def test_products(torch, batch):
    check_products(torch, batch)


@pytest.mark.slow
@at_length(300, BATCH)
@given(batches(STOCK, BATCH))
def test_beside_tvm_at_length(torch, batch):
    check_beside_tvm(torch, batch)


@pytest.mark.slow
@at_length(660, BATCH)
@given(batches(programs(), BATCH))
def test_gradients_at_length(torch, batch):
    check_gradients(torch, batch)


@pytest.mark.slow
@at_length(40, BATCH)
@given(batches(programs(OF_PARAMETERS), BATCH))
def test_products_at_length(torch, batch):
    check_products(torch, batch)
