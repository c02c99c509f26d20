"""A static plan as C: tables of tensors, arguments and calls, which the sources in ``c/`` run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.index_ranges import IndexRange
from .plan import ARENA, CONSTANTS, STATE, Call, Function, Plan, Tensor, aligned

#: The areas and the dtypes by their numbers in C; dtypes have DLPack's numbers.
_AREAS = {STATE: 0, ARENA: 1, CONSTANTS: 2}
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}

#: The kinds of functions that belong to a step. Others predict.
_KINDS = {"step": "RELAX_GRAD_STEP", "accumulate": "RELAX_GRAD_ACCUMULATE"}

#: The dtypes of safetensors, by the names in TVM.
_IN_FILES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}

#: Bounds of the bytes of the structures in relax_grad_model.h, on processors of 64 bits, and the
#: room for texts, which that header has too.
_TRAINER, _TENSOR, _ARGUMENT, _TEXTS = 512, 48, 16, 2048


@dataclass(frozen=True)
class Facts:
    """What a plan does not say of its step.

    Attributes
    ----------
    digest : str
        The digest of the step.
    groups : tuple[str, ...]
        The groups of the state's tensors, in their order.
    hyperparameters : Mapping[str, float]
        The defaults.
    metrics, outputs : tuple[str, ...]
        The names of a step's results after the loss.
    accumulate : int
        The number of batches for each update.
    empty_history : str
        A history without steps, as JSON.
    averages : Mapping[str, str]
        The moving average of each parameter; empty if the step has none.
    ranges : Mapping[str, Sequence[Sequence[IndexRange]]]
        The ranges of the indices among the inputs: of each function by its name, for the first size
        first. Their extents are numbers.
    """

    digest: str
    groups: tuple[str, ...]
    hyperparameters: Mapping[str, float]
    metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    accumulate: int
    empty_history: str
    averages: Mapping[str, str]
    ranges: Mapping[str, Sequence[Sequence[IndexRange]]]


def memory_bytes(plan: Plan, facts: Facts) -> int:
    """Return the bytes of memory that a trainer needs: an upper bound for all processors."""
    most = _most_arguments(plan)
    return (
        64
        + aligned(_TRAINER)
        + aligned(_TENSOR * most)
        + aligned(_ARGUMENT * most)
        + aligned(8 * len(facts.hyperparameters))
        + aligned(8 * len(facts.metrics))
        + aligned(8 * len(plan.state))
        + plan.state_bytes
        + plan.arena_bytes
        + plan.workspace_bytes
        + _TEXTS
    )


def _most_arguments(plan: Plan) -> int:
    return max(
        (len(call.arguments) for function in plan.functions for call in function.calls), default=0
    )


def header(plan: Plan, facts: Facts) -> str:
    """Return the header of the tables: the name of the model and its memory."""
    return f"""/* The exported step: pass RELAX_GRAD_MODEL to relax_grad_open_static. */
#ifndef RELAX_GRAD_STEP_H_
#define RELAX_GRAD_STEP_H_

#include "relax_grad_static.h"

#ifdef __cplusplus
extern "C" {{
#endif

/* The name of the model. Programs with several models compile each with another name. */
#ifndef RELAX_GRAD_MODEL
#define RELAX_GRAD_MODEL relax_grad_exported
#endif

extern const relax_grad_model RELAX_GRAD_MODEL;

/* The bytes of memory for a trainer: state {plan.state_bytes}, arena {plan.arena_bytes},
 * workspace {plan.workspace_bytes} for each thread, and the rest for tables and texts. */
#if defined(RELAX_GRAD_THREADS) && RELAX_GRAD_THREADS > 1
#define RELAX_GRAD_STEP_MEMORY \\
  ({memory_bytes(plan, facts)} + (RELAX_GRAD_THREADS - 1) * {plan.workspace_bytes})
#else
#define RELAX_GRAD_STEP_MEMORY {memory_bytes(plan, facts)}
#endif

#ifdef __cplusplus
}}
#endif

#endif /* RELAX_GRAD_STEP_H_ */
"""


def source(plan: Plan, facts: Facts) -> str:
    """Return the tables of a plan as a source of C99."""
    return "\n".join(_Tables(plan, facts).lines()) + "\n"


def text_of(text: str) -> str:
    """Return a text as a literal of C."""
    characters = (
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(characters)}"'


@dataclass
class _Tables:
    plan: Plan
    facts: Facts
    places: dict[Tensor, int] = field(default_factory=dict)
    extents: list[int] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        functions = [
            line
            for at, function in enumerate(self.plan.functions)
            for line in self._function(at, function)
        ]
        entries, averages = self._entries(), list(self._averages())
        yield "#include <math.h>"
        yield '#include "step.h"'
        yield '#include "relax_grad_model.h"'
        names = sorted({c.kernel for function in self.plan.functions for c in function.calls})
        yield from (f"extern relax_grad_kernel __tvm_ffi_{name};" for name in names)
        yield from self._constants()
        yield from _table("const relax_grad_place places", self._places())
        yield from _table("const int64_t extents", [f"{extent}" for extent in self.extents])
        yield from _table("const relax_grad_argument arguments", self.arguments)
        yield from functions
        own = [f"{{{', '.join(self._summary(at))}}}" for at in range(len(self.plan.functions))]
        yield from _table("const relax_grad_function functions", own)
        yield from _table("const relax_grad_entry entries", entries)
        yield from _table("const relax_grad_average averages", averages)
        scalars = self.facts.hyperparameters
        yield from _table("const char* const hyperparameters", list(map(text_of, scalars)))
        yield from _table("const double defaults", [repr(float(v)) for v in scalars.values()])
        yield "const relax_grad_model RELAX_GRAD_MODEL = {"
        yield from (f"    {value}," for value in self._model())
        yield "};"

    def _model(self) -> Iterator[str]:
        plan, facts = self.plan, self.facts
        yield text_of(facts.digest)
        yield f"{plan.state_bytes}, {plan.arena_bytes}, {plan.workspace_bytes}"
        yield "constants, places, extents, arguments"
        yield f"{_most_arguments(plan)}"
        yield f"functions, {len(plan.functions)}"
        yield f"entries, {len(plan.state)}"
        yield f"{sum(tensor.bytes for _, tensor in plan.state)}"
        yield text_of(facts.empty_history.replace("\\", "\\\\").replace('"', '\\"'))
        yield f"hyperparameters, defaults, {len(facts.hyperparameters)}"
        applied = facts.metrics.index("applied") if "applied" in facts.metrics else -1
        yield f"{len(facts.metrics)}, {applied}, {int('loss_scale' in facts.metrics)}"
        yield f"{facts.accumulate}"
        yield f"averages, {len(facts.averages)}"

    def _place(self, tensor: Tensor) -> int:
        return self.places.setdefault(tensor, len(self.places))

    def _places(self) -> Iterator[str]:
        known: dict[tuple[int, ...], int] = {}
        for tensor in self.places:
            if tensor.shape not in known:
                known[tensor.shape] = len(self.extents)
                self.extents += tensor.shape
            kind = tensor.dtype.rstrip("0123456789")
            bits = int(tensor.dtype[len(kind) :] or 8)
            yield (
                f"{{{tensor.offset}, {known[tensor.shape]}, {_AREAS[tensor.area]}, "
                f"{len(tensor.shape)}, {_CODES[kind]}, {bits}}}"
            )

    def _function(self, at: int, function: Function) -> Iterator[str]:
        """Yield the tables of a function."""
        is_step = function.name in _KINDS
        names = ["loss", *self.facts.metrics, *self.facts.outputs]
        if not is_step:
            names = [f"output{i}" for i in range(len(function.results))]
        inputs = [(name.partition("/")[2], t) for name, t in self._inputs(function)]
        results = list(zip(names, function.results, strict=True))
        for kind, tensors in (("inputs", inputs), ("results", results)):
            yield from _table(
                f"const relax_grad_named {kind}_{at}",
                [f"{{{text_of(n)}, {text_of(t.dtype)}, {self._place(t)}}}" for n, t in tensors],
            )
        scalars = [f"{self._place(tensor)}" for _, tensor in self._scalars(function)]
        yield from _table(f"const uint32_t scalars_{at}", scalars)
        calls = [self._call(call) for call in function.calls]
        yield from _table(f"const relax_grad_call calls_{at}", calls)
        moves = [
            f"{{{self._place(move.source)}, {self._place(move.target)}}}" for move in function.moves
        ]
        yield from _table(f"const relax_grad_move moves_{at}", moves)
        yield from self._ranges(at, function)

    def _inputs(self, function: Function) -> list[tuple[str, Tensor]]:
        """Return the inputs that a caller gives."""
        return [(n, t) for n, t in function.inputs if n.startswith(("batch/", "inputs/"))]

    def _scalars(self, function: Function) -> list[tuple[str, Tensor]]:
        """Return the hyperparameters and the seed of a step."""
        if function.name not in _KINDS:
            return []
        return list(function.inputs[len(self._inputs(function)) :])

    def _own_ranges(self, at: int) -> Sequence[IndexRange]:
        name = self.plan.functions[at].name
        size = sum(function.name == name for function in self.plan.functions[:at])
        return self.facts.ranges[name][size]

    def _ranges(self, at: int, function: Function) -> Iterator[str]:
        names = [name.partition("/")[2] for name, _ in self._inputs(function)]
        written = []
        for i, own in enumerate(self._own_ranges(at)):
            assert isinstance(own.extent, int)
            ignored = [f"{value}" for value in own.ignored]
            slices = [f"{value}" for axis in own.slices for value in axis]
            names_of = {"ignored": "NULL", "slices": "NULL"}
            for kind, values in (("ignored", ignored), ("slices", slices)):
                if values:
                    names_of[kind] = f"{kind}_{at}_{i}"
                    yield from _table(f"const int64_t {names_of[kind]}", values)
            low = (-own.extent if own.from_end else 0) - own.shift
            written.append(
                f"{{{names.index(own.input)}, {low}, {own.extent - own.shift}, {own.extent}, "
                f"{names_of['ignored']}, {len(ignored)}, {names_of['slices']}}}"
            )
        yield from _table(f"const relax_grad_range ranges_{at}", written)

    def _call(self, call: Call) -> str:
        first = len(self.arguments)
        for value in call.arguments:
            if isinstance(value, Tensor):
                self.arguments.append(f"{{RELAX_GRAD_PLACE, {{.integer = {self._place(value)}}}}}")
            elif isinstance(value, int):
                self.arguments.append(f"{{RELAX_GRAD_INTEGER, {{.integer = {_integer(value)}}}}}")
            else:
                self.arguments.append(f"{{RELAX_GRAD_REAL, {{.real = {_real(value)}}}}}")
        return f"{{__tvm_ffi_{call.kernel}, {first}, {len(call.arguments)}}}"

    def _summary(self, at: int) -> Iterator[str]:
        function = self.plan.functions[at]
        yield _KINDS.get(function.name, "RELAX_GRAD_PREDICT")
        yield f"inputs_{at}, {len(self._inputs(function))}, scalars_{at}"
        yield f"calls_{at}, {len(function.calls)}"
        yield f"results_{at}, {len(function.results)}"
        yield f"moves_{at}, {len(function.moves)}"
        yield f"ranges_{at}, {len(self._own_ranges(at))}"

    def _entries(self) -> list[str]:
        offsets = _offsets(self.plan.state)
        return [
            f"{{{text_of(key)}, {text_of(key.partition('/')[2])}, {text_of(tensor.dtype)}, "
            f"{text_of(_IN_FILES[tensor.dtype])}, {self._place(tensor)}, "
            f"{self.facts.groups.index(key.partition('/')[0])}, {offsets[key]}}}"
            for key, tensor in self.plan.state
        ]

    def _averages(self) -> Iterator[str]:
        places = dict(self.plan.state)
        for param, average in self.facts.averages.items():
            yield f"{{{places[param].offset}, {places[average].offset}}}"

    def _constants(self) -> Iterator[str]:
        values = [f"{byte}" for byte in self.plan.constants]
        yield from _table("const uint8_t constants", values, " RELAX_GRAD_ALIGNED")


def _integer(value: int) -> str:
    """Return an integer as C. The smallest one of 64 bits has no literal."""
    return f"{value}" if value > -(2**63) else f"({value + 1} - 1)"


def _real(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    return value.hex() if math.isfinite(value) else "INFINITY" if value > 0 else "-INFINITY"


def _offsets(state: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the places of tensors in a file: wide dtypes first, which aligns all."""
    offsets, at = {}, 0
    for key, tensor in sorted(state, key=lambda item: (-_width(item[1]), item[0])):
        offsets[key] = at
        at += tensor.bytes
    return offsets


def _width(tensor: Tensor) -> int:
    return int(tensor.dtype[len(tensor.dtype.rstrip("0123456789")) :] or 8)


def _table(declaration: str, values: Iterable[str], attribute: str = "") -> Iterator[str]:
    """Yield the lines of a table; one without values has a zero."""
    own = list(values)
    name = f"static {declaration}[{max(1, len(own))}]"
    yield f"{name}{attribute} = {{"
    width = 16 if attribute or declaration.startswith("const int64_t extents") else 1
    for start in range(0, len(own), width):
        yield f"    {', '.join(own[start : start + width])},"
    if not own:
        yield "    0" if not declaration.startswith("const relax_grad") else "    {0}"
    yield "};"
