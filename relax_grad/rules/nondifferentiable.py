"""The operators without a gradient, and the reasons.

If the result of an operator does not depend on its arguments, or not continuously, it counts as a
constant: its gradient is zero, and no code is emitted for it. If the result does depend on the
arguments, in a way that no rule can know, a gradient that reaches the operator is an error.
"""

from __future__ import annotations

from ..registry import register_nondifferentiable

INTEGER = "the result consists of integers, booleans or indices"
FLAT = "piecewise constant: the derivative is 0 wherever it exists"
CONSTANT = "the result does not depend on the values of a floating-point tensor"
RANDOM = "the result is drawn at random"
SIDE_EFFECT = "called for its side effect; it returns nothing"
SELECTION = "selects elements by comparisons, in a number that is known at run time only"
OPAQUE = "the function that is called is opaque to TVM"
INTERNAL = "internal to the compiler or the runtime: it is introduced after differentiation"
MARKER = "marks its argument as a constant for the gradient"
ONCE = "the operation that computes it defines its first derivative only"
DISTRIBUTED = "introduced when a function is distributed over devices, after differentiation"

#: Operators that count as constants.
_CONSTANTS = {
    INTEGER: """
        argmax argmin argsort bucketize nonzero
        isfinite isinf isnan logical_and logical_not logical_or logical_xor
        bitwise_and bitwise_not bitwise_or bitwise_xor left_shift right_shift
        shape_of shape_to_tensor size tensor_to_shape
        inspect.tensor_byte_offset inspect.tensor_dtype_bits inspect.tensor_dtype_code
        inspect.tensor_dtype_lanes inspect.tensor_elem_offset inspect.tensor_ndim
        inspect.tensor_shape_i inspect.tensor_stride_i
        vision.all_class_non_max_suppression
    """,
    FLAT: "ceil floor floor_divide round sign trunc",
    CONSTANT: "arange eye eye_like hamming_window null_value one_hot",
    MARKER: "grad.no_grad grad.stop_gradient",
    RANDOM: "multinomial_from_uniform",
    SIDE_EFFECT: "assert_op print memory.kill_storage memory.kill_tensor vm.kill_object",
}

#: Operators that count as constants and for which TVM has a rule.
_STOCK = {
    INTEGER: "equal greater greater_equal less less_equal not_equal",
    CONSTANT: "ones ones_like zeros zeros_like",
}

#: Operators whose result may depend on floating-point arguments: a gradient that reaches it is an
#: error.
_REFUSED = {
    SELECTION: "unique vision.get_valid_counts vision.non_max_suppression",
    OPAQUE: """
        call_builtin_with_ctx call_dps_packed call_inplace_packed call_pure_packed call_py_func
        invoke_closure invoke_pure_closure make_closure
    """,
    INTERNAL: """
        builtin.alloc_tensor memory.alloc_storage memory.alloc_tensor memory.ensure_zero_offset
        memory.view vm.alloc_storage vm.alloc_tensor vm.call_tir_dyn
    """,
    ONCE: "grad.differentiable_once",
    DISTRIBUTED: "dist.call_tir_local_view dist.redistribute",
}

_REMEDIES = {
    SELECTION: "select by indices instead, with relax.take or relax.gather_elements",
    OPAQUE: "register a gradient for it: relax.call_tir_with_grad takes one by name, and "
    "relax.op.register_gradient one for the operator",
    INTERNAL: "differentiate the function before it is lowered",
    ONCE: "let its backward function compute from the inputs and the outputs only, without "
    "once_differentiable",
    DISTRIBUTED: "differentiate the function before it is distributed",
}

for _reason, _names in _CONSTANTS.items():
    for _name in _names.split():
        register_nondifferentiable(f"relax.{_name}", _reason)
for _reason, _names in _STOCK.items():
    for _name in _names.split():
        register_nondifferentiable(f"relax.{_name}", _reason, stock=True)
for _reason, _names in _REFUSED.items():
    for _name in _names.split():
        register_nondifferentiable(f"relax.{_name}", _reason, remedy=_REMEDIES[_reason])
