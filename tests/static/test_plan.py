"""The values of a static plan."""

import tvm

from relax_grad.static.plan import Call, Function, Move, Plan, Tensor, aligned, bytes_of


def test_a_plan_prints_its_places_and_calls():
    weight = Tensor((3,), "float32", "state", 0)
    count = Tensor((), "int64", "state", 64)
    x, new = Tensor((4, 3), "float32", "arena", 0), Tensor((3,), "float32", "arena", 64)
    calls = (Call("update", (x, weight, 2, new)),)
    step = Function("step", (("batch/x", x),), calls, (x,), (Move(new, weight),), 128, 256)
    state = (("params/w", weight), ("optimizer_state/step", count))
    plan = Plan((step,), state, b"", tvm.IRModule({}))
    assert (plan.state_bytes, plan.arena_bytes, plan.workspace_bytes) == (128, 128, 256)
    assert str(plan).splitlines() == [
        "state 128 bytes, arena 128, workspace 256, constants 0",
        "  params/w: state+0 float32[3]",
        "  optimizer_state/step: state+64 int64[]",
        "step: arena 128 bytes, workspace 256 bytes",
        "  batch/x: arena+0 float32[4, 3]",
        "  update(arena+0 float32[4, 3], state+0 float32[3], 2, arena+64 float32[3])",
        "  move arena+64 float32[3] to state+0 float32[3]",
        "  return arena+0 float32[4, 3]",
    ]


def test_bytes_of_tensors():
    assert bytes_of((3, 5), "bfloat16") == 30
    assert bytes_of((7,), "bool") == 7
    assert bytes_of((), "float64") == 8
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
