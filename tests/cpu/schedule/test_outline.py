"""Outlines tell whether one loop computes several functions, as their fusion does."""

from __future__ import annotations

import numpy as np
from tvm import te, tirx

from relax_grad.cpu.schedule import _merge as merging
from relax_grad.cpu.schedule._merge import Merged, Part, merge, pointwise

#: Shapes of operands that broadcast to the shape of a result.
OPERANDS = {(4, 6): [(4, 6), (1, 6), (4, 1), (6,), ()], (6, 4): [(6, 4), (4,), ()], (6,): [(6,)]}


def function(shape, operands, steps):
    """Return an element-wise function of some steps, each of the results and operands before."""
    inputs = [te.placeholder(operand, "float32", f"x{i}") for i, operand in enumerate(operands)]

    def element(tensor, index):
        own = index[len(index) - len(tensor.shape) :]
        return tensor[tuple(i if n != 1 else 0 for i, n in zip(own, tensor.shape, strict=True))]

    def step(tensors):
        return te.compute(
            shape, lambda *i: sum(element(x, i) for x in tensors) * te.exp(i[0] * 0.5)
        )

    made = [*inputs]
    for chosen in steps:
        made.append(step([made[k % len(made)] for k in chosen]))
    return te.create_prim_func([*inputs, made[-1]])


def drawn(rng):
    """Return parts that share tensors: results of earlier ones, and inputs, also twice."""
    tensors, parts = {}, []
    for i in range(int(rng.integers(2, 4))):
        shape = list(OPERANDS)[int(rng.choice(3, p=[0.7, 0.2, 0.1]))]
        names, shapes = [], []
        for _ in range(int(rng.integers(1, 4))):
            fitting = [name for name, known in tensors.items() if known in OPERANDS[shape]]
            if rng.random() < 0.9:  # seldom a tensor twice
                fitting = [name for name in fitting if name not in names]
            if fitting and rng.random() < 0.6:
                name = fitting[int(rng.integers(len(fitting)))]
            else:
                name = f"t{len(tensors)}"
                tensors[name] = OPERANDS[shape][int(rng.integers(len(OPERANDS[shape])))]
            names.append(name)
            shapes.append(tensors[name])
        steps = rng.integers(0, 9, (int(rng.integers(1, 4)), 2)).tolist()
        of = pointwise(function(shape, shapes, steps))
        if of is None:
            continue
        names.append(f"result{i}")
        tensors[names[-1]] = shape
        extents = [[tirx.IntImm("int64", n) for n in each] for each in (*shapes, shape)]
        parts.append(Part(of, names, extents))
    return parts


def test_decisions_are_those_of_fusion():
    rng = np.random.default_rng(0)
    decisions = []
    for _ in range(60):
        parts = drawn(rng)
        if len(parts) > 1:
            wanted = len(Merged(parts).groups()) == 1
            assert (merge(parts) is not None) == wanted
            decisions.append((wanted, merging._outlines(parts) is not None))
    # Both answers are frequent; of a tensor that is passed twice there is no outline.
    assert {(True, True), (False, True), (True, False)} <= set(decisions)
    assert min(map(decisions.count, [(True, True), (False, True)])) >= 8
