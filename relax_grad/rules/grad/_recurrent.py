"""The derivatives of the slopes of recurrent layers by the sums of their gates, for derivatives of
second order.

Slopes are the derivatives that a forward pass keeps for the backward pass. In the equations, ``a``
is the sum of a gate, ``s'`` is ``s (1 - s)`` of a sigmoid s and ``1 - s²`` of a hyperbolic tangent,
and ``q`` is the gradient of a slope, which is given. Products are of elements.

An LSTM has the gates ``i, f, o`` (sigmoids) and ``g`` (tanh), the cells ``c = f c_before + i g``,
and the states ``h = o m`` with ``m = tanh(c)``. Its slopes are ``∂c/∂a_i = g i'``,
``∂c/∂a_f = c_before f'``, ``∂c/∂a_g = i g'``, ``∂h/∂a_o = m o'``, ``∂c/∂c_before = f`` (keep) and
``∂h/∂c = o m'`` (cell). The gradients are::

    a_i: q_i g i' (1 - 2i) + q_g g' i'
    a_f: q_f c_before f' (1 - 2f) + q_keep f'
    a_g: q_i i' g' - q_g 2 i g g'
    a_o: q_o m o' (1 - 2o) + q_cell o' m'
    c_before: q_f f'
    c: q_o o' m' - q_cell 2 o m m'

A GRU has the gates ``r, z`` (sigmoids of ``a + b``, with the sum a of the data and the product b of
the states), ``k = b_n + bias``, ``n = tanh(a_n + r k)``, and the states
``h = (1 - z) n + z h_before``. Its slopes are ``u = ∂h/∂a_n = (1 - z) n'`` (fresh),
``∂h/∂a_r = u k r'``, ``∂h/∂a_z = (h_before - n) z'``, ``∂h/∂b_n = u r`` and
``∂h/∂h_before = z`` (keep). With the gradient of u, ``p = q_fresh + q_n r + q_r k r'``::

    a_n: -(q_z z' + 2 p (1 - z) n) n'
    a_r: (q_n u + q_r u k (1 - 2r) + k grad(a_n)) r'
    a_z: (q_z (h_before - n) (1 - 2z) + q_keep - p n') z'
    b_n: q_r u r' + r grad(a_n)
    h_before: q_z z'

A GRU that resets first has ``n = tanh(a_n + W_n (r h_before))``, and the slopes ``h_before r'``,
``(h_before - n) z'``, ``(1 - z) n'``, z (keep) and r (reset)::

    a_r: (q_r h_before (1 - 2r) + q_reset) r'
    a_z: (q_z (h_before - n) (1 - 2z) + q_keep - q_n n') z'
    a_n: -(q_z z' + 2 q_n (1 - z) n) n'
    h_before: q_r r' + q_z z'
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from .._util import const_like, widen


def lstm_slopes(
    ctx: relax.BlockBuilder,
    data: relax.Expr,
    before: relax.Expr,
    last: relax.Expr,
    cells: relax.Expr,
    weight: relax.Expr,
    grad: relax.Expr,
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Return the gradients of the sums, the cells before and after each step, from the
    gradient of the slopes."""
    sums = gate_sums(ctx, data, before, weight)
    one = const_like(1, sums)
    i, f, g, o = parts_of(ctx, sums, 4)
    i, f, o = (ctx.emit(op.sigmoid(gate)) for gate in (i, f, o))
    g, m = ctx.emit(op.tanh(g)), ctx.emit(op.tanh(wide(ctx, cells)))
    last = wide(ctx, last)
    of_i, of_f, of_g, of_o, of_keep, of_cell = parts_of(ctx, wide(ctx, grad), 6)

    def emit(x: relax.Expr) -> relax.Expr:
        return ctx.emit(x)

    def slope(s: relax.Expr) -> relax.Expr:
        return emit(op.multiply(s, op.subtract(one, s)))

    def bend(s: relax.Expr) -> relax.Expr:
        return emit(op.subtract(one, op.add(s, s)))

    di, df, do = map(slope, (i, f, o))
    dg, dm = (emit(op.subtract(one, op.multiply(gate, gate))) for gate in (g, m))
    two_g, two_m = (emit(op.add(gate, gate)) for gate in (g, m))
    slopes = [
        op.add(_times(of_i, g, di, bend(i)), _times(of_g, dg, di)),
        op.add(_times(of_f, last, df, bend(f)), _times(of_keep, df)),
        op.subtract(_times(of_i, di, dg), _times(of_g, i, two_g, dg)),
        op.add(_times(of_o, m, do, bend(o)), _times(of_cell, do, dm)),
    ]
    new = op.subtract(_times(of_o, do, dm), _times(of_cell, o, two_m, dm))
    return joined(ctx, slopes), emit(_times(of_f, df)), emit(new)


def gru_slopes(
    ctx: relax.BlockBuilder,
    data: relax.Expr,
    before: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr,
    slopes_grad: relax.Expr,
    fresh_grad: relax.Expr,
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Return the gradients of the data, of the products, and of the states before each step, from
    the gradients of the slopes."""
    before = wide(ctx, before)
    products = parts_of(ctx, gate_sums(ctx, None, before, weight), 3)
    inputs = parts_of(ctx, wide(ctx, data), 3)
    one = const_like(1, before)
    emit = ctx.emit
    r, z = (emit(op.sigmoid(op.add(inputs[k], products[k]))) for k in range(2))
    kept = emit(op.add(products[2], wide(ctx, bias)))
    n = emit(op.tanh(op.add(inputs[2], op.multiply(r, kept))))
    of_r, of_z, of_n, of_keep = parts_of(ctx, wide(ctx, slopes_grad), 4)
    rest = emit(op.subtract(one, z))
    dr, dz = emit(_times(r, op.subtract(one, r))), emit(_times(z, rest))
    dn = emit(op.subtract(one, op.multiply(n, n)))
    slope = emit(_times(rest, dn))
    bend_r, bend_z = (emit(op.subtract(one, op.add(gate, gate))) for gate in (r, z))
    total = op.add(wide(ctx, fresh_grad), op.add(_times(of_n, r), _times(of_r, kept, dr)))
    total = emit(total)
    kept_grad = _times(of_r, slope, dr)
    r_grad = op.add(_times(of_n, slope), _times(of_r, slope, kept, bend_r))
    z_grad = op.add(_times(of_z, op.subtract(before, n), bend_z), of_keep)
    z_grad = op.subtract(z_grad, _times(total, dn))
    n_grad = op.negative(op.add(_times(of_z, dz), _times(total, rest, op.add(n, n))))
    inner = emit(_times(n_grad, dn))
    # The sum of slope_r by r is not multiplied by the slope of r again: bend_r is the derivative of
    # r * (1 - r) by r.
    of_sums = [
        emit(_times(op.add(r_grad, _times(inner, kept)), dr)),
        emit(_times(z_grad, dz)),
        emit(op.add(kept_grad, _times(inner, r))),
    ]
    return joined(ctx, [*of_sums[:2], inner]), joined(ctx, of_sums), emit(_times(of_z, dz))


def reset_slopes(
    ctx: relax.BlockBuilder,
    data: relax.Expr,
    before: relax.Expr,
    slopes: relax.Expr,
    weight: relax.Expr,
    slopes_grad: relax.Expr,
) -> tuple[relax.Expr, relax.Expr]:
    """Return the gradients of the sums and of the states before each step of a GRU that resets
    first."""
    before, data = wide(ctx, before), wide(ctx, data)
    of_r, of_z, of_n, of_keep, of_reset = parts_of(ctx, wide(ctx, slopes_grad), 5)
    *_, z, r = parts_of(ctx, wide(ctx, slopes), 5)
    one = const_like(1, before)
    reset = ctx.emit(op.multiply(r, before))
    n = gate_sums(ctx, parts_of(ctx, data, 3)[2], reset, reset_weight(ctx, weight))
    n = ctx.emit(op.tanh(n))
    emit = ctx.emit
    rest = emit(op.subtract(one, z))
    dr, dz = emit(_times(r, op.subtract(one, r))), emit(_times(z, rest))
    dn = emit(op.subtract(one, op.multiply(n, n)))
    bend_r, bend_z = (emit(op.subtract(one, op.add(gate, gate))) for gate in (r, z))
    r_grad = _times(op.add(_times(of_r, before, bend_r), of_reset), dr)
    z_grad = op.add(_times(of_z, op.subtract(before, n), bend_z), of_keep)
    z_grad = _times(op.subtract(z_grad, _times(of_n, dn)), dz)
    n_grad = op.negative(op.add(_times(of_z, dz, dn), _times(of_n, rest, op.add(n, n), dn)))
    return joined(ctx, [r_grad, z_grad, n_grad]), emit(op.add(_times(of_r, dr), _times(of_z, dz)))


def reset_weight(ctx: relax.BlockBuilder, weight: relax.Expr) -> relax.Expr:
    """Return the rows of the weight for the gate n."""
    return ctx.emit(relax.TupleGetItem(ctx.emit(op.split(weight, 3, 0)), 2))


def _times(*factors: relax.Expr) -> relax.Expr:
    """Return the product of factors."""
    return functools.reduce(op.multiply, factors)


def elements(ctx: relax.BlockBuilder, tuple_: relax.Expr, count: int) -> list[relax.Expr]:
    return [ctx.emit(relax.TupleGetItem(tuple_, i)) for i in range(count)]


def parts_of(ctx: relax.BlockBuilder, tensor: relax.Expr, count: int) -> list[relax.Expr]:
    """Return the parts of a tensor along its last axis."""
    return [tensor] if count == 1 else elements(ctx, ctx.emit(op.split(tensor, count, 2)), count)


def joined(ctx: relax.BlockBuilder, parts: Sequence[relax.Expr]) -> relax.Expr:
    parts = [ctx.emit(part) for part in parts]
    return parts[0] if len(parts) == 1 else ctx.emit(op.concat(parts, 2))


def wide(ctx: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
    return ctx.emit(widen(expr))


def gate_sums(
    ctx: relax.BlockBuilder, data: relax.Expr | None, before: relax.Expr, weight: relax.Expr
) -> relax.Expr:
    """Return the sums of the gates, in float32 at least."""
    turned = ctx.emit(op.permute_dims(wide(ctx, weight), [1, 0]))
    product = ctx.emit(op.matmul(wide(ctx, before), turned))
    return product if data is None else ctx.emit(op.add(wide(ctx, data), product))
