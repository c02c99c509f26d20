"""The garbage collector during a compilation."""

from __future__ import annotations

import gc

import pytest
import tvm
from dispatched import HOST
from programs import build, tensor
from tvm import relax

import relax_grad
from relax_grad._collector import paused


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_it_runs_again_after_a_failure():
    def fail():
        with paused():
            with paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_it_stays_off():
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_it_rests_during_the_passes():
    @tvm.instrument.pass_instrument
    class Seen:
        def __init__(self):
            self.enabled = set()

        def run_before_pass(self, mod, info):
            if info.name == "relax_grad.DispatchKernels":
                self.enabled.add(gc.isenabled())

    seen = Seen()
    module = build([tensor("x", (8,), "float32")], lambda _, x: relax.op.tan(x))
    with HOST, tvm.transform.PassContext(instruments=[seen]):
        relax_grad.pipeline()(module)
    assert seen.enabled == {False}
    assert gc.isenabled()
