"""Gradients of recurrent layers, of their backward operator and of their tangent.

The last two are transposes of each other: the derivatives of one with respect to its directions are
the other one, and those with respect to the coefficients are products of the states of both.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...op.recurrent import GATES, slopes_of
from ...registry import register_gradient
from .._util import cast_each, const_like, shape_of, wide_dtype
from ._recurrent import (
    elements,
    gru_slopes,
    joined,
    lstm_slopes,
    parts_of,
    reset_slopes,
    reset_weight,
    wide,
)

_ZEROS = [Op.get("relax.zeros"), Op.get("relax.zeros_like")]


@register_gradient("relax.grad.lstm")
def lstm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of lstm.

    Forward form, at each step: ``i, f, g, o = split(z)`` of ``z = x + h @ w^T``;
    ``c' = sigmoid(f) * c + sigmoid(i) * tanh(g)`` and ``h' = sigmoid(o) * tanh(c')``. The third
    result holds the slopes of these functions.

    Backward form: ``x_grad, _, h_grad, c_grad = recurrent_backward(h'_grad, slopes, w,
    c'_grad)``, and ``w_grad = x_grad^T @ h`` over all steps at once.

    The slopes have a gradient in derivatives of second order only. They are functions of the sums z
    and of the cells, so it is a contribution to the gradients of these.
    """
    data, hidden, cell, weight = orig_call.args
    states, cells, _ = elements(ctx, orig_var, 3)
    states_grad, cells_grad, slopes_grad = elements(ctx, output_grad, 3)
    before = _before(ctx, states, hidden)
    extra = _Extra(ctx, weight)
    if not _is_zero(ctx, slopes_grad):
        last = _before(ctx, cells, cell)
        sums, of_last, of_cell = lstm_slopes(
            ctx, data, before, last, cells, weight=weight, grad=slopes_grad
        )
        states_grad = extra.through(sums, states_grad)
        cells_grad = _added(ctx, cells_grad, of_cell)
        cells_grad = _added(ctx, cells_grad, _after(ctx, of_last))
        extra.cell = _at_start(ctx, of_last)
    cotangents = [] if _is_zero(ctx, cells_grad) else [cells_grad]
    slopes = ctx.emit(relax.TupleGetItem(orig_var, 2))
    gates, _, hidden_grad, cell_grad = _backward(ctx, states_grad, slopes, weight, *cotangents)
    gates = extra.added(gates, extra.sums)
    partials = [
        gates,
        extra.added(hidden_grad, extra.hidden),
        extra.added(cell_grad, extra.cell),
        _weight_grad(ctx, gates, before),
    ]
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.gru")
def gru(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of gru.

    Forward form, at each step, with ``p = h @ w^T``: ``r = sigmoid(x_r + p_r)``,
    ``z = sigmoid(x_z + p_z)``, ``n = tanh(x_n + r * (p_n + b))`` and ``h' = (1 - z) * n + z * h``.
    The second result holds the slopes of ``h'`` by p and h, the third one that by ``x_n``.

    Backward form: ``p_grad, s, h_grad = recurrent_backward(h'_grad, slopes, w)``; ``x_grad`` is
    ``p_grad``, but ``s`` times the third result for ``x_n``; ``w_grad = p_grad^T @ h`` over all
    steps at once, and ``b_grad = sum(p_n_grad)``.

    Without a bias, the state is reset before the product: ``n = tanh(x_n + (r * h) @ w_n^T)``. Then
    ``x_grad`` is ``p_grad``, and the rows of ``w_grad`` for n are the products with ``r * h``.

    The slopes have a gradient in derivatives of second order only, as in an LSTM.
    """
    if len(orig_call.args) == 3:
        return _gru_that_resets_first(orig_var, orig_call, output_grad, ctx)
    data, hidden, weight, bias = orig_call.args
    states, slopes, fresh = elements(ctx, orig_var, 3)
    states_grad, slopes_grad, fresh_grad = elements(ctx, output_grad, 3)
    before = _before(ctx, states, hidden)
    extra, of_data = _Extra(ctx, weight), None
    if not (_is_zero(ctx, slopes_grad) and _is_zero(ctx, fresh_grad)):
        of_data, products, of_before = gru_slopes(
            ctx, data, before, weight, bias, slopes_grad=slopes_grad, fresh_grad=fresh_grad
        )
        states_grad = extra.through(products, states_grad, of_before)
    gates, total, hidden_grad = _backward(ctx, states_grad, slopes, weight)
    data_grad = joined(ctx, [*parts_of(ctx, gates, 3)[:2], op.multiply(total, fresh)])
    gates = extra.added(gates, extra.sums)
    partials = [
        extra.added(data_grad, of_data),
        extra.added(hidden_grad, extra.hidden),
        _weight_grad(ctx, gates, before),
        op.sum(wide(ctx, parts_of(ctx, gates, 3)[2]), [0, 1]),
    ]
    return cast_each(ctx, partials, orig_call.args)


def _gru_that_resets_first(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    data, hidden, weight = orig_call.args
    states, slopes = elements(ctx, orig_var, 2)
    states_grad, slopes_grad = elements(ctx, output_grad, 2)
    before = _before(ctx, states, hidden)
    reset = ctx.emit(op.multiply(parts_of(ctx, slopes, 5)[4], before))
    extra = _Extra(ctx, weight, slopes)
    if not _is_zero(ctx, slopes_grad):
        sums, of_before = reset_slopes(ctx, data, before, slopes, weight, slopes_grad=slopes_grad)
        states_grad = extra.through(sums, states_grad, of_before)
    gates, _, hidden_grad = _backward(ctx, states_grad, slopes, weight)
    gates = extra.added(gates, extra.sums)
    partials = [
        gates,
        extra.added(hidden_grad, extra.hidden),
        _weight_grad(ctx, gates, before, reset),
    ]
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.rnn_tanh")
def rnn_tanh(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rnn_tanh.

    Forward form, at each step: ``h' = tanh(x + h @ w^T)``.

    Backward form: ``x_grad, _, h_grad = recurrent_backward(h'_grad, 1 - h' * h',
    w)``, and ``w_grad = x_grad^T @ h`` over all steps at once.
    """
    slopes = op.subtract(const_like(1, orig_var), op.multiply(orig_var, orig_var))
    return _rnn(orig_var, orig_call, output_grad, ctx, slopes)


@register_gradient("relax.grad.rnn_relu")
def rnn_relu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rnn_relu.

    Forward form, at each step: ``h' = relu(x + h @ w^T)``.

    Backward form: that of :func:`rnn_tanh` with the slopes 1 where ``h'`` is positive, and 0
    elsewhere.
    """
    slopes = op.sign(orig_var)
    return _rnn(orig_var, orig_call, output_grad, ctx, slopes)


def _rnn(
    orig_var: relax.Var,
    orig_call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    slopes: relax.Expr,
) -> list[relax.Expr]:
    _, hidden, weight = orig_call.args
    gates, _, hidden_grad = _backward(ctx, output_grad, ctx.emit(slopes), weight)
    before = _before(ctx, orig_var, hidden)
    return [gates, hidden_grad, *cast_each(ctx, [_weight_grad(ctx, gates, before)], [weight])]


@register_gradient("relax.grad.recurrent_backward")
def recurrent_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of recurrent_backward.

    Forward form, from the last step to the first, for a GRU with the slopes k of the gates and q of
    the previous state: ``s = y_grad + q' * s' + d' @ w`` and ``d = k * s``, where the prime is the
    next step. An RNN has no q. An LSTM has two states, ``h = y_grad + d' @ w`` and
    ``s = c_grad + a * h + q' * s'``, with ``d = k * (s, s, s, h)``. The last values of ``q * s``
    and ``d @ w`` are the gradients of the initial states. A GRU that resets first with the slope a
    has ``e = d_n @ w_n`` and ``d = k * (e, s, s)``, and ``a * e + (d_r, d_z) @ (w_r, w_z)`` in the
    place of ``d @ w``.

    Backward form: ``y_grad_grad, u, c_grad_grad = recurrent_tangent(d_grad, s_grad, initial_grads,
    slopes, w)``. With its results, the gradients of k, q and a are ``u * (s, s, s,
    h)``, ``c_grad_grad before * s`` and ``c_grad_grad * h``, or ``y_grad_grad before *
    s`` for q of a GRU; that of w is ``d^T @ y_grad_grad before`` over all steps. For a GRU that
    resets first, that of k_r is ``u_r * e``, that of a ``y_grad_grad before * e``, and the rows of
    that of w for n are the products with ``k_r * u_r + a * y_grad_grad before``.
    """
    grad, slopes, weight, *cells = orig_call.args
    count = slopes_of(slopes, weight)
    of_lstm = count == 6
    gates, total, *_ = elements(ctx, orig_var, 4 if of_lstm else 3)
    gates_grad, total_grad, hidden, *cell = elements(ctx, output_grad, 4 if of_lstm else 3)
    tangents = ctx.emit(
        backward.recurrent_tangent(gates_grad, total_grad, hidden, slopes, weight, *cell)
    )
    states, sums, *own = elements(ctx, tangents, 3 if of_lstm else 2)
    before = _before(ctx, states, hidden)
    through = _through(ctx, count, grad, gates, total, weight=weight)
    last = _before(ctx, own[0], cell[0]) if of_lstm else before
    reset = _reset_tangent(ctx, sums, before, slopes) if count == 5 else None
    partials = [
        states,
        _of_slopes(ctx, count, sums, total, through, last, *own),
        _weight_grad(ctx, gates, before, reset),
        *own[: len(cells)],
    ]
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.recurrent_tangent")
def recurrent_tangent(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of recurrent_tangent.

    Forward form, for a GRU with the slopes k of the gates and q of the previous state:
    ``u = d + y @ w^T`` and ``y' = s + sum(k * u) + q * y``. An RNN has no q. An LSTM has
    ``c' = s + sum(k * u) + q * c`` over three gates, and ``y' = a
    * c' + k * u`` with the fourth one. A GRU that resets first has ``u_n = d_n + (k_r * u_r + a *
      y) @ w_n^T`` and no
    ``k_r * u_r`` in the sum.

    Backward form: ``d_grad, s_grad, y_grad, c_grad = recurrent_backward(y'_grad + next(u_grad @ w),
    slopes, w, c'_grad)`` with ``u_grad`` added to the first one. The gradients of the slopes and of
    w are those in :func:`recurrent_backward`.
    """
    _, _, hidden, slopes, weight, *cell = orig_call.args
    count = slopes_of(slopes, weight)
    of_lstm = count == 6
    states, sums, *own = elements(ctx, orig_var, 3 if of_lstm else 2)
    states_grad, sums_grad, *cells_grad = elements(ctx, output_grad, 3 if of_lstm else 2)
    extra = _Extra(ctx, weight, slopes if count == 5 else None)
    if not _is_zero(ctx, sums_grad):
        states_grad = extra.through(sums_grad, states_grad)
    gates, total, *initial = _backward(ctx, states_grad, slopes, weight, *cells_grad)
    if count == 6:
        through = _through(ctx, count, states_grad, gates, total, weight=weight)
    gates = extra.added(gates, extra.sums)
    if count != 6:
        # The gradient of the reset state is that through all sums.
        through = _through(ctx, count, states_grad, gates, total, weight=weight)
    before = _before(ctx, states, hidden)
    last = _before(ctx, own[0], cell[0]) if of_lstm else before
    reset = _reset_tangent(ctx, sums, before, slopes) if count == 5 else None
    partials = [
        gates,
        total,
        extra.added(initial[0], extra.hidden),
        _of_slopes(ctx, count, sums, total, through, last, *own),
        _weight_grad(ctx, gates, before, reset),
        *initial[1:],
    ]
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.previous_steps")
def previous_steps(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of previous_steps.

    Forward form: ``y[0] = initial`` and ``y[t] = x[t - 1]``.

    Backward form: ``[next_steps(y_grad), y_grad[0]]``.
    """
    return [backward.next_steps(output_grad), _at_start(ctx, output_grad)]


@register_gradient("relax.grad.next_steps")
def next_steps(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of next_steps.

    Forward form: ``y[t] = x[t + 1]``, and 0 at the last step.

    Backward form: ``[previous_steps(y_grad, 0)]``.
    """
    return [backward.previous_steps(output_grad, op.zeros_like(_at_start(ctx, output_grad)))]


class _Extra:
    """Contributions to the gradients of the sums of the gates, which the backward operator does not
    take.

    Parameters
    ----------
    slopes : relax.Expr, optional
        The slopes of a GRU that resets first, whose gate n has the product with the reset state.

    Attributes
    ----------
    sums, hidden, cell : relax.Expr or None
        The contributions to the gradients of the sums, and of the initial states.
    """

    def __init__(
        self, ctx: relax.BlockBuilder, weight: relax.Expr, slopes: relax.Expr | None = None
    ):
        self._ctx, self._weight, self._slopes = ctx, weight, slopes
        self.sums = self.hidden = self.cell = None

    def through(
        self, sums: relax.Expr, states_grad: relax.Expr, before_grad: relax.Expr | None = None
    ) -> relax.Expr:
        """Note the gradient of the sums, and return the states' gradient with its contribution.

        ``before_grad`` is a further gradient of the states before each step.
        """
        ctx = self._ctx
        if self._slopes is None:
            self.sums, hidden = sums, _product(ctx, sums, self._weight)
        else:
            self.sums, hidden = self._through_reset(sums)
        if before_grad is not None:
            hidden = ctx.emit(op.add(hidden, before_grad))
        self.hidden = _at_start(ctx, hidden)
        return _added(ctx, states_grad, _after(ctx, hidden))

    def _through_reset(self, sums: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        """Return the gradients of the sums, with r's through the reset state, and of the
        states before."""
        ctx = self._ctx
        of_r, of_z, of_n = (wide(ctx, part) for part in parts_of(ctx, sums, 3))
        slope, *_, kept = (wide(ctx, part) for part in parts_of(ctx, self._slopes, 5))
        first, second, last = elements(ctx, ctx.emit(op.split(self._weight, 3, 0)), 3)
        reset = _product(ctx, of_n, last)
        of_r = ctx.emit(op.add(of_r, op.multiply(slope, reset)))
        others = ctx.emit(op.concat([first, second], 0))
        product = _product(ctx, joined(ctx, [of_r, of_z]), others)
        product = ctx.emit(op.add(product, op.multiply(kept, reset)))
        return joined(ctx, [of_r, of_z, of_n]), product

    def added(self, grad: relax.Expr, contribution: relax.Expr | None) -> relax.Expr:
        return grad if contribution is None else _added(self._ctx, grad, contribution)


def _reset_tangent(
    ctx: relax.BlockBuilder, sums: relax.Expr, before: relax.Expr, slopes: relax.Expr
) -> relax.Expr:
    """Return the derivative of the reset state along a direction."""
    slope, *_, kept = parts_of(ctx, slopes, 5)
    return ctx.emit(
        op.add(op.multiply(slope, parts_of(ctx, sums, 3)[0]), op.multiply(kept, before))
    )


def _through(
    ctx: relax.BlockBuilder,
    count: int,
    grad: relax.Expr,
    gates: relax.Expr,
    total: relax.Expr,
    weight: relax.Expr,
) -> relax.Expr:
    """Return the gradient of the hidden states of an LSTM, or of the reset state of a GRU that
    resets first.

    For the others, it is the states' gradient, ``total``.
    """
    if count == 6:
        return _with_products(ctx, grad, gates, weight)
    if count == 5:
        return _product(ctx, parts_of(ctx, gates, 3)[2], reset_weight(ctx, weight))
    return total


def _of_slopes(
    ctx: relax.BlockBuilder,
    count: int,
    sums: relax.Expr,
    total: relax.Expr,
    through: relax.Expr,
    last: relax.Expr,
    own: relax.Expr | None = None,
) -> relax.Expr:
    """Return the gradient of the slopes, from the states of the backward operator and of the
    tangent."""
    gates = [wide(ctx, part) for part in parts_of(ctx, sums, GATES[count])]
    total, through, last = (wide(ctx, tensor) for tensor in (total, through, last))
    parts = [op.multiply(gate, total) for gate in gates[:3]]
    if count == 6:
        parts += [
            op.multiply(gates[3], through),
            op.multiply(last, total),
            op.multiply(wide(ctx, own), through),
        ]
    elif count == 5:
        parts[0] = op.multiply(gates[0], through)
        parts += [op.multiply(last, total), op.multiply(last, through)]
    elif count == 4:
        parts.append(op.multiply(last, total))
    return joined(ctx, parts)


def _backward(
    ctx: relax.BlockBuilder,
    grad: relax.Expr,
    slopes: relax.Expr,
    weight: relax.Expr,
    *cells_grad: relax.Expr,
) -> list[relax.Expr]:
    results = ctx.emit(backward.recurrent_backward(grad, slopes, weight, *cells_grad))
    return elements(ctx, results, len(results.ty.fields))


def _added(ctx: relax.BlockBuilder, term: relax.Expr, other: relax.Expr) -> relax.Expr:
    """Return a sum in the dtype of the first operand."""
    if _is_zero(ctx, term):
        return cast_each(ctx, [other], [term])[0]
    return ctx.emit(op.add(term, ctx.emit(cast_each(ctx, [other], [term])[0])))


def _product(ctx: relax.BlockBuilder, gates: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """Return the gradient of the states before each step from the gradient of the products."""
    return ctx.emit(op.matmul(wide(ctx, gates), wide(ctx, weight)))


def _with_products(
    ctx: relax.BlockBuilder, grad: relax.Expr, gates: relax.Expr, weight: relax.Expr
) -> relax.Expr:
    """Return the gradient of the hidden states of an LSTM through all later steps."""
    return _added(ctx, wide(ctx, grad), _after(ctx, _product(ctx, gates, weight)))


def _weight_grad(
    ctx: relax.BlockBuilder, gates: relax.Expr, before: relax.Expr, reset: relax.Expr | None = None
) -> relax.Expr:
    """Return the sum of the products of the gates and the states before, over steps and batch.

    Those of the third gate are with the reset states, if they are given.
    """
    if reset is not None:
        of_r, of_z, of_n = parts_of(ctx, gates, 3)
        both = _weight_grad(ctx, joined(ctx, [of_r, of_z]), before)
        return ctx.emit(op.concat([both, _weight_grad(ctx, of_n, reset)], 0))
    rows, size = (shape_of(tensor)[2] for tensor in (gates, before))
    gates = ctx.emit(op.reshape(gates, (-1, rows)))
    before = ctx.emit(op.reshape(before, (-1, size)))
    turned = ctx.emit(op.permute_dims(gates, [1, 0]))
    return ctx.emit(op.matmul(turned, before, wide_dtype(before)))


def _before(ctx: relax.BlockBuilder, states: relax.Expr, initial: relax.Expr) -> relax.Expr:
    """Return the states before each step."""
    return ctx.emit(backward.previous_steps(states, initial))


def _after(ctx: relax.BlockBuilder, states: relax.Expr) -> relax.Expr:
    """Return the values of the next steps, and 0 at the last step."""
    return ctx.emit(backward.next_steps(states))


def _at_start(ctx: relax.BlockBuilder, states: relax.Expr) -> relax.Expr:
    """Return the values of the first step."""
    # The sum gives the shape without an axis, and 0 if there are no steps.
    first = ctx.emit(op.strided_slice(states, [0], [0], [1], [1]))
    return ctx.emit(op.sum(first, [0]))


def _is_zero(ctx: relax.BlockBuilder, expr: relax.Expr) -> bool:
    """Tell whether an expression is known to be zeros."""
    while isinstance(expr, (relax.Var, relax.TupleGetItem)):
        if isinstance(expr, relax.Var):
            expr = ctx.lookup_binding(expr)
            continue
        whole = expr.tuple_value
        if isinstance(whole, relax.Var):
            whole = ctx.lookup_binding(whole)
        expr = whole.fields[expr.index] if isinstance(whole, relax.Tuple) else None
    return isinstance(expr, relax.Call) and expr.op in _ZEROS
