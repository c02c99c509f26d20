"""Operators that write to their operands: the tables of the importer, values and gradients."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import sweep  # noqa: E402
import tvm  # noqa: E402
from torch_models import torch_values, tvm_value  # noqa: E402
from torch_operators import Case, check_all, imported, machine  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.frontend.torch import (  # noqa: E402
    UnsupportedOperatorError,
    from_exported_program,
    from_module,
)
from relax_grad.frontend.torch.export import writes as tables  # noqa: E402

from . import _written_programs  # noqa: E402

F = torch.nn.functional


#: Operators that some supported releases of PyTorch lack.
_CHANGING = {
    *("_cudnn_attention_forward_no_dropout_inplace", "_philox_randint_", "_scaled_addmm_"),
    *("_flash_attention_forward_no_dropout_inplace", "_philox_normal_", "_philox_uniform_"),
    *("rename_", "shallow_copy_data_"),
}


def _writing() -> dict[str, list]:
    """Return the schemas of all operators of aten that write to tensors by their names."""
    schemas: dict[str, list] = {}
    for schema in torch._C._jit_get_all_schemas():
        written = [
            argument
            for argument in schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        kinds = {str(argument.type) for argument in written}
        if schema.name.startswith("aten::") and any(
            "Tensor" in kind and "Dict" not in kind for kind in kinds
        ):
            schemas.setdefault(schema.name.removeprefix("aten::"), []).append(schema)
    return schemas


def test_every_operator_that_writes_is_in_one_table():
    writing = _writing()
    assert len(writing) > 250
    groups = (tables.VALUES, tables.LISTS, tables.VIEWS, tables.FLAGS, tables.STATISTICS)
    listed = Counter(name for group in (*groups, tables.REFUSED) for name in group)
    assert max(listed.values()) == 1
    plain = {
        name
        for name, schemas in writing.items()
        if not all(any(argument.is_out for argument in schema.arguments) for schema in schemas)
    }
    assert plain - set(listed) == set(), "add these to relax_grad/frontend/torch/export/writes.py"
    assert set(listed) - set(writing) <= _CHANGING, "PyTorch has no such operators"


def test_an_operator_that_is_in_no_table_is_refused():
    library = torch.library.Library("relax_grad_test", "FRAGMENT")
    library.define("double_(Tensor(a!) self) -> ()")
    library.impl("double_", lambda data: None, "CompositeExplicitAutograd")

    class Module(torch.nn.Module):
        def forward(self, data):
            data = data + 1
            torch.ops.relax_grad_test.double_(data)
            return data.sum()

    exported = torch.export.export(Module(), (torch.ones(3),))
    with pytest.raises(UnsupportedOperatorError, match="this version does not know how") as caught:
        from_exported_program(exported)
    assert "test_writes.py:" in str(caught.value)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))]
)
def test_random_programs_are_equal_or_refused(first):
    """Programs of writes, views, detached tensors and regions without gradients, with fixed
    seeds."""
    count = max(25, round(100 * sweep.SHARE)) if first else 12
    outcomes = {}
    for seed in range(1000 * first, 1000 * first + count):
        source, names = _written_programs.program(seed), {"torch": torch}
        exec(compile(source, "program.py", "exec"), names)
        outcomes[source] = _written_programs.outcome(names["f"])
    kinds = Counter(outcome.split()[0] for outcome in outcomes.values())
    wrong = [
        f"{outcome}\n{source}"
        for source, outcome in outcomes.items()
        if outcome.split()[0] not in ("equal", "refused", "invalid")
    ]
    assert not wrong, "\n".join(wrong)
    assert kinds["equal"] > count / 2


def _detached(w, x, b):
    y = x * w
    y.detach_()
    return (y * w).sum()


def _detached_view(w, x, b):
    y = x * w
    other = y.detach()[1:]
    other.mul_(w[0])
    return other.sum()


def _shared(w, x, b):
    y = (x * w).sum()
    seen = y.detach()
    y += w[0]
    return y * w[1] + seen * w[2]


def _through_data(w, x, b):
    b.data.copy_(x * w)
    return (b * w).sum()


def _nested(w, x, b):
    with torch.no_grad():
        y = w * 2
        with torch.enable_grad():
            z = w * x
    return (y * z).sum()


def _leaf(w, x, b):
    y = (w * x).detach().requires_grad_()
    y = y * w
    y.retain_grad()
    return y.sum()


def _read(w, x, b):
    y = w * x
    y.detach().mul_(2)
    return y.sum()


def _clamped(w, x, b):
    y = w * x
    with torch.no_grad():
        y.clamp_(0, 1)
    return y.sum()


def _between(w, x, b):
    y = w * x
    with torch.no_grad():
        z = y * 2
        y.mul_(3)
    return z.sum() + w.sum()


def _enabled(w, x, b):
    y = w * x
    with torch.inference_mode(), torch.enable_grad():
        y.sigmoid_()
    return y.sum()


def _logical(w, x, b):
    y = w * x
    y.logical_not_()
    return y.sum()


def _reset(w, x, b):
    y = w * x
    y.set_(x.clone())
    return y.sum() + w.sum()


def _resized(w, x, b):
    y = w * x
    y.detach().resize_(2, 2)
    return y.sum()


def _assigned(w, x, b):
    y = w * x
    y.data = x.clone()
    return y.sum()


@pytest.mark.parametrize(
    "function", [_detached, _detached_view, _shared, _through_data, _nested, _leaf]
)
def test_gradients_that_a_detach_cuts(function):
    assert _written_programs.outcome(function) == "equal"


@pytest.mark.parametrize(
    ("function", "operator", "line"),
    [
        (_read, "aten.mul_.Tensor: it writes to a tensor that needs a gradient", "mul_(2)"),
        (_clamped, "aten.clamp_.default: it writes to a tensor that needs", "y.clamp_(0, 1)"),
        (_between, "it writes to a tensor that needs a gradient", "z = y * 2"),
        (_logical, "aten.logical_not_.default: it writes to a tensor", "y.logical_not_()"),
        (_enabled, "torch.enable_grad: it is within inference_mode", "torch.enable_grad()"),
        (_reset, "aten.set_.source_Tensor: the tensor gets other memory", "y.set_"),
        (_resized, "aten.resize_.default: the tensor gets other memory", "resize_(2, 2)"),
        (_assigned, "Tensor.data", "y.data = x.clone()"),
    ],
)
def test_writes_that_are_refused_name_their_line(function, operator, line):
    module = _written_programs.Module(function)
    with pytest.raises(UnsupportedOperatorError) as caught:
        from_module(module, (_written_programs.DATA,))
    assert operator in str(caught.value)
    assert line in str(caught.value)
    assert "test_writes.py:" in str(caught.value)


Y = torch.tensor([[0.9, 0.3], [0.6, 0.7]], dtype=torch.float64)
MASK = Y > 0.65
INDEX = torch.tensor([[0, 1], [1, 0]])

#: Operators with their arguments.
WRITES = {
    **{
        f"{name}_": ()
        for name in (
            *("abs", "acos", "atan", "ceil", "cos", "cosh", "digamma", "erf", "erfinv"),
            *("exp", "exp2", "expm1", "floor", "frac", "i0", "lgamma", "log1p", "log2", "log"),
            *("logit", "neg", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign"),
            *("sin", "sinc", "sqrt", "square", "tan", "tanh", "tril", "triu", "trunc", "zero"),
            *("nan_to_num", "deg2rad"),
        )
    },
    **{
        f"{name}_": (Y,)
        for name in (
            *("add", "sub", "mul", "div", "pow", "copy", "atan2", "fmod", "remainder", "ge", "lt"),
            *("hypot", "copysign", "xlogy", "float_power", "clamp_min"),
        )
    },
    "clamp_": (0.3, 0.6),
    "cumsum_": (0,),
    "cumprod_": (1,),
    "fill_": (2.0,),
    "lerp_": (Y, 0.3),
    "addcmul_": (Y, Y),
    "addcdiv_": (Y, Y),
    "addmm_": (Y, Y),
    "masked_fill_": (MASK, 2.0),
    "masked_scatter_": (MASK, Y),
    "index_fill_": (1, INDEX[0], 3.0),
    "scatter_": (1, INDEX, Y),
    "scatter_add_": (1, INDEX * 0, Y),
    "renorm_": (2, 0, 0.5),
    "index_add_": (1, INDEX[0] * 0, Y),
    "index_copy_": (1, INDEX[0], Y),
    "unsqueeze_": (1,),
    "transpose_": (0, 1),
    "squeeze_": (),
    "t_": (),
    "swapaxes_": (0, 1),
}


def _after_writes(names):
    """Return a function of tensors after writes to them, and after writes to views of them."""

    def function(w, x, b):
        total = 0
        for name in names:
            data = (w.sigmoid() * 1).reshape(2, 2)
            other = data * 1
            getattr(data, name)(*WRITES[name])
            getattr(other.view(2, 2), name)(*WRITES[name])
            total = total + (data * x.reshape(data.shape)).sum() + other.sum() * 0.3
        return total

    return function


def test_graphs_of_operators_that_write():
    assert len(WRITES) > 75
    if _written_programs.outcome(_after_writes(WRITES)) != "equal":
        outcomes = {name: _written_programs.outcome(_after_writes([name])) for name in WRITES}
        raise AssertionError(
            {name: outcome for name, outcome in outcomes.items() if outcome != "equal"}
        )


def _some_writes(data):
    first, two, three = data * 1, data * 2, data.flatten() * 3
    F.elu_(first[1:])
    two[0] += two[1]
    two.t()[0].neg_().abs_()
    two.masked_fill_(two > 2, 0.5).clamp_(0.2, 3)
    three[torch.tensor([0, 3])] *= 2
    three.index_put_((torch.tensor([1, 1, 2]),), three[:3] * 2, accumulate=True)
    four = data.sin()
    four.detach_()
    return first, two, three, four * data


def _repeated(data, values):
    """Write and add values at places that repeat."""
    index = torch.tensor([2, 0, 2, 2])
    written, added, scattered = data * 1, data * 1, data * 1
    written[index] += values
    added.index_put_((index,), values.sin(), accumulate=True)
    scattered.scatter_(0, index, values.exp())
    return written, added.index_add(0, index, values), scattered.scatter_add(0, index, values)


def test_values_of_writes_at_places_that_repeat():
    """The values are PyTorch's; its gradient goes to values that the last one replaces, and this
    one does not."""
    data, values = torch.arange(4.0), torch.tensor([0.5, -1.0, 2.0, 3.0])
    assert check_all([Case("values", _repeated, (data, values), False)]) == {}
    index = torch.tensor([2, 0, 2, 2])
    program, name = imported(
        Case("replaced", lambda x: (data * 1).index_put((index,), x), (values,))
    )
    module = relax_grad.value_and_grad(program.module, name, wrt=[1])
    run = machine(
        tvm.IRModule({"main": module[f"{name}_adjoint"].with_attr("global_symbol", "main")})
    )
    seed, operand = map(tvm_value, (torch.tensor(0), values))
    _, (gradient,) = torch_values(run["main"](seed, operand))
    weights = torch.remainder(torch.arange(4) * 0.37, 1.0) + 0.5  # those of the case
    own = torch.stack([torch.tensor(0.0), weights[0], torch.tensor(0.0), weights[2]])
    torch.testing.assert_close(gradient, own)
    leaf = values.clone().requires_grad_()
    ((data * 1).index_put((index,), leaf) * weights).sum().backward()
    torch.testing.assert_close(leaf.grad, weights[index])  # PyTorch's, to all four


def test_compiled_writes():
    assert check_all([Case("some", _some_writes, (Y.float(),))]) == {}
