"""Adam of relax.training cannot make its state with NumPy 2.3 and later.

The documentation of Optimizer.dtype calls it a string, but it is the type of the parameters, from
which these releases of NumPy make no dtype (TypeError). Earlier ones warn of it.

Seen: AssertionError
"""

from tvm import relax
from tvm.relax.training.optimizer import SGD, Adam

weight = relax.Var("weight", relax.TensorType((3, 4), "float32"))
dtype = SGD(0.1).init(weight).dtype
assert isinstance(dtype, str), dtype
Adam(0.1).init(weight)
