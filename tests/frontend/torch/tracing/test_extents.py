"""Operands whose extents torch.export does not compare, against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from relax_grad.frontend.torch import wrap  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class _Mixed(nn.Module):
    def forward(self, *args):
        query, key, value, mask, index, rows = args
        result = F.scaled_dot_product_attention(query, key, value, mask).sum()
        written = torch.zeros(9, 4).index_put((index,), rows)
        written[index, 1:3] = rows[:, :2]
        return result + (written * torch.zeros(9, 4).index_reduce(0, index, rows, "amax")).sum()


def _arguments(batch, queries, keys, index, rows, values=None):
    shapes = (batch, 2, queries, 4), (batch, 2, keys, 4), (batch, 2, values or keys, 4)
    operands = *map(torch.randn, shapes), torch.randn(queries, keys)
    return *operands, torch.arange(index), torch.randn(rows, 4).requires_grad_()


def test_operands_of_independent_symbolic_extents():
    examples = _arguments(5, 3, 6, 7, 7)
    fixed, named = {4, 2}, torch.export.Dim.AUTO
    shapes = [
        {axis: named for axis, extent in enumerate(data.shape) if extent not in fixed}
        for data in examples
    ]
    module = _Mixed()
    wrapped = wrap(module, examples, dynamic_shapes=(shapes,))
    for arguments in (examples, _arguments(3, 8, 5, 6, 6)):
        results = [called(*arguments) for called in (wrapped, module)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(r, arguments[-1]) for r in results))
    for arguments in (_arguments(3, 8, 5, 6, 6, 7), _arguments(3, 8, 5, 5, 6)):
        with pytest.raises(RuntimeError):
            module(*arguments)
        with pytest.raises(ValueError, match=r"the symbolic extent s\d+ is \d"):
            wrapped(*arguments)


def test_names_of_extents_that_must_be_equal():
    class Attention(nn.Module):
        def forward(self, *operands):
            return F.scaled_dot_product_attention(*operands)

    shapes = ([None, {2: "keys"}, {2: "values"}],)
    wrapped = wrap(Attention(), [torch.randn(2, 2, 5, 4)] * 3, dynamic_shapes=shapes)
    with pytest.raises(ValueError, match="values = keys"):
        wrapped(*[torch.randn(2, 2, 5, 4)] * 3)
