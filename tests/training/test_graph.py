"""Steps as CUDA graphs: emulated kernels, whose launches a stand-in repeats."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
import tvm
from compile_cuda import missing
from training_models import START, batches, module_of
from tvm import relax
from tvm.relax import op

from relax_grad.gpu import devices
from relax_grad.gpu.graphs import CAPTURED, add_graphs
from relax_grad.training import SGD, AdamW, Trainer, _graph, train_step

from ._graph_driver import OPTIONS, emulated_graphs, without_graphs

NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason="g++ is not installed: no emulation"
)

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


#: With the statistics of batch normalisation, whose kernels have memory between them.
VALUES = {"w": normal(4, 5), "gamma": np.ones(5, "float32"), "head": normal(5, 3)}
BATCHES = [(normal(6, 4), normal(6, 3)) for _ in range(3)]


def module() -> tvm.IRModule:
    """Return ``loss(x, y, w, gamma, head)``."""
    shapes = {"x": (6, 4), "y": (6, 3), **{name: value.shape for name, value in VALUES.items()}}
    x, y, w, gamma, head = (
        relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()
    )
    zeros = relax.const(np.zeros(5, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, y, w, gamma, head]):
        with bb.dataflow():
            hidden = bb.emit(op.matmul(x, w))
            normalized = bb.emit(op.nn.batch_norm(hidden, gamma, zeros, zeros, zeros, axis=1))
            hidden = bb.emit(op.tanh(bb.emit(relax.TupleGetItem(normalized, 0))))
            difference = bb.emit(op.subtract(bb.emit(op.matmul(hidden, head)), y))
            loss = bb.emit_output(op.mean(bb.emit(op.square(difference))))
        bb.emit_func_output(loss)
    return bb.get()


def trainer(optimizer, on_nan="raise", **options) -> Trainer:
    step = train_step(module(), optimizer, wrt=list(VALUES), **options)
    return Trainer(step, values=VALUES, graph=True, on_nan=on_nan, **OPTIONS)


def values(one: Trainer) -> dict[str, np.ndarray]:
    tensors = {**one.values, **one.optimizer_state}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@NEEDS_CXX
def test_a_graph_computes_the_same_bits(tmp_path):
    """Learning rates may change, and files are read to other memory, which is captured anew."""

    def train() -> list:
        one, seen = trainer(AdamW(lr=0.05)), []
        for i, batch in enumerate([*BATCHES, *BATCHES]):
            seen += [one.step(*batch, lr=0.01 * (i + 1)).loss, values(one)]
        one.save(tmp_path / "file")
        seen.append(one.step(*BATCHES[1]).loss)
        one.load(tmp_path / "file")
        return [*seen, *(one.step(*BATCHES[2]).loss for _ in range(2)), values(one)]

    with emulated_graphs() as driver:
        with without_graphs():
            wanted = train()
        np.testing.assert_equal(train(), wanted)
        assert driver.graphs[1] is None  # its memory is free
    assert (driver.captures, driver.launched) == (2, 8)
    assert any("batch_norm" in name and "_graph" in name for name in driver.names)


@NEEDS_CXX
def test_fit_with_graphs():
    """Accumulated gradients, states, outputs, losses that are not finite, and steps that begin
    before losses are read."""
    step = train_step(
        module_of(states=True),
        SGD(momentum=0.9),
        wrt=["w", "b"],
        states=["mean"],
        accumulate=3,
        skip_nonfinite=True,
        outputs=True,
    )
    good = batches(3)
    bad = tuple(np.full_like(each, np.nan) for each in good[0])
    initial = {**START, "mean": np.zeros(3)}

    def train(on_nan: str, ahead: int = 0) -> list:
        one = Trainer(step, values=initial, graph=True, on_nan=on_nan, **OPTIONS)
        one.fit(good * 2, progress=False, ahead=ahead)
        results = [one.step(*batch) for batch in good]
        seen = [each.outputs["output"].numpy() for each in results]
        many = [good[1], bad, *good, bad, *good]
        if on_nan == "raise":
            with pytest.raises(FloatingPointError):
                one.fit(many, progress=False, ahead=ahead)
            many = good * 2
        one.fit(many, progress=False, ahead=ahead)
        return [*seen, one.history.loss, one.steps, one.skipped, values(one)]

    with emulated_graphs() as driver:
        for on_nan in ("raise", "skip"):
            with without_graphs():
                wanted = train(on_nan)
            for ahead in (0, 2):
                np.testing.assert_equal(train(on_nan, ahead), wanted)
    assert driver.captures == 8  # "step" and "accumulate" of four trainers
    assert driver.launched > 40


@pytest.mark.skipif(
    not tvm.cuda().exist, reason="no CUDA device: a stand-in repeats emulated kernels instead"
)
def test_a_graph_on_a_device():
    step = train_step(module(), AdamW(lr=0.05), wrt=list(VALUES))
    seen = []
    for graph in (False, True):
        one = Trainer(step, values=VALUES, device="cuda", graph=graph)
        one.fit(BATCHES * 3, progress=False)
        seen.append([one.history.loss, values(one)])
    np.testing.assert_equal(*seen)


def test_refusals():
    step = train_step(module(), SGD(), wrt=list(VALUES))
    own = {"compile_options": {"relax_pipeline": "default"}}
    for options, error, message in (
        ({"graph": 1, "device": "cuda"}, TypeError, "graph must be True or False, but it is 1"),
        ({"device": None}, ValueError, "graph is for a device"),
        ({"library": "torch"}, ValueError, "this package's own pipeline: leave graph out"),
        (own, ValueError, "this package's own pipeline: leave graph out"),
    ):
        with pytest.raises(error, match=message):
            Trainer(step, values=VALUES, **{"graph": True, "device": "cuda", **options})


def test_dynamic_loss_scaling_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "present", lambda *_: tvm.cpu())
    with pytest.raises(ValueError, match=r"dynamic loss scaling.*precision=\"bf16\""):
        trainer(SGD(), loss_scale="dynamic")


def test_functions_that_do_more_than_launch_kernels_are_refused():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        called = bb.emit(relax.call_pure_packed("of.the.host", x, ty_args=x.ty))
        bb.emit_func_output(relax.Tuple([called]))
    main = bb.get()["main"].with_attr(CAPTURED, True)
    with pytest.raises(
        ValueError, match=r"cannot have relax\.call_pure_packed in main_graph; leave graph out"
    ):
        add_graphs(tvm.IRModule({"main": main}))


_STUB = """
#include <cstdint>
#include <cstring>
extern "C" {
char calls[999];
static void note(const char* name, void* one, uint64_t other) {
  sprintf(calls + strlen(calls), "%s %llx %llx\\n", name, (unsigned long long)one,
          (unsigned long long)other);
}
int cuStreamBeginCapture_v2(void* stream, int mode) { note("begin", stream, mode); return 0; }
int cuStreamEndCapture(void* stream, void** graph) {
  note("end", stream, 0); *graph = (void*)0x7a0000000001; return 0; }
int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  note("instantiate", graph, flags); *made = (void*)0x7b0000000002; return 0; }
int cuGraphDestroy(void* graph) { note("destroy", graph, 0); return 0; }
int cuGraphLaunch(void* made, void* stream) {
  note("launch", made, (uint64_t)stream); return 0; }
int cuGraphExecDestroy(void* made) { note("destroy", made, 0); return 4; }
}
"""


@NEEDS_CXX
def test_the_calls_of_the_driver(tmp_path):
    """A library with the functions of CUDA's gets whole addresses."""
    (tmp_path / "stub.cc").write_text("#include <cstdio>" + _STUB)
    path = tmp_path / "libstub.so"
    command = ["g++", "-shared", "-fPIC", "-w", tmp_path / "stub.cc", "-o", path]
    subprocess.run(list(map(str, command)), check=True)
    driver = _graph.Driver(str(path))
    driver.begin(0x7F0000000003)
    made = driver.end(0x7F0000000003)
    assert list(driver.launches(made)) == [0]
    with pytest.raises(RuntimeError, match="cuGraphExecDestroy of CUDA returned the error 4"):
        driver.destroy(made)
    calls = ctypes.c_char * 999
    assert calls.in_dll(ctypes.CDLL(str(path)), "calls").value.decode().splitlines() == [
        "begin 7f0000000003 2",
        "end 7f0000000003 0",
        "instantiate 7a0000000001 0",
        "destroy 7a0000000001 0",
        "launch 7b0000000002 0",
        "destroy 7b0000000002 0",
    ]
