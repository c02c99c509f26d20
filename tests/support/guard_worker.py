"""The process in which ``guard.py`` runs kernels; a fault ends only a child of it, and is a finding."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os

os.environ["TVM_NUM_THREADS"] = "1"  # the threads of a pool do not survive a fork

import pickle
import re
import signal
import sys
import tempfile
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tvm
from guard import Case, Finding, SampleCase
from guard_memory import Place, Workspaces
from machines import TARGETS
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.backend.cpu_generic import pipeline
from tvm_ffi import structural_hash

from relax_grad import _stages
from relax_grad._compat import Analyzer, dtype_of
from relax_grad.registry import declarations, operators
from relax_grad.testing import _program, check
from relax_grad.testing.samples import samples
from relax_grad.transform import DispatchKernels

#: As in the sweeps: what LLVM's optimizer makes of a kernel is not what is tested.
TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
#: The programs that are compiled together.
BATCH = 25
#: What surrounds the buffers, and what the outputs hold before: NaN at the end, a number at the start.
_PLACEMENTS = {"at the end": 0xFF, "at the start": 0x2A}
_SKIP_RUN = 1

_OURS = {declared.op_name for declared in declarations() if declared.attr == "FLegalize"}


@dataclass
class _Kernel:
    """A PrimFunc of a legalized module.

    Attributes
    ----------
    name : str
        What the module calls it.
    outputs : int
        How many of its tensors are written; they come after those that are read.
    ops : set[str]
        The operators that were legalized to it.
    hash : str
        The same for all that are structurally equal.
    parameters : Sequence
        Its own parameters.
    workspaces : Sequence
        The buffers that it allocates, which :func:`_exposed` makes parameters.
    guarded : Callable, optional
        What takes the workspaces too; None for a kernel without.
    """

    name: str
    outputs: int
    ops: set[str] = field(default_factory=set)
    hash: str = ""
    parameters: Sequence = ()
    workspaces: Sequence = ()
    guarded: Callable | None = None

    @property
    def ours(self) -> bool:
        return bool(self.ops & _OURS)


@dataclass(frozen=True)
class _Program:
    """What one case runs: a function of the module that the case became, and its arguments."""

    case: Case | SampleCase
    module: tvm.IRModule
    values: Sequence[np.ndarray]


def _details(case: Case | SampleCase) -> tuple:
    """Return function, inputs, attributes, wrt, order, symbolic and context of a case."""
    if isinstance(case, Case):
        return case.op, case.inputs, case.attrs, None, case.order, case.symbolic, nullcontext
    sample = samples(case.op)[case.number]
    order = min(sample.order, 2) if case.order is None else min(sample.order, case.order)
    symbolic = sample.symbolic if case.symbolic else None
    function = sample.function or sample.op
    return function, sample.inputs, sample.attrs, sample.wrt, order, symbolic, sample.within


def _build(case: Case | SampleCase) -> _Program:
    """Differentiate a case; of its orders only the last is kept, which computes the ones before."""
    function, inputs, attrs, wrt, order, symbolic, _ = _details(case)
    _, function = check.resolve(function)
    if not order:
        function = functools.partial(_in_floats, function)
    arguments = _program.make_arguments(inputs, None, symbolic or {})
    program = _program.first_order(function, arguments, attrs, np.random.default_rng(0))
    module, name = program.module, "main"
    if order:
        wrt = check.select_wrt(program.arguments, wrt)
        *_, level = check.levels(program, wrt, order, seed=0)
        program, module, name = level.program, level.module, "main_adjoint"
    kept = {variable: f for variable, f in module.functions_items() if variable.name_hint != "main"}
    main = module[name].with_attr("global_symbol", "main")
    kept.pop(module.get_global_var(name), None)
    return _Program(case, tvm.IRModule({**kept, "main": main}), program.values())


def _in_floats(function: Callable, *args, **attrs) -> relax.Expr:
    """Return the floats of what a function returns, for a program that has only those as results."""
    result = relax.BlockBuilder.current().emit(function(*args, **attrs))
    if not isinstance(result.ty, relax.TupleType):
        return _as_float(result)
    fields = (relax.TupleGetItem(result, i) for i in range(len(result.ty.fields)))
    emitted = [relax.BlockBuilder.current().emit(field) for field in fields]
    return relax.Tuple([_as_float(field) for field in emitted])


def _as_float(tensor: relax.Expr) -> relax.Expr:
    return tensor if dtype_of(tensor.ty) in _FLOAT_DTYPES else relax.op.astype(tensor, "float32")


def _calls_ours(module: tvm.IRModule) -> bool:
    """Tell whether a program calls an operator that relax_grad legalizes, besides the sum of the loss."""
    found = set()

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, Op):
            found.add(expr.op.name)

    relax.analysis.post_order_visit(module["main"], visit)
    return bool(found & _OURS - {"relax.sum"})


def _legalize(module: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, _Kernel]]:
    """Legalize a module as TVM's pipeline for CPUs does, without fusing; tell what became of each op."""
    ops = defaultdict(set)
    current = [_SORT_SCAN]  # TVM dispatches before it legalizes
    add_func = relax.BlockBuilder.add_func

    def traced_add_func(self, func, func_name):
        variable = add_func(self, func, func_name)
        ops[variable.name_hint].update(current[-1:])
        return variable

    def legalize(bb, call):
        current.append(call.op.name)
        try:
            return call.op.get_attr("FLegalize")(bb, call)
        finally:
            current.pop()

    legalizable = [name for name in operators() if Op.get(name).get_attr("FLegalize") is not None]
    relax.BlockBuilder.add_func = traced_add_func
    try:
        with TARGET:
            dispatch = tvm.transform.Sequential(pipeline.library_dispatch_passes(TARGET))
            module = dispatch(module)
            module = relax.transform.LegalizeOps(dict.fromkeys(legalizable, legalize))(module)
    finally:
        relax.BlockBuilder.add_func = add_func
    kernels = _kernels_of(module, ops)
    for name, kernel in kernels.items():
        function = _unaligned(module[name])
        module[name] = function
        kernel.hash = str(structural_hash(function.without_attr("global_symbol")))
        kernel.parameters, kernel.workspaces = function.params, _workspaces(function)
    return module, kernels


def _kernels_of(module: tvm.IRModule, ops: Mapping[str, set]) -> dict[str, _Kernel]:
    """Return what the programs of a module call by ``call_tir``; those that write in place are left out."""
    kernels = {}

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op in (_CALL_TIR, _CALL_TIR_INPLACE):
            name = expr.args[0].name_hint
            outputs = len(expr.ty.fields) if isinstance(expr.ty, relax.TupleType) else 1
            kernels[name] = _Kernel(name, outputs, ops[name])

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return kernels


def _schedule(
    module: tvm.IRModule, target: tvm.target.Target
) -> tuple[tvm.IRModule, dict[str, _Kernel]]:
    """Take a module through relax_grad's pipeline; tell what is called when all is fused and merged."""
    kernels, ops = {}, defaultdict(set)
    with target:
        for each in _stages.passes(target, DispatchKernels(target)):
            if each.info.name == "CallTIRRewrite":
                kernels = _kernels_of(module, ops)
            before = {variable.name_hint for variable in module.functions}
            module = each(module)
            if each.info.name == "DispatchSortScan":
                after = {variable.name_hint for variable in module.functions}
                ops.update({name: {_SORT_SCAN} for name in after - before})
    for name, kernel in kernels.items():
        function = _unaligned(module[name])
        module[name] = function
        kernel.hash = str(structural_hash(function.without_attr("global_symbol")))
    return module, kernels


#: The pass by which TVM puts kernels of its own in the place of sorts and scans.
_SORT_SCAN = "relax.backend.DispatchSortScan"

_CALL_TIR, _CALL_TIR_INPLACE = Op.get("relax.call_tir"), Op.get("relax.call_tir_inplace")


def _unaligned(function):
    """Let a kernel rely on no alignment of its buffers; TVM assumes 64 bytes, which would be slack."""
    text = tvm.ir.save_json(function)
    return tvm.ir.load_json(re.sub(r'"data_alignment": ?\d+', '"data_alignment":1', text))


def _workspaces(function) -> Sequence:
    """Return the buffers that a kernel allocates for its whole run."""
    return list(function.body.block.alloc_buffers) if hasattr(function.body, "block") else []


def _exposed(function):
    """Make the buffers that a kernel allocates parameters, so that they can be guarded as well."""
    realize, block = function.body, function.body.block
    block = type(block)(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        [],
        block.match_buffers,
        block.annotations,
    )
    body = type(realize)(realize.iter_values, realize.predicate, block)
    exposed = tirx.PrimFunc([*function.params, *_workspaces(function)], body, function.ret_type)
    return exposed.with_attrs(dict(function.attrs))


class _Batch:
    """Programs that are compiled together, and how their kernels are run."""

    def __init__(
        self, programs: Sequence[_Program], done: set, adversarial, ours, time_limit, machine
    ):
        self.programs, self.adversarial, self.ours = programs, adversarial, ours
        self.time_limit = time_limit
        merged = _program.merge([program.module for program in programs])
        self.workspaces: Workspaces | None = None  # of what allocates as it runs
        if machine:
            target = {**TARGETS[machine], "opt-level": 0}  # half of the time is LLVM's optimizer
            self._schedule(merged, tvm.target.Target(target))
        else:
            self._legalize(merged)
        self._machine.set_instrument(self._instrument)
        self.done = done  # the kernels that were run, with their shapes
        self.broken: set[str] = set()  # those that the programs cannot run
        self._guarded: dict[str, list[bytes]] = {}  # the results of the one that is running

    def _legalize(self, merged: tvm.IRModule) -> None:
        module, self.kernels = _legalize(merged)
        passes = pipeline.dataflow_lower_passes(TARGET) + pipeline.finalize_passes(TARGET)
        executable = tvm.compile(module, TARGET, relax_pipeline=tvm.transform.Sequential(passes))
        self._machine = relax.VirtualMachine(executable, tvm.cpu())
        exposed = {
            name: _exposed(module[name]).with_attr("global_symbol", name)
            for name, kernel in self.kernels.items()
            if kernel.workspaces
        }
        compiled = tvm.compile(tvm.IRModule(exposed), TARGET) if exposed else {}
        for name in exposed:
            self.kernels[name].guarded = compiled[name]

    def _schedule(self, merged: tvm.IRModule, target: tvm.target.Target) -> None:
        module, self.kernels = _schedule(merged, target)
        nothing = tvm.transform.Sequential([])
        executable = tvm.compile(module, target, relax_pipeline=nothing)
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder) / "programs.so")
            executable.export_library(library)
            loaded = tvm.runtime.load_module(library)
            self.workspaces = Workspaces(library)
        self._machine = relax.VirtualMachine(loaded, tvm.cpu())

    def run(self, first: int, send) -> None:
        """Run the programs from a number on, and send what happens; for a process that may end."""
        self._send = send
        for number in range(first, len(self.programs)):
            send("case", number)
            values = [tvm.runtime.tensor(value) for value in self.programs[number].values]
            self._machine[f"main_{number + 1}"](*values)

    def _instrument(self, function, symbol, before, result, *args):
        kernel = self.kernels.get(str(symbol))
        if kernel is None or (self.ours and not kernel.ours):
            return 0
        call = _Call(kernel, function, args, self.workspaces)
        key = call.key
        if before and key in self.broken:
            for output in call.outputs():
                output.copyfrom(np.zeros(output.shape, output.numpy().dtype))
            return _SKIP_RUN
        if before and key not in self.done:
            self.done.add(key)
            self._send("kernel", [key, call.title])
            self._guarded[key] = self._replays(call)
            self._send("done", None)
        elif not before and key in self._guarded:
            found = [_without_bits_of_nan(_bytes(o), str(o.dtype)) for o in call.outputs()]
            if self._guarded.pop(key) not in (None, found):
                self._send("finding", [call.title, "the results differ from those without guards"])
        return 0

    def _replays(self, call: _Call) -> list[bytes] | None:
        """Run a kernel in every placement, with its own values and others; return its own results."""
        results = self._both(call, "as called", call.inputs)
        if results is None:
            self._send("finding", [call.title, "as called: it raises an error"])
        if self.adversarial:
            for what, inputs in _variations(call):
                self._both(call, what, inputs)
        return results

    def _both(self, call: _Call, what: str, inputs: Sequence[bytes]) -> list[bytes] | None:
        """Run a kernel in both placements, and compare; None if it raises an error."""
        found = []
        for placement, fill in _PLACEMENTS.items():
            self._send("replay", f"{what}, {placement}")
            signal.alarm(self.time_limit)
            results, faults = call.replay(inputs, placement == "at the end", fill)
            signal.alarm(0)
            found.append(results)
            for fault in faults:
                self._send("finding", [call.title, f"{what}, {placement}: {fault}"])
        if found[0] != found[1]:
            fault = (
                f"{what}: the results depend on what lies around the buffers or was in the outputs"
            )
            self._send("finding", [call.title, fault])
        return found[0]


#: For each buffer of a kernel and each placement, so that its pages stay open from run to run.
_places: dict[tuple[int, bool], Place] = defaultdict(Place)


def _bytes(tensor) -> bytes:
    return tensor.numpy().tobytes()


def _without_bits_of_nan(data: bytes, dtype: str) -> bytes:
    """Let all NaN be the same: which one it is depends on which operand an instruction has in memory."""
    numbers = np.frombuffer(data, _program.numpy_dtype(dtype))
    if dtype not in _FLOAT_DTYPES:
        return data
    return np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers).tobytes()


class _Call:
    """One call of a kernel: its arguments are tensors, read ones first, and integers for extents."""

    def __init__(self, kernel: _Kernel, function, args, allocating: Workspaces | None):
        self.kernel, self.function, self.args = kernel, function, args
        self.allocating = allocating
        self.tensors = [arg for arg in args if isinstance(arg, tvm.runtime.Tensor)]

    @property
    def key(self) -> str:
        return f"{self.kernel.hash} {self.kernel.ours} {self.title.partition('(')[2]}"

    @property
    def title(self) -> str:
        """The name of the kernel and its arguments."""
        types = [
            f"{arg.dtype}{list(arg.shape)}" if isinstance(arg, tvm.runtime.Tensor) else str(arg)
            for arg in self.args
        ]
        return f"{self.kernel.name}({', '.join(types)})"

    @property
    def inputs(self) -> list[bytes]:
        return [_bytes(tensor) for tensor in self.tensors[: -self.kernel.outputs]]

    def outputs(self) -> list:
        return self.tensors[-self.kernel.outputs :]

    @functools.cached_property
    def workspaces(self) -> list[tuple]:
        """Shape and dtype of each buffer that the kernel allocates."""
        if not self.kernel.workspaces:
            return []
        analyzer, known = Analyzer(), set()
        for parameter, arg in zip(self.kernel.parameters, self.args, strict=True):
            if isinstance(arg, tvm.runtime.Tensor):
                pairs = zip(parameter.ty.shape, arg.shape, strict=True)
            else:
                pairs = [(parameter, arg)]
            for dim, extent in pairs:
                if isinstance(dim, tirx.Var) and dim not in known:
                    known.add(dim)
                    analyzer.bind(dim, tirx.const(extent, str(dim.ty.dtype)))
        return [
            (tuple(int(analyzer.simplify(d)) for d in buffer.ty.shape), dtype_of(buffer.ty))
            for buffer in self.kernel.workspaces
        ]

    def replay(self, inputs: Sequence[bytes], at_end: bool, fill: int) -> tuple:
        """Run the kernel between guard pages; return its results, None for an error, and the faults."""
        buffers = []

        def hold(shape, dtype, content=None):
            size = math.prod(shape) * _program.numpy_dtype(dtype).itemsize
            content = bytes([fill]) * size if content is None else content
            place = _places[len(buffers), at_end]
            buffers.append(place.hold(content, shape, dtype, at_end, fill))
            return buffers[-1].tensor

        contents = itertools.chain(inputs, itertools.repeat(None))
        args = [
            hold(arg.shape, str(arg.dtype), next(contents))
            if isinstance(arg, tvm.runtime.Tensor)
            else arg
            for arg in self.args
        ]
        args += [hold(shape, dtype) for shape, dtype in self.workspaces]
        raised = False
        if self.allocating:
            self.allocating.at_end, self.allocating.fill = at_end, fill
        try:
            (self.kernel.guarded or self.function)(*args)
        except Exception:  # an error is no access out of bounds
            raised = True
        faults = []
        if not all(buffer.is_clean() for buffer in buffers):
            faults.append("bytes next to a buffer were overwritten")
        if [buffer.data() for buffer in buffers[: len(inputs)]] != list(inputs):
            faults.append("an input was overwritten")
        if self.allocating:
            faults += self.allocating.faults
            self.allocating.faults = []
        results = [
            _without_bits_of_nan(buffer.data(), str(tensor.dtype))
            for buffer, tensor in zip(
                buffers[len(inputs) : len(self.tensors)], self.outputs(), strict=True
            )
        ]
        return None if raised else results, faults


_FLOATS = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 1e4, -1e4, 0.3]


def _variations(call: _Call) -> Iterator[tuple[str, list[bytes]]]:
    """Yield other contents for the inputs of a kernel, with what they are."""
    dtypes = [_program.numpy_dtype(str(tensor.dtype)) for tensor in call.tensors]
    own = [np.frombuffer(d, dtype) for d, dtype in zip(call.inputs, dtypes, strict=False)]
    extents = {extent for tensor in call.tensors for extent in tensor.shape}
    integers = [i for i, array in enumerate(own) if array.dtype.kind in "iu" and array.size]
    floats = [i for i, array in enumerate(own) if array.dtype.name in _FLOAT_DTYPES and array.size]
    rng = np.random.default_rng(zlib.crc32(call.key.encode()))
    pools = {i: _extremes(extents, own[i].dtype) for i in integers}
    pools.update({i: np.array(_FLOATS).astype(own[i].dtype) for i in floats})

    def constant(which, value):
        return [np.full_like(a, value(i)) if i in which else a for i, a in enumerate(own)]

    def mixed(which, share):
        return [
            np.where(rng.random(a.size) < share, rng.choice(pools[i], a.size), a)
            if i in which
            else a
            for i, a in enumerate(own)
        ]

    def variations():
        for value in _extremes(extents, np.dtype("int64")) if integers else ():
            fitting = [i for i in integers if value in pools[i]]
            if fitting:
                yield f"integers {value}", constant(fitting, lambda _, value=value: value)
        for k, value in enumerate(_FLOATS if floats else ()):
            yield f"floats {value}", constant(floats, lambda i, k=k: pools[i][k])
        kinds = [("integers", integers), ("floats", floats), ("numbers", integers + floats)]
        for kind, which in kinds:
            for share in (0.1, 0.3, 1.0) if which else ():
                for n in range(8 if integers and kind != "floats" else 2):
                    yield f"{kind} {share} mixed {n}", mixed(which, share)
        for i in integers if len(integers) > 1 else ():
            for n in range(6):
                yield f"integers of input {i} mixed {n}", mixed([i], 1.0)

    with np.errstate(all="ignore"):
        for what, arrays in variations():
            yield what, [array.tobytes() for array in arrays]


_FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _extremes(extents: set[int], dtype: np.dtype) -> np.ndarray:
    """Integers at and beyond the limits of axes, and at those of dtypes, as far as the dtype has them."""
    around = (
        v for extent in extents for v in (extent - 1, extent, extent + 1, -extent, -extent - 1)
    )
    powers = (
        sign * 2**power + offset
        for power in (31, 32, 61, 63)
        for sign in (1, -1)
        for offset in (-1, 0, 1)
    )
    info = np.iinfo(dtype)
    values = {0, 1, 2, -1, -2, 10**6, -(10**6), info.min, info.max, *around, *powers}
    return np.array(sorted(v for v in values if info.min <= v <= info.max), dtype)


def _check(batch: _Batch, report) -> int:
    """Run a batch in children, a new one whenever one ends; return how many runs of kernels there were."""
    first = replays = 0
    while first < len(batch.programs):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _run_child(batch, first, write)
        os.close(write)
        key = title = replay = error = None
        with os.fdopen(read) as events:
            for event, value in map(json.loads, events):
                if event == "case":
                    first = value
                elif event == "kernel":
                    key, title = value
                    batch.done.add(key)
                elif event == "replay":
                    replay = value
                    replays += 1
                elif event == "done":
                    title = None
                elif event == "error":
                    error = value
                else:
                    report(batch, first, *value)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        ended = signal.Signals(status & 0x7F).name if status & 0x7F else error
        if title is None:
            report(batch, first, "", f"the program ended without guards: {ended}")
            first += 1
            continue
        report(batch, first, title, f"{replay}: {ended}")
        if replay.startswith("as called"):
            batch.broken.add(key)
    return replays


def _run_child(batch: _Batch, first: int, write: int) -> None:
    status = 1
    try:
        with os.fdopen(write, "w") as events:

            def send(event, value):
                events.write(json.dumps([event, value]) + "\n")
                events.flush()

            try:
                batch.run(first, send)
                status = 0
            except Exception:
                send("error", traceback.format_exc())
    finally:
        os._exit(status)


def main() -> None:
    cases, adversarial, ours, time_limit, machine = pickle.load(sys.stdin.buffer)
    done: set[str] = set()
    replays = 0

    def report(batch, number, title, what):
        name = title.partition("(")[0]
        kernel = batch.kernels.get(name, _Kernel(name, 0))
        case = batch.programs[number].case.name
        finding = Finding(case, title, sorted(kernel.ops), kernel.ours or not name, what)
        print(json.dumps(vars(finding)), flush=True)

    for start in range(0, len(cases), BATCH):
        chunk = cases[start : start + BATCH]
        print("/".join((chunk[0].name, chunk[-1].name)), flush=True)
        with ExitStack() as stack:
            for within in dict.fromkeys(_details(case)[-1] for case in chunk):
                stack.enter_context(within())
            programs = [_build(case) for case in chunk]
            if ours:
                programs = [program for program in programs if _calls_ours(program.module)]
            batch = _Batch(programs, done, adversarial, ours, time_limit, machine)
            replays += _check(batch, report)
    counts = {"kernels": len(done), "ours": sum(" True " in key for key in done)}
    print(json.dumps({**counts, "replays": replays}))


if __name__ == "__main__":
    main()
