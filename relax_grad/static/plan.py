"""The static plan of a training step: tensors at fixed places, and a list of calls of kernels.

A plan has four areas of memory. ``state`` holds what stays from step to step: parameters, states
and the optimizer's state. ``arena`` holds the inputs, intermediate tensors and results of a step;
tensors with disjoint lifetimes share bytes. ``constants`` holds the constants of the program, and
``workspace`` the buffers that kernels take and give back in the order of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import tvm

#: The alignment of tensors in bytes, which kernels may rely on.
ALIGNMENT = 64

STATE, ARENA, CONSTANTS = AREAS = ("state", "arena", "constants")


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor; a boolean takes one."""
    return prod(shape) * max(8, tvm.DataType(dtype).bits) // 8


@dataclass(frozen=True)
class Tensor:
    """A tensor at a place.

    Attributes
    ----------
    shape : tuple[int, ...]
        The extents.
    dtype : str
        The dtype.
    area : str
        ``"state"``, ``"arena"`` or ``"constants"``.
    offset : int
        The first byte within the area, a multiple of 64.
    """

    shape: tuple[int, ...]
    dtype: str
    area: str
    offset: int

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return bytes_of(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.area}+{self.offset} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Attributes
    ----------
    kernel : str
        The name of the kernel. The symbol of its machine code begins with ``__tvm_ffi_``.
    arguments : tuple[Tensor or int or float, ...]
        The operands, and after them the tensors that the kernel writes.
    """

    kernel: str
    arguments: tuple[Tensor | int | float, ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True)
class Move:
    """A copy after the calls: the new value of a tensor of the state that has another place.

    Attributes
    ----------
    source : Tensor
        The new value, in the arena.
    target : Tensor
        The tensor of the state.
    """

    source: Tensor
    target: Tensor

    def __str__(self) -> str:
        return f"move {self.source} to {self.target}"


@dataclass(frozen=True)
class Function:
    """A function of a step for inputs of one size.

    Attributes
    ----------
    name : str
        ``"step"``, ``"accumulate"``, or the name of the function for prediction.
    inputs : tuple[tuple[str, Tensor], ...]
        The inputs with their names, in the arena: the caller writes them before the calls.
    calls : tuple[Call, ...]
        The calls in their order.
    results : tuple[Tensor, ...]
        The results that the caller reads: of a step the loss, metrics and outputs.
    moves : tuple[Move, ...]
        The copies after the calls, which complete the update. A caller that rejects a step leaves
        them out.
    arena : int
        The bytes of the arena that the function uses.
    workspace : int
        The bytes of workspace that its calls need at most.
    """

    name: str
    inputs: tuple[tuple[str, Tensor], ...]
    calls: tuple[Call, ...]
    results: tuple[Tensor, ...]
    moves: tuple[Move, ...]
    arena: int
    workspace: int

    def lines(self) -> Iterator[str]:
        """Yield the lines of a description."""
        yield f"{self.name}: arena {self.arena} bytes, workspace {self.workspace} bytes"
        for name, tensor in self.inputs:
            yield f"  {name}: {tensor}"
        for call in (*self.calls, *self.moves):
            yield f"  {call}"
        yield f"  return {', '.join(map(str, self.results))}"


@dataclass(frozen=True)
class Plan:
    """A training step as tensors with fixed places and calls of kernels.

    Attributes
    ----------
    functions : tuple[Function, ...]
        The functions of the step, for inputs of one size after another.
    state : tuple[tuple[str, Tensor], ...]
        The tensors that stay from step to step, with their names ``GROUP/NAME``, in the order of
        the step's groups. All functions share them.
    constants : bytes
        The bytes of the area ``constants``.
    kernels : tvm.IRModule
        The kernels, lowered for LLVM's code generator.

    Examples
    --------
    >>> import tvm
    >>> from relax_grad.static.plan import Call, Function, Move, Plan, Tensor
    >>> weight = Tensor((3,), "float32", "state", 0)
    >>> new = Tensor((3,), "float32", "arena", 0)
    >>> calls = (Call("negative", (weight, new)),)
    >>> step = Function("step", (), calls, (new,), (Move(new, weight),), 64, 0)
    >>> print(Plan((step,), (("params/w", weight),), b"", tvm.IRModule({})))
    state 64 bytes, arena 64, workspace 0, constants 0
      params/w: state+0 float32[3]
    step: arena 64 bytes, workspace 0 bytes
      negative(state+0 float32[3], arena+0 float32[3])
      move arena+0 float32[3] to state+0 float32[3]
      return arena+0 float32[3]
    """

    functions: tuple[Function, ...]
    state: tuple[tuple[str, Tensor], ...]
    constants: bytes = field(repr=False)
    kernels: tvm.IRModule = field(repr=False, compare=False)

    @property
    def state_bytes(self) -> int:
        """The bytes of the area ``state``."""
        return max((aligned(tensor.offset + tensor.bytes) for _, tensor in self.state), default=0)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the area ``arena``."""
        return max(function.arena for function in self.functions)

    @property
    def workspace_bytes(self) -> int:
        """The bytes that kernels need besides the arena."""
        return max(function.workspace for function in self.functions)

    def __str__(self) -> str:
        lines = [
            f"state {self.state_bytes} bytes, arena {self.arena_bytes}, workspace "
            f"{self.workspace_bytes}, constants {len(self.constants)}",
            *(f"  {name}: {tensor}" for name, tensor in self.state),
        ]
        for function in self.functions:
            lines += function.lines()
        return "\n".join(lines)
