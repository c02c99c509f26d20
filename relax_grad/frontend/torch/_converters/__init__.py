"""Converters of PyTorch operators, one file per family.

A converter is a function ``(importer, node) -> relax.Expr`` under the name of the overload, such as
``"add.Tensor"``. An operator with several results has a tuple. An operator in these tables is
converted whole: torch.export does not decompose it. A converter raises :class:`Refused` where Relax
cannot compute the result of PyTorch.
"""

from __future__ import annotations

from ._support import Refused
from .activation import ACTIVATION
from .attention import ATTENTION
from .batch_norm import BATCH_NORM
from .comparison import COMPARISON
from .control import CONTROL
from .conv import CONV
from .creation import CREATION
from .elementwise import ELEMENTWISE
from .embedding import EMBEDDING
from .extremes import EXTREMES
from .image import IMAGE
from .indexing import INDEXING
from .linalg import LINALG
from .loss import LOSS
from .manipulate import MANIPULATE
from .matmul import MATMUL
from .norm import NORM
from .normal import NORMAL
from .pool import POOL
from .random import RANDOM
from .recurrent import RECURRENT
from .reduction import REDUCTION
from .sorting import SORTING
from .special import SPECIAL

__all__ = ["CONVERTERS", "Refused"]

CONVERTERS = {
    **ACTIVATION,
    **ATTENTION,
    **BATCH_NORM,
    **COMPARISON,
    **CONTROL,
    **CONV,
    **CREATION,
    **ELEMENTWISE,
    **EMBEDDING,
    **EXTREMES,
    **IMAGE,
    **INDEXING,
    **LINALG,
    **LOSS,
    **MANIPULATE,
    **MATMUL,
    **NORM,
    **NORMAL,
    **POOL,
    **RANDOM,
    **RECURRENT,
    **REDUCTION,
    **SORTING,
    **SPECIAL,
}
