"""The compiled functions of a module in one mode."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from ...._progress import shown
from ....ir.compat import dtype_of
from ....ir.extent_checks import extent_checks
from ....ir.index_ranges import index_ranges
from ....ir.signature import Signature
from .._imported import Imported
from ..model import import_for_wrap
from ..tracing.wrapper import TENSOR
from .compiled import ALIGNMENT, Compiled, Run, compiled, plain
from .examples import Examples
from .guards import Guards
from .place import Place, noting_autocast, traced_on_cpu

#: The constants that a module may return beside tensors.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Options:
    """The arguments of :func:`wrap` besides the module and the examples."""

    def __init__(
        self,
        target: tvm.target.Target,
        compile_options: Mapping[str, object] | None,
        dynamic_shapes: Mapping | Sequence | None,
        custom_convert_map: Mapping[str, Callable] | None,
    ):
        self.target = str(target)  # a target cannot be copied by deepcopy
        self.compile_options = dict(compile_options or {})
        self.dynamic_shapes = dynamic_shapes
        self.custom_convert_map = custom_convert_map

    def compiled(
        self, imported: Imported, signature: Signature, wrt: Sequence[int], place: Place
    ) -> Compiled:
        target = tvm.target.Target(self.target)
        return compiled(imported, signature, wrt, place, target, self.compile_options)


class Program:
    """The functions of a module in one mode."""

    def __init__(self, module: nn.Module, examples: Examples, options: Options):
        with (
            shown("importing the module"),
            traced_on_cpu(module),
            noting_autocast() as regions,
        ):
            self._imported, (self._spec, leaves), reads = import_for_wrap(
                module, examples.inputs, options.dynamic_shapes, options.custom_convert_map
            )
        self.enters_autocast = bool(regions)
        self.guards = Guards(list(module.modules()), reads)
        for leaf in leaves:
            if leaf is not TENSOR and not isinstance(leaf, _CONSTANTS):
                raise ValueError(
                    f"the module returns a {type(leaf).__name__}, which a wrapped module cannot: "
                    "return tensors and constants in tuples, lists and dicts (models of "
                    "transformers: use_cache=False)"
                )
        self._leaves = leaves
        self._is_tensor = self._spec.is_leaf() and leaves[0] is TENSOR
        self._options = options
        imported = self._imported
        groups = imported.params, imported.frozen, imported.states
        function = imported.module["training"]
        self._signature = Signature.of_import(function, *groups, has_seed=True)
        self._names = self._signature.names
        self.keys = self._names[self._signature.num_inputs :]
        self._types = [param.ty for param in function.params]
        self._input_types = [self._types[at] for at in self._signature.batch.values()]
        # The positions of the arguments that may need a gradient, and of the states.
        self._differentiable = [
            *self._signature.batch.values(),
            *self._signature.params.values(),
        ]
        self._states = [*self._signature.states.values()]
        self._is_random = function.params[0] in relax.analysis.free_vars(function.body)
        self._expected = [
            (name, getattr(torch, dtype_of(kind)), _extents(kind))
            for name, kind in imported.inputs.items()
        ]
        self._sizes = [
            None if None in extents else torch.Size(extents) for _, _, extents in self._expected
        ]
        self._compiled: dict[tuple[Place, tuple[bool, ...]], Compiled] = {}
        self._lock = threading.Lock()
        names = list(imported.inputs)
        self._checks = extent_checks(imported.module, "training")
        ranges = index_ranges(imported.module, "training", names)
        self._ranges = [(names.index(index_range.input), index_range) for index_range in ranges]
        # The values are the module's at each call.
        for group in groups:
            group.update(dict.fromkeys(group))

    def check(self, inputs: Sequence[torch.Tensor], place: Place) -> None:
        """Raise an error if an input does not fit, or the module cannot run now."""
        place.check(self.enters_autocast)
        for tensor, size, (name, dtype, extents) in zip(
            inputs, self._sizes, self._expected, strict=True
        ):
            shape = tensor.shape
            if (
                not place.has(tensor)
                or tensor.dtype is not dtype
                or tensor.layout is not torch.strided
                or (
                    shape != size
                    if size is not None
                    else len(shape) != len(extents)
                    or any(e is not None and n != e for n, e in zip(shape, extents, strict=True))
                )
            ):
                kind = self._types[self._signature.batch[name]]
                raise ValueError(_misfit(name, tensor, dtype, kind, place))
        if self._ranges or self._checks:
            symbols = {
                extent.name: n
                for tensor, kind in zip(inputs, self._input_types, strict=True)
                for n, extent in zip(tensor.shape, kind.shape.values, strict=True)
                if isinstance(extent, tirx.Var)
            }
            for check in self._checks:
                check.check(symbols)
            for at, index_range in self._ranges:
                if isinstance(index_range.extent, int) or index_range.extent in symbols:
                    index_range.check(inputs[at].detach().cpu().numpy(), symbols)

    def run(self, inputs: list[torch.Tensor], tensors: list[torch.Tensor], place: Place) -> object:
        """Run the function, and return its outputs in their structure."""
        seed = place.seed() if self._is_random else place.unused_seed
        operands = [seed, *inputs, *tensors]  # in the order of the signature
        if not place.is_cpu and not all(map(place.has, operands)):
            self._explain(operands, place, None)
        candidates = [operands[at] for at in self._differentiable]
        needs = (
            tuple([tensor.requires_grad for tensor in candidates])
            if torch.is_grad_enabled()
            else ()
        )
        tracked = list(itertools.compress(candidates, needs))
        if not tracked:
            needs = ()
        functions = self._compiled.get((place, needs))
        if functions is None:
            functions = self._functions(needs, place)
        # Most tensors are as they must be, and a function call for each would take longer than the
        # test.
        arguments = [
            tensor
            if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT
            else plain(tensor)
            for tensor in operands
        ]
        states: list[torch.Tensor] = []
        try:
            if functions.backward is None:
                outputs, states, _ = functions.run(arguments)
            else:
                outputs = Run.call(functions, arguments, states, *tracked)
        except Exception as error:
            self._explain(operands, place, error)
            raise
        if states:
            torch._foreach_copy_([operands[at] for at in self._states], states)
        if self._is_tensor:
            return outputs[0]
        rest = iter(outputs)
        leaves = [next(rest) if leaf is TENSOR else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def _functions(self, needs: tuple[bool, ...], place: Place) -> Compiled:
        """Compile the functions for the arguments that need a gradient."""
        with self._lock:  # one of several threads compiles
            functions = self._compiled.get((place, needs))
            if functions is None:
                wrt = list(itertools.compress(self._differentiable, needs))
                with shown("compiling the module"):
                    functions = self._options.compiled(self._imported, self._signature, wrt, place)
                self._compiled[place, needs] = functions
        return functions

    def _explain(
        self, operands: Sequence[torch.Tensor], place: Place, error: Exception | None
    ) -> None:
        """Raise an error that names the tensor that does not fit, if there is one."""
        extents: dict[tirx.Var, tuple[int, str]] = {}
        for name, kind, tensor in zip(self._names, self._types, operands, strict=True):
            dtype, shape = getattr(torch, dtype_of(kind)), _extents(kind)
            fits = place.has(tensor) and tensor.dtype is dtype and tensor.ndim == len(shape)
            if not fits or any(
                e is not None and n != e for n, e in zip(tensor.shape, shape, strict=True)
            ):
                raise ValueError(_misfit(name, tensor, dtype, kind, place)) from error
            for n, extent in zip(tensor.shape, kind.shape.values, strict=True):
                if isinstance(extent, tirx.Var):
                    first, other = extents.setdefault(extent, (n, name))
                    if first != n:
                        raise ValueError(
                            f"the symbolic extent {extent.name} is {first} in {other}, but {n} "
                            f"in {name}"
                        ) from error


def _extents(kind: relax.TensorType) -> list[int | None]:
    """Return the extents of a type, with None for symbolic ones."""
    return [int(n) if isinstance(n, tirx.IntImm) else None for n in kind.shape.values]


def _misfit(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, kind: relax.TensorType, place: Place
) -> str:
    if not place.has(tensor) or tensor.layout is not torch.strided:
        return (
            f"{name} is a tensor of layout {tensor.layout} on the device {tensor.device}, but "
            "the compiled functions take dense "
            f'tensors on {place}; move it by .to("{place.device}")'
        )
    extents = zip(_extents(kind), kind.shape.values, strict=True)
    shape = ", ".join(str(extent if n is None else n) for n, extent in extents)
    return (
        f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the functions "
        f"were compiled for ({shape}) and {dtype}; give such a tensor, or wrap the module again "
        "(dynamic_shapes makes extents symbolic)"
    )
