"""Functions that converters of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import fx
from tvm import relax, tirx


class Importer(Protocol):
    """What a converter takes from the importer, :class:`.._importer.Importer`."""

    block_builder: relax.BlockBuilder
    env: dict[fx.Node, Any]
    freezes_batch_norm: bool
    leaves: set[relax.Var] | None
    level: tuple[int, ...]
    levels: dict[fx.Node, tuple[int, ...]]
    seed: relax.Var | None

    def args(self, node: fx.Node) -> tuple: ...
    def branch(self, module: fx.GraphModule, operands: Sequence[relax.Expr]) -> relax.SeqExpr: ...
    def convert(self, node: fx.Node) -> None: ...
    def emit(self, expr: relax.Expr) -> relax.Var: ...
    def require(self, condition: tirx.Expr | bool, reason: str) -> None: ...
    def stream(self) -> int: ...
    def type_of(self, value: Any) -> relax.TensorType: ...


#: Takes the importer and a node, and returns an expression, or several for several results.
Converter: TypeAlias = "Callable[[Importer, fx.Node], Any]"


class Refused(Exception):
    """A node cannot be imported as PyTorch defines it; the message says why, and how to go on."""
