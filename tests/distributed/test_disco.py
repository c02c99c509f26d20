"""The internals of TVM that relax_grad.distributed depends on. A failure here names the change in
TVM."""

from __future__ import annotations

import inspect

import pytest
import tvm
import tvm_ffi

from relax_grad.distributed._disco import COLLECTIVES, KINDS, disco

#: Global functions of TVM, and their use here.
FUNCTIONS = {
    "runtime.disco.SessionProcess": "makes the session on the file descriptors of _nodes.py",
    "runtime.disco.WorkerProcess": "runs a worker in _worker.py",
    "runtime.disco.worker_id": "is the number of a worker in compiled functions, as a shape",
    "runtime.disco.worker_rank": "is the number of a worker",
    "runtime.disco.empty": "allocates tensors of Session.empty",
    "runtime.config_threadpool": "sets the threads of a worker",
    **{
        f"runtime.disco.{name}": "looks for a collective under runtime.disco.<library>."
        for name in COLLECTIVES
    },
}


@pytest.fixture(scope="module")
def module():
    return disco()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_global_function(module, name):
    assert tvm_ffi.get_global_func(name, allow_missing=True) is not None, (
        f"TVM has no {name} any more, which {FUNCTIONS[name]}"
    )


def test_kinds_of_reduction(module):
    from tvm.runtime.disco.session import REDUCE_OPS

    assert {kind: i for i, kind in enumerate(KINDS)} == REDUCE_OPS, (
        "Disco numbers the reductions in another way; change KINDS in _disco.py"
    )


def test_signatures(module):
    from tvm.runtime.disco import Session

    wanted = {
        "allreduce": ["self", "src", "dst", "op", "in_group"],
        "allgather": ["self", "src", "dst", "in_group"],
        "broadcast_from_worker0": ["self", "src", "dst", "in_group"],
        "scatter_from_worker0": ["self", "from_array", "to_array", "in_group"],
        "gather_to_worker0": ["self", "from_array", "to_array", "in_group"],
        "empty": ["self", "shape", "dtype", "device", "worker0_only", "in_group"],
    }
    signatures = {name: [*inspect.signature(getattr(Session, name)).parameters] for name in wanted}
    assert signatures == wanted


def test_operators_of_relax():
    """Compiled functions call the collectives by these operators and functions."""
    from tvm import relax

    x = relax.Var("x", relax.TensorType((4,), "float32"))
    calls = {
        "allreduce": relax.op.ccl.allreduce(x, "sum"),
        "allgather": relax.op.ccl.allgather(x, 2),
        "broadcast_from_worker0": relax.op.ccl.broadcast_from_worker0(x),
        "scatter_from_worker0": relax.op.ccl.scatter_from_worker0(x, 2),
    }
    for name, call in calls.items():
        bb = relax.BlockBuilder()
        with bb.function("main", [x]):
            bb.emit_func_output(bb.emit(call))
        text = relax.transform.LegalizeOps()(bb.get()).script()
        assert f'"runtime.disco.{name}"' in text, f"R.ccl.{name} calls another function now"


def test_the_name_of_the_library_is_empty(pair):
    """C++ looks for runtime.disco.<library>.allreduce, and no library is set: two dots."""
    x = pair.empty((1,), "float32")
    pair.allreduce(x, x)
    pair.synchronize()
    assert tvm.get_global_func("runtime.disco..allreduce") is not None
