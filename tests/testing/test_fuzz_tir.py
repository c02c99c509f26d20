"""The fuzzer of TIR: its programs, its reference, and the faults that it finds."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi
from processes import run_file, run_python
from sweep import SHARE

from relax_grad import cli
from relax_grad.cpu.passes import schedule as pass_of_schedules
from relax_grad.ir.compat import BufferLoad, loaded_buffer
from relax_grad.testing import _program
from relax_grad.testing.fuzz import session
from relax_grad.testing.fuzz.outcomes import Failure
from relax_grad.testing.fuzz.session import Finding
from relax_grad.testing.fuzz.tir import checks, language, report, shrink
from relax_grad.testing.fuzz.tir.build import build
from relax_grad.testing.fuzz.tir.interpret import InvalidError, expected, inputs_of, interpret
from relax_grad.testing.fuzz.tir.memory import guarded
from relax_grad.testing.fuzz.tir.programs import draw
from relax_grad.testing.fuzz.tir.subject import Tir

#: All kinds of constructs that programs are drawn with.
KINDS = {
    *("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"),
    *("symbolic", "large", "scalar", "extent_1", "dataflow", "bindings"),
    *("several_calls", "called_again", "several_outputs", "allocated"),
    *("inplace", "inplace_between"),
    # Stages that write whole tensors.
    *(
        "map",
        "filled",
        "pad",
        "concat",
        "ping_pong",
        "scan",
        "counted",
        "opaque",
        "branches",
        "nested",
    ),
    *("inner_buffer", "several", "reduction", "arg_reduction"),
    # Stages that write to tensors that have values.
    *("partial", "partial_copy", "accumulate", "rewrite", "reduce_more", "shift_within"),
    *("reduce_add", "reduce_max", "reduce_min", "reduce_multiply"),
    *("separate_init", "two_reductions", "reduce_inside"),
    # Loops and the axes that they bind.
    *("bind_short", "bind_late", "bind_late_domain", "bind_offset", "bind_strided", "bind_moved"),
    *("bind_split", "bind_fused", "bind_predicated", "bind_reversed", "bind_unit"),
    *(
        "where",
        "loop_order",
        "parallel",
        "vectorized",
        "unroll",
        "store_reversed",
        "store_transposed",
    ),
    # Statements and expressions.
    *("bind", "if", "let", "select", "if_then_else", "padding", "function", "gather"),
    *("plain", "shifted", "reversed", "strided", "modulo", "clamped"),
    # Operators of Relax.
    *(
        "R.add",
        "R.subtract",
        "R.multiply",
        "R.maximum",
        "R.minimum",
        "R.relu",
        "R.negative",
        "R.tanh",
    ),
    *("R.permute_dims", "R.reshape", "R.matmul", "R.sum", "R.max", "R.concat", "R.flip"),
}

#: The end of a process that reads an inaccessible page.
CRASHES = ("crash: SIGSEGV", "crash: SIGBUS")

needs_fork = pytest.mark.skipif(
    not session.can_fork(), reason="Windows does not fork processes, and has no such pages"
)

#: A scheduler that swaps the last two blocks of a function.
_SWAPPED = """
from tvm import tirx
from relax_grad.cpu.passes import schedule as pass_of_schedules

def swapped(function, cpu):
    body = function.body.block.body if hasattr(function.body, "block") else None
    if not isinstance(body, tirx.SeqStmt) or len(body.seq) < 2:
        return function
    *rest, one, last = body.seq
    root = function.body.block
    block = type(root)(
        root.iter_vars, root.reads, root.writes, root.name_hint, tirx.SeqStmt([*rest, last, one]),
        root.init, root.alloc_buffers, root.match_buffers, root.annotations,
    )
    realize = type(function.body)(function.body.iter_values, function.body.predicate, block)
    return function.with_body(realize)

pass_of_schedules.schedule = swapped
"""

#: Lower the extents at which the schedules start to treat tensors as large.
_SMALL = """
from relax_grad.cpu.schedule import _elements, _reduce
_elements.SMALL = _reduce._PIECE = 2
_elements.LINE = 4
"""

_FUZZ = """
from relax_grad import cli
{before}
arguments = ["fuzz", "--tir", "--programs", "{programs}", "--seed", "{seed}", *{more}]
print("exit code", cli.main(arguments))
"""


def fuzz(programs, seed, before="", more=()):
    """Return the output of a session in a separate process."""
    if sys.platform == "win32":
        pytest.skip("Windows does not fork processes")
    code = _FUZZ.format(programs=programs, seed=seed, before=before, more=list(more))
    return run_python(code)


def test_a_program_of_a_seed_is_always_the_same():
    """The same holds in another process, where sets have another order."""
    code = """
    from relax_grad.testing.fuzz.tir.programs import draw
    program = draw(3, 5)
    print(program.functions, program.steps, program.seed)
    """
    program = draw(3, 5)
    there = run_python(code, {**os.environ, "PYTHONHASHSEED": "1"})
    assert there == f"{program.functions} {program.steps} {program.seed}"
    assert program == draw(3, 5)
    assert draw(3, 5) != draw(3, 6)
    assert draw(3, 5) != draw(4, 5)


def test_every_kind_is_drawn():
    kinds = set()
    for number in range(200):
        kinds |= draw(7, number).kinds
        if kinds >= KINDS:
            break
    assert kinds == KINDS


def test_kinds_match_the_script_of_programs():
    """For kinds that are easy to recognise, the script of TVM's functions shows them."""
    signs = {
        "where": r"T\.where\(",
        "counted": r"\bwhile ",
        "parallel": r"T\.parallel\(",
        "vectorized": r"T\.vectorized\(",
        "unroll": r"T\.unroll\(",
        "let": r"T\.Let\(",
        "branches": r"\n +else:",
        "inplace": r"R\.call_tir_inplace\(",
        "symbolic": r"\bn = |def \w+\[n\b",  # the latter on Python 3.12 and later
        "if_then_else": r"T\.if_then_else\(",
        "select": r"T\.Select\(",
        "float16": r'"float16"',
    }
    for number in range(30):
        program = draw(7, number)
        text = build(program).script()
        signed = {kind for kind, sign in signs.items() if re.search(sign, text)}
        assert program.kinds & set(signs) <= signed, text


def test_the_reference_agrees_with_the_pipeline_of_tvm():
    """The two are independent of each other. TVM fails for a few programs."""
    failures = [checks.attempt(draw(0, number), "default") for number in range(20)]
    assert sum(failure is None for failure in failures) >= 16


def copying(shape, dtype="float32", **loop):
    """Return a program of one block that copies a tensor, with a given start or extent of its
    loop."""
    zero = language.Const(0, language.INDEX)
    size = language.Size(shape[0])
    axis = language.Axis("v", "spatial", zero, size, language.Name("i"))
    at = (language.Name("v"),)
    store = language.Store("Y0", at, language.Load("A0", at, dtype))
    nest = {"start": zero, "extent": size, **loop}
    body = language.For(
        "i", nest["start"], nest["extent"], (language.Block("b", (axis,), (store,)),)
    )
    buffers = [language.Buffer(name, shape, dtype) for name in ("A0", "Y0")]
    function = language.PrimFunc("f0", (buffers[0],), (buffers[1],), (), (body,))
    x, t = (language.Tensor(name, shape, dtype) for name in ("x0", "t0"))
    call = language.Call((t,), "f0", ("x0",))
    return language.Program((function,), (x,), (call,), ("t0",))


def test_elements_that_nothing_writes_are_not_compared():
    program = copying((4,), extent=language.Const(3, language.INDEX))
    inputs = inputs_of(program)
    result = interpret(program, language.BATCH, inputs)["t0"]
    np.testing.assert_array_equal(result.written, [True, True, True, False])
    np.testing.assert_array_equal(result.values[:3], inputs[0][:3])


@needs_fork
def test_an_access_beyond_a_parameter_is_a_crash(monkeypatch):
    """Without the inaccessible page, the kernel would read some other number."""

    def scheduled(function, cpu):
        def load(old):
            buffer = loaded_buffer(old)
            return buffer[tuple(index + 1 for index in old.indices)]

        return tvm_ffi.structural_map(function, (BufferLoad, load))

    monkeypatch.setattr(pass_of_schedules, "schedule", scheduled)
    outcome = session.Session(0, Tir()).check_one(copying((4,)))
    assert outcome.failure.kind in CRASHES


@needs_fork
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_guarded_tensors(at_end, dtype):
    value = np.ones((3, 5), _program.numpy_dtype(dtype))
    tensor = guarded(value, at_end)
    np.testing.assert_array_equal(tensor.numpy(), value)
    assert tensor.numpy().dtype == value.dtype
    end = tensor.data_ptr() + (value.nbytes if at_end else 0)
    assert end % mmap.PAGESIZE == 0
    beyond = end if at_end else end - 1
    outcome = session._in_a_process(lambda: ctypes.string_at(beyond, 1), 60)
    assert outcome.kind in CRASHES
    assert guarded(np.zeros((0, 3), "float32"), at_end).shape == (0, 3)


def test_bfloat16_is_compared():
    """A bfloat16 result that depends on no rounding has to be equal."""
    program = copying((4,), "bfloat16", extent=language.Const(4, language.INDEX))
    (run,) = expected(program)
    assert checks.attempt(program, "relax_grad") is None
    run.wanted["t0"].values[2] += 1
    try:
        assert checks.attempt(program, "relax_grad").kind == "value"
    finally:
        run.wanted["t0"].values[2] -= 1


def test_programs_without_a_meaning():
    beyond = copying((4,), start=language.Const(1, language.INDEX))
    with pytest.raises(InvalidError, match="v = 4 is outside of its domain"):
        interpret(beyond, language.BATCH, inputs_of(beyond))
    program = copying((4,), extent=language.Const(3, language.INDEX))
    operator = language.Operator((language.Tensor("t1", (4,), "float32"),), "relu", ("t0",))
    reading = replace(program, steps=(*program.steps, operator), results=("t1",))
    with pytest.raises(InvalidError, match="nothing wrote"):
        interpret(reading, language.BATCH, inputs_of(reading))


def test_a_program_becomes_smaller():
    def fails(candidate):
        loops = (n for n in language.nodes(candidate.functions) if isinstance(n, language.For))
        return any(loop.kind == "vectorized" for loop in loops)

    program = next(p for p in (draw(2, i) for i in range(60)) if fails(p) and len(p.steps) > 1)
    small = shrink.shrink(program, fails)
    assert fails(small)
    assert len(small.steps) == 1
    assert sum(isinstance(node, language.Store) for node in language.nodes(small.functions)) <= 1


def test_no_findings():
    out = fuzz(2, 4)
    assert "2 programs of " in out
    assert out.endswith("no findings\nexit code 0")
    assert int(re.search(r"compared with NumPy: (\d+)", out)[1]) == 2


def test_a_broken_scheduler_is_found_and_made_small(tmp_path):
    """A swapped block may read memory that happens to hold the right value, so that a larger
    program remains."""
    out = fuzz(1, 22, _SWAPPED, ["--keep", str(tmp_path)])
    assert out.endswith("exit code 1")
    (source,) = re.findall(r"class Module:.*?@R\.function", out, re.S)
    assert source.count('T.sblock("b') <= 2
    assert 2 <= len(re.findall(r"\] = ", source)) <= 4
    (script,) = tmp_path.iterdir()
    assert "Found by: python -m relax_grad fuzz --tir --seed 22 (program 0)" in script.read_text()


def test_a_script_shows_a_difference(tmp_path):
    program = copying((4,))
    finding = Finding(0, program, program, Failure("value", "t0 differs"))
    text = report.script(finding, 0)
    path = tmp_path / "finding.py"
    wrong = re.sub(r"\('t0', \(\[[-\d.]+,", "('t0', ([99.0,", text)
    assert wrong != text
    path.write_text(wrong)
    lines = run_file(path).splitlines()
    assert [line.partition("[")[0] for line in lines] == [
        *("default t0 is ", "default has run", "relax_grad t0 is ", "relax_grad has run")
    ]


@pytest.mark.parametrize("more", [["--pipeline"], ["--through", "tvm"]])
def test_wrong_use(more, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fuzz", "--tir", *more])
    assert stopped.value.code == 2
    assert "--tir does not differentiate" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", _SMALL], ids=["as_it_is", "large"])
def test_programs_at_length(before):
    """One case applies the schedules for large tensors to tensors of a few elements."""
    for seed in range(101, 105):
        assert "no findings" in fuzz(max(12, round(100 * SHARE)), seed, before)
