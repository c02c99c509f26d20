"""Functions for CUDA graphs, which return the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ..ir.bindings import bindings_of
from ..ir.compat import SBlock, SBlockRealize, dtype_of, structural_walk
from ..ir.module import DONATED, copy_with_new_vars, normalized

#: The attribute of a function for which :func:`add_graphs` adds another one.
CAPTURED = "relax_grad.captured"

#: The end of the name of the added function.
GRAPH = "_graph"

_STORAGE, _TENSOR = "relax.memory.alloc_storage", "relax.memory.alloc_tensor"
_KILLS = ("relax.memory.kill_tensor", "relax.memory.kill_storage")

#: The operators of the virtual machine that touch no memory of the device.
_ON_HOST = (_STORAGE, _TENSOR, "relax.reshape", "relax.memory.view")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.gpu.AddGraphs")
def add_graphs(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Add a function ``NAME_graph`` for each function with the attribute :data:`CAPTURED`.

    It computes the same, frees no memory, and has one more result: a tuple of its memory. While the
    caller keeps the tuple, TVM's allocator gives this memory to nothing else.

    Raises
    ------
    ValueError
        If a function does more than launch kernels.
    """
    functions = dict(mod.functions_items())
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and CAPTURED in (function.attrs or {}):
            graph = _Graph(functions)
            made = graph.function(function, variable.name_hint + GRAPH)
            functions |= {GlobalVar(variable.name_hint + GRAPH): made, **graph.callees}
    if len(functions) == len(mod.functions_items()):
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


class _Graph:
    """A copy of a function that keeps its memory.

    Attributes
    ----------
    callees : dict[GlobalVar, PrimFunc]
        The tensor functions that it calls instead of others.
    """

    def __init__(self, functions: dict[GlobalVar, tvm.ir.BaseFunc]):
        self.callees: dict[GlobalVar, tirx.PrimFunc] = {}
        self._functions = functions
        self._bindings: list[relax.Binding] = []
        self._storages: list[relax.Var] = []
        self._instead: dict[GlobalVar, tuple[GlobalVar, list[relax.Var]]] = {}

    def function(self, function: relax.Function, name: str) -> relax.Function:
        function = copy_with_new_vars(function)
        for binding in bindings_of(function.body):
            value = binding.value
            operator = getattr(value, "op", None)
            kind = getattr(operator, "name", None)
            if kind in _KILLS:
                continue
            if isinstance(value, relax.If) or (
                isinstance(value, relax.Call)
                and not isinstance(operator, GlobalVar)
                and kind not in _ON_HOST
            ):
                raise ValueError(_refusal(f"{kind or operator or 'a condition'} in {name}"))
            if isinstance(operator, GlobalVar):
                callee, memory = self._callee(operator)
                if memory:
                    call = relax.Call(callee, [*value.args, *memory], ty_args=value.ty_args)
                    binding = relax.VarBinding(binding.var, call)
            self._bindings.append(binding)
            if kind == _STORAGE:
                self._storages.append(binding.var)
        storages = relax.Tuple(self._storages)
        result = relax.BlockBuilder().normalize(relax.Tuple([*function.body.body.fields, storages]))
        body = relax.SeqExpr([relax.BindingBlock(self._bindings)], result)
        body = normalized(function.params, body)
        made = relax.Function(function.params, body, result.ty, function.is_pure, function.attrs)
        made = made.without_attr(DONATED).without_attr(CAPTURED)
        return made.with_attr("global_symbol", name)

    def _callee(self, variable: GlobalVar) -> tuple[GlobalVar, list[relax.Var]]:
        """Return a function, and the memory between its kernels, which it takes.

        Otherwise a function takes this memory from a pool of its thread, which frees it when a
        function needs more.
        """
        if variable not in self._instead:
            function = self._functions[variable]
            root = getattr(function.body, "block", None)
            allocations: list[list] = []
            structural_walk(
                function.body, (SBlock, lambda block: allocations.append(_shared(block)))
            )
            buffers = [] if root is None else _shared(root)
            is_static = all(isinstance(n, tirx.IntImm) for each in buffers for n in each.shape)
            if not is_static or sum(map(len, allocations)) != len(buffers):
                raise ValueError(_refusal(f"memory of an unknown size in {variable.name_hint}"))
            self._instead[variable] = variable, []
            if buffers:
                name = variable.name_hint + GRAPH
                made = _taking(function, root, buffers, name)
                callee = relax.BlockBuilder().add_func(made, name)  # it has a type
                self.callees[callee] = made
                self._instead[variable] = callee, list(map(self._tensor, buffers))
        return self._instead[variable]

    def _tensor(self, buffer: tirx.Var) -> relax.Var:
        """Allocate the memory of a buffer."""
        dtype, shape = dtype_of(buffer.ty), relax.ShapeExpr(list(buffer.shape))
        size = math.prod(map(int, buffer.shape)) * max(1, tvm_ffi.dtype(dtype).itemsize)
        storage = relax.op.memory.alloc_storage(relax.ShapeExpr([size]), 0, "global", dtype)
        self._storages.append(self._bound("workspace_storage", storage))
        tensor = relax.op.memory.alloc_tensor(self._storages[-1], 0, shape, dtype)
        return self._bound("workspace", tensor)

    def _bound(self, name: str, value: relax.Expr) -> relax.Var:
        value = relax.BlockBuilder().normalize(value)
        self._bindings.append(relax.VarBinding(relax.Var(name, value.ty), value))
        return self._bindings[-1].var


def _shared(block: SBlock) -> list:
    """Return the buffers that a block allocates in the memory of the device."""
    return [buffer for buffer in block.alloc_buffers if buffer.scope() == "global"]


def _taking(function: tirx.PrimFunc, root: SBlock, buffers: Iterable, name: str) -> tirx.PrimFunc:
    """Return a function with further parameters instead of buffers that it allocates."""
    kept = [each for each in root.alloc_buffers if not any(map(each.same_as, buffers))]
    block = SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init, kept,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    realize = SBlockRealize(function.body.iter_values, function.body.predicate, block)
    params = [*function.params, *buffers]
    made = tirx.PrimFunc(params, realize, function.ret_type, attrs=function.attrs)
    return made.with_attr("global_symbol", name)


def _refusal(what: str) -> str:
    return f"a CUDA graph cannot have {what}; leave graph out"
