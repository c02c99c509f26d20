"""The operators of PyTorch that write to their operands: each is imported, or refused with a
reason.

torch.export replaces a write by the operator without it, whose result takes the place of the
operand. An operator that is in no table here is refused.
"""

from __future__ import annotations

from torch import fx


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators ``name_``, and the operators ``name`` with ``out=``: the operator ``name`` computes the
#: new value.
VALUES = _names(
    """
    __iand__ __ilshift__ __ior__ __irshift__ __ixor__ _add_relu_ _index_put_impl_ abs_ absolute_
    acos_ acosh_ add_ addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_ alpha_dropout_ arccos_
    arccosh_ arcsin_ arcsinh_ arctan2_ arctan_ arctanh_ asin_ asinh_ atan2_ atan_ atanh_ baddbmm_
    bernoulli_ bitwise_and_ bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift_
    bitwise_xor_ cauchy_ ceil_ celu_ clamp_ clamp_max_ clamp_min_ clip_ conj_physical_ copy_
    copysign_ cos_ cosh_ cumprod_ cumsum_ deg2rad_ digamma_ div_ divide_ dropout_ elu_
    embedding_renorm_ eq_ erf_ erfc_ erfinv_ exp2_ exp_ expm1_ exponential_ feature_alpha_dropout_
    feature_dropout_ fill_ fill_diagonal_ fix_ float_power_ floor_ floor_divide_ fmod_ frac_ gcd_
    ge_ gelu_ geometric_ greater_ greater_equal_ gt_ hardsigmoid_ hardswish_ hardtanh_ heaviside_
    hypot_ i0_ igamma_ igammac_ index_add_ index_copy_ index_fill_ index_put_ index_reduce_ lcm_
    ldexp_ le_ leaky_relu_ lerp_ less_ less_equal_ lgamma_ log10_ log1p_ log2_ log_ log_normal_
    logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_ masked_fill_ masked_scatter_
    mish_ mul_ multiply_ mvlgamma_ nan_to_num_ ne_ neg_ negative_ nextafter_ normal_ not_equal_
    pow_ put_ rad2deg_ random_ reciprocal_ relu6_ relu_ remainder_ renorm_ round_ rrelu_
    rrelu_with_noise_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ selu_ sgn_ sigmoid_ sign_ silu_
    sin_ sinc_ sinh_ sqrt_ square_ sub_ subtract_ tan_ tanh_ threshold_ tril_ triu_ true_divide_
    trunc_ uniform_ xlogy_ zero_
    """
)

#: The same for lists of tensors.
LISTS = _names(
    """
    _foreach_abs_ _foreach_acos_ _foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_asin_
    _foreach_atan_ _foreach_ceil_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_copy_
    _foreach_cos_ _foreach_cosh_ _foreach_div_ _foreach_erf_ _foreach_erfc_ _foreach_exp_
    _foreach_expm1_ _foreach_floor_ _foreach_frac_ _foreach_lerp_ _foreach_lgamma_ _foreach_log10_
    _foreach_log1p_ _foreach_log2_ _foreach_log_ _foreach_maximum_ _foreach_minimum_ _foreach_mul_
    _foreach_neg_ _foreach_pow_ _foreach_reciprocal_ _foreach_round_ _foreach_rsqrt_
    _foreach_sigmoid_ _foreach_sign_ _foreach_sin_ _foreach_sinh_ _foreach_sqrt_ _foreach_sub_
    _foreach_tan_ _foreach_tanh_ _foreach_trunc_ _foreach_zero_
    """
)

#: Operators among them after which the operand has the gradient that it had before.
KEEPING = _names("logical_and_ logical_not_ logical_or_ logical_xor_")

#: Operators that change the shape of the operand and write no values.
VIEWS = _names("as_strided_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_")

#: Operators that change whether a tensor has a gradient: see :mod:`._aliases` and the tracer.
FLAGS = _names("detach_ requires_grad_ retain_grad")

#: Operators that write statistics or noise beside their result.
STATISTICS = _names("_batch_norm_with_update _native_batch_norm_legit rrelu_with_noise")

_MEMORY = "the tensor gets other memory; assign a new tensor to the variable"
_SPARSE = "sparse tensors are not imported; use dense ones"
_OPTIMIZER = "the steps of optimizers are not imported; relax_grad.training has optimizers"
_OBSERVER = "observers of quantisation are not imported; train before the quantisation"
_KERNEL = "it is a part of one of PyTorch's kernels; call the public function"
_SCRIPT = "TorchScript is not imported; give the module of Python"

#: The reasons for which the other operators are refused.
REFUSED = {
    **dict.fromkeys(("set_", "set_data", "shallow_copy_data_"), _MEMORY),
    **dict.fromkeys(("resize_", "resize_as_", "_resize_output_"), _MEMORY),
    **dict.fromkeys(
        (
            *("_coalesced_", "copy_sparse_to_sparse_", "resize_as_sparse_", "sparse_resize_"),
            "sparse_resize_and_clear_",
        ),
        _SPARSE,
    ),
    **dict.fromkeys(
        (
            *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"),
            *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        ("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"), _OBSERVER
    ),
    **dict.fromkeys(
        (
            *("_cummax_helper", "_cummin_helper", "_fill_mem_eff_dropout_mask_"),
            *("_cudnn_attention_forward_no_dropout_inplace", "_scaled_addmm_"),
            *("_flash_attention_forward_no_dropout_inplace", "_mkldnn_transpose_"),
            *("_philox_normal_", "_philox_randint_", "_philox_uniform_", "_sobol_engine_ff_"),
            *("_sobol_engine_initialize_state_", "_sobol_engine_scramble_"),
            *("fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation"),
        ),
        _KERNEL,
    ),
    **dict.fromkeys(
        (
            *("_no_grad_fill_", "_no_grad_normal_", "_no_grad_uniform_", "_no_grad_zero_"),
            *("remove", "sort"),  # of lists
        ),
        _SCRIPT,
    ),
    "polygamma_": "PyTorch has no form of it without the write; assign torch.polygamma(n, data)",
    "rename_": "names of dimensions are not imported; leave them out",
    "record_stream": "streams of other devices are not imported",
}


def name_of(target: fx.node.Target) -> str:
    """Return the name of an operator without the overload."""
    return target._schema.name.partition("::")[2]


def is_known(name: str, has_out: bool) -> bool:
    """Tell whether an operator that writes is in one of the tables; all ``out=`` of imported
    operators are."""
    return has_out or name in VALUES | LISTS | VIEWS | FLAGS | STATISTICS or name in REFUSED


def refusal(target: fx.node.Target) -> str | None:
    """Return the reason for which an operator that writes cannot be imported, or None."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    name, has_out = name_of(target), any(argument.is_out for argument in schema.arguments)
    if name in REFUSED:
        return REFUSED[name]
    if target.namespace == "aten" and is_known(name, has_out):
        return None
    return "it writes to its operands, and this version does not know how; compute a new tensor"


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values a node changes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or name_of(node.target) in VIEWS | FLAGS:
        return []
    operands = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    operands.update(node.kwargs)
    written: list[fx.Node] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = operands.get(argument.name)
            value = value if isinstance(value, (list, tuple)) else [value]
            written += [operand for operand in value if isinstance(operand, fx.Node)]
    return written
