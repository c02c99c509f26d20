"""The differences between the supported TVM releases.

All other modules of the package import names that depend on the TVM release from here.
"""

from __future__ import annotations

import inspect
import struct
import sys
import warnings
from collections.abc import Callable
from functools import cache
from types import FrameType

import numpy as np

from .._packages import fault, installed_version, is_installed, parse_version

#: The half-open range of ``apache-tvm`` releases that the package was tested with.
TVM_RANGE = ((0, 26), (0, 28))

#: ``apache-tvm-ffi`` releases from this one on were not tested. Its binary interface is the
#: interface of TVM's build, and differs between releases.
FFI_END = (0, 1, 16)

#: The requirement to install instead.
FFI_REQUIREMENT = f"apache-tvm-ffi>=0.1.14.post0,<{'.'.join(map(str, FFI_END))}"

#: ``tvm.ir.save_json`` and ``copy.deepcopy`` of TVM's objects end the process from this release on.
#: relax_grad calls neither.
_SAVE_JSON_BAD_FROM = (0, 1, 15)


def check_versions(tvm_version: str, ffi_version: str | None) -> None:
    """Reject an unsupported TVM, and warn of a combination that was not tested.

    Parameters
    ----------
    tvm_version : str
        ``tvm.__version__`` of the running TVM.
    ffi_version : str or None
        The installed version of ``apache-tvm-ffi``; None when it is not known.

    Raises
    ------
    ImportError
        If the version of TVM lies outside :data:`TVM_RANGE`.
    """
    low, high = TVM_RANGE
    if not low <= parse_version(tvm_version) < high:
        raise ImportError(
            f"relax_grad needs apache-tvm {_wanted()}, but apache-tvm {tvm_version} is installed. "
            f"Install a supported one with: pip install 'apache-tvm{_wanted()}'"
        )
    if ffi_version is not None and parse_version(ffi_version) >= FFI_END:
        warnings.warn(
            f"apache-tvm-ffi {ffi_version} was not tested with apache-tvm {tvm_version}, whose "
            "binary interface is from an earlier release: it may end the process. Install a "
            f"tested release: pip install '{FFI_REQUIREMENT}'",
            RuntimeWarning,
            # the line that imports relax_grad: the import system's frames do not count
            stacklevel=5,
        )


def saves_json() -> bool:
    """Tell whether ``tvm.ir.save_json`` of the installed ``apache-tvm-ffi`` works."""
    version = installed_version("apache-tvm-ffi")
    return version is None or parse_version(version) < _SAVE_JSON_BAD_FROM


def _wanted() -> str:
    low, high = TVM_RANGE
    return f">={_dotted(low)},<{_dotted(high)}"


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _broken(error: Exception) -> str:
    """Return the message for an error of ``import tvm``."""
    names = ("apache-tvm", "apache-tvm-ffi")
    installed = [f"{name} {version}" for name in names if (version := installed_version(name))]
    verb = "are" if len(installed) > 1 else "is"
    found = f"{' and '.join(installed) or 'no apache-tvm'} {verb} installed"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    message = (
        f"relax_grad extends Apache TVM, which could not be imported ({reason}); {found}. "
        f"Install it with: pip install 'apache-tvm{_wanted()}'"
    )
    of_torch = fault("torch") if is_installed("torch") else None
    if of_torch is None or isinstance(error, ModuleNotFoundError):
        return message
    return f"TVM imports PyTorch, and {of_torch[0]}; {of_torch[1]}"


def _check_running_versions() -> None:
    try:
        import tvm
    except Exception as error:  # a broken library raises OSError, and TVM imports PyTorch
        raise ImportError(_broken(error)) from error
    check_versions(tvm.__version__, installed_version("apache-tvm-ffi"))


_check_running_versions()

import tvm  # noqa: E402
import tvm_ffi  # noqa: E402
from tvm.runtime.script_printer import PrinterConfig  # noqa: E402
from tvm.s_tir import slayout  # noqa: E402
from tvm_ffi import structural_equal, structural_hash  # noqa: E402

try:  # 0.27 and later
    from tvm.ir import GenericConst, StringImm
    from tvm.ir import TensorLoad as BufferLoad
    from tvm.s_tir import SBlock, SBlockRealize
    from tvm.sym import Analyzer, IntervalSet, detect_linear_equation

    _CONSTANT, _LOADED = (GenericConst, "value"), "source"
except ImportError:  # 0.26
    from tvm.arith import Analyzer, IntervalSet, detect_linear_equation
    from tvm.relax import Constant
    from tvm.tirx import BufferLoad, SBlock, SBlockRealize, StringImm

    _CONSTANT, _LOADED = (Constant, "data"), "buffer"


def constant_value(expr: object) -> np.ndarray | None:
    """Return the value of a constant tensor, or None for any other expression."""
    value = getattr(expr, _CONSTANT[1]) if isinstance(expr, _CONSTANT[0]) else None
    return value.numpy() if isinstance(value, tvm.runtime.Tensor) else None


def constant_tensor(expr: object) -> tvm.runtime.Tensor | None:
    """Return the tensor of a constant without a copy, or None for any other expression."""
    value = getattr(expr, _CONSTANT[1]) if isinstance(expr, _CONSTANT[0]) else None
    return value if isinstance(value, tvm.runtime.Tensor) else None


def constants_of(node: object) -> list[tvm.runtime.Tensor]:
    """Return the constant tensors of a module or an expression."""
    found: list[object] = []
    structural_walk(node, (_CONSTANT[0], found.append))
    return [value for value in map(constant_tensor, found) if value is not None]


def constant_bits(node: object) -> list[bytes]:
    """Return the bits of the floating-point immediates and of the constant tensors of an
    expression, in the order of the visit."""
    found: list[bytes] = []

    def add(constant: object) -> None:
        value = constant_tensor(constant)
        if value is not None:
            found.append(value.numpy().tobytes())
        elif isinstance(constant, tvm.tirx.FloatImm):
            found.append(struct.pack("<d", constant.value))

    structural_walk(node, ((tvm.tirx.FloatImm, _CONSTANT[0]), add))
    return found


_print = tvm.get_global_func("node.TVMScriptPrinterScript")
_PLAIN = PrinterConfig()


def script_of(function: tvm.tirx.PrimFunc) -> str:
    """Return the script of a function, as its method ``script`` in half of the time: the options of
    the printer are made once."""
    return str(_print(function, _PLAIN))


def remap_variable(
    mutator: tvm.relax.PyExprMutator, old: tvm.relax.Var, new: tvm.relax.Var
) -> None:
    """Let a mutator replace later uses of ``old`` by ``new``."""
    mutator.set_var_remap(
        getattr(old, "vid", old), new
    )  # 0.26 takes the identity of the old variable


def map_constants(expr: tvm.relax.Expr, function: Callable) -> tvm.relax.Expr:
    """Return an expression with each constant tensor replaced by ``function(constant)``."""
    from tvm.relax.expr_functor import PyExprMutator, mutator

    def visit(self: PyExprMutator, constant: tvm.relax.Expr) -> tvm.relax.Expr:
        return constant if constant_tensor(constant) is None else function(constant)

    name = (
        "visit_generic_const_"
        if hasattr(PyExprMutator, "visit_generic_const_")
        else "visit_constant_"
    )
    return mutator(type("_Constants", (PyExprMutator,), {name: visit}))().visit_expr(expr)


def loaded_buffer(load: tvm.runtime.Object) -> tvm.tirx.Buffer:
    """Return the buffer that a load reads."""
    return getattr(load, _LOADED)


def dtype_of(tensor_type: tvm.relax.TensorType) -> str:
    """Return the dtype of a tensor type as a string. Some types hold the dtype inside another
    type."""
    return str(getattr(tensor_type.dtype, "dtype", tensor_type.dtype))


#: The numbers of the orders of visits in ``tvm_ffi``.
_ORDERS = {"pre": 0, "post": 1}


@cache
def _type_index(kind: type) -> int:
    """Return the number of a class of objects."""
    return kind.__tvm_ffi_type_info__.type_index  # type: ignore[attr-defined]


def _direct(name: str, public: Callable) -> Callable:
    """Return a structural function of ``tvm_ffi`` without the checks of its rules.

    The function takes a rule, ``(class, callback)`` or ``((class, ...), callback)``, or a list of
    rules. The public function derives the number of each class from an annotation in each call,
    which takes longer than the visit of a small expression.
    """
    call = tvm_ffi.get_global_func(f"ffi.{name}", allow_missing=True)
    try:
        call(0, [], [], 0)
    except Exception:  # a release whose function takes other arguments, or has another name
        return public

    def function(root: object, rules: tuple | list[tuple], order: str = "post") -> object:
        entries = [
            (_type_index(kind), callback)
            for kinds, callback in (rules if type(rules) is list else (rules,))
            for kind in (kinds if type(kinds) is tuple else (kinds,))
        ]
        return call(root, entries, [], _ORDERS[order])

    return function


structural_map = _direct("StructuralMap", tvm_ffi.structural_map)
structural_walk = _direct("StructuralWalk", tvm_ffi.structural_walk)

#: Whether ``tvm_ffi.structural_map`` supports Relax functions. In 0.26 they cannot be copied node
#: by node.
MAPS_FUNCTIONS = hasattr(tvm.tirx.op, "masked_load")  # 0.27 and later


def shapes_differ(actual: tvm.relax.Type, expected: tvm.relax.Type) -> bool:
    """Tell whether two tensor types provably differ in rank or in an extent."""
    if -1 not in (actual.ndim, expected.ndim) and actual.ndim != expected.ndim:
        return True
    if not all(isinstance(ty.shape, tvm.relax.ShapeExpr) for ty in (actual, expected)):
        return False
    if structural_equal(actual.shape, expected.shape):  # the usual case, and faster than a proof
        return False
    analyzer = Analyzer()
    return any(
        analyzer.can_prove(a != b)
        for a, b in zip(actual.shape.values, expected.shape.values, strict=True)
    )


def shapes_agree(actual: tvm.relax.Type, expected: tvm.relax.Type) -> bool:
    """Tell whether two types are tensor types with provably equal extents."""
    if not all(
        isinstance(ty, tvm.relax.TensorType) and isinstance(ty.shape, tvm.relax.ShapeExpr)
        for ty in (actual, expected)
    ):
        return False
    analyzer = Analyzer()
    return actual.ndim == expected.ndim and all(
        analyzer.can_prove_equal(a, b)
        for a, b in zip(actual.shape.values, expected.shape.values, strict=True)
    )


def shapes_may_differ(actual: tvm.relax.Type, expected: tvm.relax.Type) -> bool:
    """Tell whether two tensor types may differ in rank or in an extent.

    Two extents that are each a symbol or a number differ unless they are provably equal. Other
    expressions differ only if this is provable, because their equality cannot be proved in general.
    """
    if not all(isinstance(ty.shape, tvm.relax.ShapeExpr) for ty in (actual, expected)):
        return shapes_differ(actual, expected)
    if structural_equal(actual.shape, expected.shape):
        return False
    if shapes_differ(actual, expected):
        return True
    plain, analyzer = (tvm.tirx.Var, tvm.tirx.IntImm), Analyzer()
    return any(
        isinstance(a, plain) and isinstance(b, plain) and not analyzer.can_prove_equal(a, b)
        for a, b in zip(actual.shape.values, expected.shape.values, strict=True)
    )


_LAYOUT_KEY = slayout("A").__tvm_ffi_type_info__.type_key


def layout_decision(layout: str | None) -> tvm.ir.Node:
    """Return ConvertLayout's record for a tensor: its axes in order, ``"ACDB"`` for NHWC that was
    NCHW.

    The layout of a 0-d tensor is ``""``; for a value that is no tensor it is None.
    """
    if layout == "":  # slayout treats it as no layout
        axes = tvm.ir.make_node(_LAYOUT_KEY, name="", axes=[])
    else:
        axes = layout and slayout(layout)
    return tvm.ir.make_node(
        "relax.transform.LayoutDecision", layout=axes, is_unknown_dim=layout is None
    )


def decided_layout(decision: tvm.runtime.Object) -> str | None:
    """Return the name of the layout in a decision of ConvertLayout; see :func:`layout_decision`."""
    if decision.is_unknown_dim:
        return None
    return decision.layout.name if decision.layout is not None else ""


def infer_layout_output(
    input_layouts: list, output_layouts: list, attrs: tvm.ir.Attrs | None, new_args: dict
) -> tvm.ir.Node:
    """Return the result of a layout inference in the form that ConvertLayout expects.

    Parameters
    ----------
    input_layouts, output_layouts : list
        A decision for each argument, and for each result; for a tuple, a list of decisions.
    attrs : Attrs or None
        The attributes of the converted call.
    new_args : dict[int, Expr]
        Replacements of arguments, by position.
    """
    return tvm.ir.make_node(
        "relax.transform.InferLayoutOutput",
        input_layouts=input_layouts,
        output_layouts=output_layouts,
        new_attrs=attrs,
        new_args={tvm.tirx.IntImm("int64", i): expr for i, expr in new_args.items()},
    )


def replace_attrs(attrs: tvm.ir.Attrs, **changes: object) -> tvm.ir.Attrs:
    """Return a copy of an attributes node with some fields changed."""
    info = attrs.__tvm_ffi_type_info__
    fields = {field.name: getattr(attrs, field.name) for field in info.fields}
    return tvm.ir.make_node(info.type_key, **{**fields, **changes})


def types_differ(actual: tvm.relax.Type, expected: tvm.relax.Type) -> bool:
    """Tell whether two types provably differ: one is no tensor, or the dtypes, ranks or extents
    differ."""
    if isinstance(expected, tvm.relax.TupleType):
        return (
            not isinstance(actual, tvm.relax.TupleType)
            or len(actual.fields) != len(expected.fields)
            or any(map(types_differ, actual.fields, expected.fields))
        )
    if not isinstance(expected, tvm.relax.TensorType):
        return False
    if not isinstance(actual, tvm.relax.TensorType):
        return not isinstance(actual, tvm.relax.ObjectType)  # which may be any value
    if (
        actual.dtype is not None
        and expected.dtype is not None
        and dtype_of(actual) != dtype_of(expected)
    ):
        return True
    return shapes_differ(actual, expected)


def applies_softmax(attrs: tvm.ir.Attrs) -> bool:
    """Tell whether a multibox_transform_loc applies softmax to the scores. In 0.26 all of them
    do."""
    return bool(getattr(attrs, "apply_softmax", True))


def masked_load(
    buffer: tvm.tirx.Buffer, ramp: tvm.tirx.Ramp, mask: tvm.tirx.PrimExpr
) -> tvm.tirx.PrimExpr:
    """Return the lanes of a buffer that a mask selects; the others are undefined."""
    if hasattr(tvm.tirx.op, "masked_load"):  # 0.27 and later
        lanes = int(ramp.lanes)
        return tvm.tirx.op.masked_load(f"{buffer.dtype}x{lanes}", buffer, ramp, mask)
    return tvm.tirx.BufferLoad(buffer, [ramp], mask)


def masked_store(
    buffer: tvm.tirx.Buffer, value: tvm.tirx.PrimExpr, ramp: tvm.tirx.Ramp, mask: tvm.tirx.PrimExpr
) -> None:
    """Emit a statement that stores the lanes that a mask selects."""
    import tvm.tirx.script.builder as builder

    if hasattr(tvm.tirx.op, "masked_store"):  # 0.27 and later
        builder.evaluate(tvm.tirx.op.masked_store(buffer, value, ramp, mask))
    else:
        builder.buffer_store(buffer, value, [ramp], mask)


def set_type(expr: tvm.relax.Expr, ty: tvm.relax.Type) -> None:
    """Set the type of an expression without a type, as TVM's normalizer does."""
    tvm.relax.expr._update_type(expr, ty)


def links_external_modules() -> bool:
    """Tell whether the running ``tvm.relax.build``, if there is one, finds functions of external
    modules.

    ``build`` does not pass its options to the pipeline, so that this function reads them from its
    frame on the stack. Without the virtual machine's bytecode, only TVM's own functions are found.
    With another pipeline for tensor functions, or for a system library, ``build`` must compile the
    functions itself.
    """
    code = tvm.relax.vm_build.build.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return True
    options = frame.f_locals
    return (
        options.get("exec_mode", "bytecode") == "bytecode"
        and options.get("tir_pipeline", "default") in (None, "default")
        and not options.get("system_lib")
    )


#: Whether multibox_transform_loc has the parameter ``apply_softmax``.
CAN_LEAVE_SOFTMAX_OUT = (
    "apply_softmax" in inspect.signature(tvm.relax.op.vision.multibox_transform_loc).parameters
)


__all__ = [
    "CAN_LEAVE_SOFTMAX_OUT",
    "MAPS_FUNCTIONS",
    "Analyzer",
    "BufferLoad",
    "IntervalSet",
    "SBlock",
    "SBlockRealize",
    "StringImm",
    "applies_softmax",
    "check_versions",
    "constant_bits",
    "constant_tensor",
    "constant_value",
    "constants_of",
    "decided_layout",
    "detect_linear_equation",
    "dtype_of",
    "infer_layout_output",
    "installed_version",
    "layout_decision",
    "links_external_modules",
    "loaded_buffer",
    "map_constants",
    "masked_load",
    "masked_store",
    "parse_version",
    "replace_attrs",
    "saves_json",
    "script_of",
    "set_type",
    "shapes_agree",
    "shapes_differ",
    "shapes_may_differ",
    "structural_hash",
    "structural_map",
    "structural_walk",
    "types_differ",
]
