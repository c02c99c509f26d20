"""The contents of the fuzzer's programs, and the reduction of programs to smaller ones."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from processes import run_file
from tvm import relax

from relax_grad import registry
from relax_grad.testing.fuzz import checks, outcomes, report, sampled, shrink
from relax_grad.testing.fuzz.gradients import draw
from relax_grad.testing.fuzz.pen import Pen
from relax_grad.testing.fuzz.script import Body, Function, Program, Tensor, Value
from relax_grad.testing.fuzz.session import Finding
from relax_grad.testing.samples import Sample, sampled_operators, samples

#: Differentiable operators that programs do not contain, with the reason.
NOT_DRAWN = {
    **dict.fromkeys(
        (
            "relax.ccl.allgather",
            "relax.ccl.allreduce",
            "relax.ccl.broadcast_from_worker0",
            "relax.ccl.scatter_from_worker0",
            "relax.dist.annotate_sharding",
            "relax.dist.redistribute_replica_to_shard",
            "relax.grad.allgather_backward_x",
            "relax.grad.broadcast_from_worker0_backward_x",
            "relax.grad.copy_to_tensor_parallel",
            "relax.grad.redistribute_replica_to_shard_backward_input",
            "relax.grad.reduce_from_tensor_parallel",
            "relax.grad.scatter_from_worker0_backward_x",
        ),
        "it runs only within a separate context",
    ),
    "relax.quantize": "it has large numbers",
    "relax.dequantize": 'a result is of type R.Tensor((2, 3), dtype="float32")',
    "relax.grad.concat_backward_tensors": "a result has the shape (0, 3)",
    "relax.nn.attention_var_len": "TVM does not parse its own TVMScript back",
    # Without samples: they need more than a tensor on the CPU.
    "relax.builtin.stop_lift_params": "it has no samples",
    "relax.call_tir": "it has no samples",
    "relax.call_tir_inplace": "it has no samples",
    "relax.call_tir_with_grad": "it has no samples",
    "relax.grad.with_backward": "it has no samples",
    "relax.hint_on_device": "it has no samples",
    "relax.to_vdevice": "it has no samples",
}

#: Operators that a feature of the programs emits.
FEATURES = {"relax.grad.start_checkpoint", "relax.grad.end_checkpoint"}


def form_or_reason(sample):
    """Return the form of a sample, or the reason why it has none."""
    try:
        return sampled.form(sample)
    except sampled.NotDrawableError as error:
        return str(error)


@pytest.mark.slow  # parses the samples of all operators
def test_which_operators_are_drawn():
    drawn, absent = set(), {}
    for name in sampled_operators():
        reasons = []
        for form in map(form_or_reason, samples(name)):
            if isinstance(form, sampled.Form):
                drawn.add(name)
                break
            reasons.append(form)
        else:
            absent[name] = reasons[0]
    for name in registry.operators():
        if registry.classify(name).kind == "differentiable" and name not in drawn | FEATURES:
            absent.setdefault(name, "it has no samples")
    assert absent == NOT_DRAWN


def test_a_program_of_a_seed_is_always_the_same():
    source, other = (draw(3, 5).source("main") for _ in range(2))
    assert source == other
    assert source != draw(3, 6).source("main")
    assert source != draw(4, 5).source("main")


def test_a_statement_of_a_sample():
    x = Value("x0", Tensor((4, 3)))
    pen = Pen(random.Random(0), [x], (f"v{i}" for i in itertools.count()), [])
    forms = map(sampled.form, samples("relax.nn.softmax"))
    form = next(form for form in forms if form.shapes == ((3, 5),))
    value = sampled.write_form(pen, form)
    program = Program(Function("main", (x,), Body(tuple(pen.statements), value)), segments=(True,))
    source = program.source("main")
    assert "R.tile(R.reshape(x0, R.shape([12])), [2])" in source
    assert "v0 = R.nn.softmax(v0_x0, axis=-1)" in source
    assert program.has_torch
    assert program.is_smooth
    assert program.narrowest == "float64"


def test_a_failure_in_unused_statements_becomes_smaller():
    """Unused statements may contain the failure, so they are not removed all at once."""

    def fails(candidate):
        source = candidate.source("main")
        return "R.tanh(" in source and "R.tanh(" not in shrink.cleaned(candidate).source("main")

    drawn = (draw(0, i) for i in range(300))
    program = next(p for p in drawn if 10 < sum(1 for _ in p.lets()) < 20 and fails(p))
    asked = []

    def asked_once(candidate):
        asked.append((candidate.source("main"), candidate.wrt, candidate.target))
        return fails(candidate)

    small = shrink.shrink(program, asked_once)
    assert fails(small)
    assert sum(1 for _ in small.lets()) <= 3
    assert len(set(asked)) == len(asked)


def test_constants_of_a_sample_are_written_as_they_are():
    def function(x):
        weights = relax.const([1e-5, 0.123456789], "float64")
        return relax.op.take(relax.op.multiply(x, weights), relax.const([1, 0], "int64"), axis=1)

    form = sampled.form(Sample([np.ones((3, 2))], function=function, smooth=True))
    assert form.lines == (
        'R.multiply({p0}, R.const([1e-05, 0.123456789], "float64"))',
        'R.take({name}_0, R.const([1, 0], "int64"), axis=1, mode="fast")',
    )


def test_a_program_becomes_smaller():
    program = next(p for p in (draw(0, i) for i in range(99)) if "R.tanh(" in p.source("main"))

    def fails(candidate):
        return "R.tanh(" in candidate.source("main")

    small = shrink.shrink(program, fails)
    assert fails(small)
    assert sum(1 for _ in small.lets()) <= 2
    assert small.wrt
    assert not small.functions


def test_an_address_in_a_message_does_not_matter():
    """Otherwise each run would seem to fail for a new reason, and the program would not become
    smaller."""
    first, other = (
        outcomes.failure("pipeline", ValueError(f"{name} at 0x{address} is bound twice"))
        for name, address in (("t1", "55ac60"), ("t12", "7f001ab"))
    )
    assert first.kind == other.kind
    assert first.message != other.message


def test_a_finding_of_the_pipeline_is_a_script_of_it(tmp_path):
    program = draw(0, 1)
    failure = outcomes.Failure("pipeline", "tensor 0 differs", "pipeline")
    finding = Finding(1, program, program, failure)
    path = tmp_path / "finding.py"
    path.write_text(report.script(finding, 0, checks.Settings(pipeline=True)))
    out = run_file(path)
    differences = [float(line.rpartition(" ")[2]) for line in out.splitlines()]
    assert differences
    assert max(differences) < 1e-3
