"""The function that checks arguments against a table, in LLVM IR."""

from __future__ import annotations

#: The name of the function that checks the arguments of a call against a table, and runs machine
#: code. It takes TVM's four arguments, the table and the code.
ENTER = "@relax_grad_enter"

#: The type of an entry of the table: name, number, shape and dtype as text, extents, rank, dtype
#: (code, bits, lanes).
PARAMETER = "%relax_grad_parameter"

#: The type of a table: parameters, their number as text, the signature as text, the largest values
#: of symbolic extents, and the number of parameters.
TABLE = "%relax_grad_table"

#: The most symbolic extents of one function.
MOST_SYMBOLS = 16


#: Each byte in the syntax of string constants of LLVM IR.
_ESCAPED = [
    chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in range(256)
]


def string(text: str) -> str:
    """Return a string constant that ends with a zero byte."""
    data = text.encode() + b"\0"
    return f'[{len(data)} x i8] c"{"".join(map(_ESCAPED.__getitem__, data))}"'


def check() -> list[str]:
    """Return the definitions of the function that checks arguments and of its messages."""
    texts = {
        "TypeError": "TypeError",
        "ValueError": "ValueError",
        "none": "",
        "expected_count": "Expected ",
        "arguments": " arguments",
        "calling": " when calling:\n  `",
        "mismatched": "Mismatched ",
        "type": "type on argument #",
        "shape": ".shape on argument #",
        "dtype": ".dtype on argument #",
        "device": ".device_type on argument #",
        "strides": ".strides on argument #",
        "offset": ".byte_offset on argument #",
        "data": ".data on argument #",
        "end": "`",
        "expected": "`,\n  expected ",
        "tensor": "Tensor",
        "cpu": "cpu",
        "compact": "to be compact array",
        "zero": "0",
        "pointer": "a pointer that is not NULL",
    }
    constants = [
        f"@relax_grad_text.{key} = private constant {string(text)}" for key, text in texts.items()
    ]
    types = [
        f"{PARAMETER} = type {{ ptr, ptr, ptr, ptr, ptr, i32, i32 }}",
        f"{TABLE} = type {{ ptr, ptr, ptr, ptr, i32 }}",
    ]
    return [*types, *constants, _CHECK, _ENTER]


# Types of a TVMFFIAny: 70 is a tensor object, whose DLTensor begins at byte 24; 7 is a pointer to a
# DLTensor, 4 an opaque pointer. A DLTensor has data at byte 0, the device type at 8, the rank at
# 16, dtype at 20, extents at 24, strides at 32, and the offset in bytes at 40.
_CHECK = """
declare void @TVMFFIErrorSetRaisedFromCStrParts(ptr, ptr, i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define internal i32 @relax_grad_refuse(ptr %kind, ptr %a, ptr %b, ptr %c, ptr %d, ptr %signature, ptr %e, ptr %f) noinline cold {
  %parts = alloca [8 x ptr], align 8
  store ptr %a, ptr %parts
  %p1 = getelementptr ptr, ptr %parts, i64 1
  store ptr %b, ptr %p1
  %p2 = getelementptr ptr, ptr %parts, i64 2
  store ptr %c, ptr %p2
  %p3 = getelementptr ptr, ptr %parts, i64 3
  store ptr %d, ptr %p3
  %p4 = getelementptr ptr, ptr %parts, i64 4
  store ptr @relax_grad_text.calling, ptr %p4
  %p5 = getelementptr ptr, ptr %parts, i64 5
  store ptr %signature, ptr %p5
  %p6 = getelementptr ptr, ptr %parts, i64 6
  store ptr %e, ptr %p6
  %p7 = getelementptr ptr, ptr %parts, i64 7
  store ptr %f, ptr %p7
  call void @TVMFFIErrorSetRaisedFromCStrParts(ptr %kind, ptr %parts, i32 8)
  ret i32 -1
}

define internal i32 @relax_grad_check(ptr %args, i32 %count, ptr %parameters, i32 %size, ptr %size_text, ptr %signature, ptr %limits) noinline {
entry:
  %symbols = alloca [16 x i64], align 8
  call void @llvm.memset.p0.i64(ptr %symbols, i8 -1, i64 128, i1 false)
  %right = icmp eq i32 %count, %size
  br i1 %right, label %each, label %wrong_count

each:
  %i = phi i32 [ 0, %entry ], [ %next, %done ]
  %end = icmp eq i32 %i, %size
  br i1 %end, label %good, label %argument

argument:
  %at = zext i32 %i to i64
  %any = getelementptr { i32, i32, ptr }, ptr %args, i64 %at
  %parameter = getelementptr %relax_grad_parameter, ptr %parameters, i64 %at
  %name = load ptr, ptr %parameter
  %number_at = getelementptr i8, ptr %parameter, i64 8
  %number = load ptr, ptr %number_at
  %shape_text_at = getelementptr i8, ptr %parameter, i64 16
  %shape_text = load ptr, ptr %shape_text_at
  %dtype_text_at = getelementptr i8, ptr %parameter, i64 24
  %dtype_text = load ptr, ptr %dtype_text_at
  %extents_at = getelementptr i8, ptr %parameter, i64 32
  %extents = load ptr, ptr %extents_at
  %axes_at = getelementptr i8, ptr %parameter, i64 40
  %axes = load i32, ptr %axes_at
  %dtype_at = getelementptr i8, ptr %parameter, i64 44
  %dtype = load i32, ptr %dtype_at
  %type = load i32, ptr %any
  %value_at = getelementptr i8, ptr %any, i64 8
  %value = load ptr, ptr %value_at
  %is_object = icmp eq i32 %type, 70
  %is_pointer = icmp eq i32 %type, 7
  %is_opaque = icmp eq i32 %type, 4
  %is_any_pointer = or i1 %is_pointer, %is_opaque
  %is_tensor = or i1 %is_object, %is_any_pointer
  br i1 %is_tensor, label %typed, label %wrong_type

typed:
  %null = icmp eq ptr %value, null
  br i1 %null, label %wrong_type, label %tensor_at

tensor_at:
  %begin = select i1 %is_object, i64 24, i64 0
  %tensor = getelementptr i8, ptr %value, i64 %begin
  %own_axes_at = getelementptr i8, ptr %tensor, i64 16
  %own_axes = load i32, ptr %own_axes_at
  %same_axes = icmp eq i32 %own_axes, %axes
  br i1 %same_axes, label %of_dtype, label %wrong_shape

of_dtype:
  %own_dtype_at = getelementptr i8, ptr %tensor, i64 20
  %own_dtype = load i32, ptr %own_dtype_at
  %same_dtype = icmp eq i32 %own_dtype, %dtype
  br i1 %same_dtype, label %of_device, label %wrong_dtype

of_device:
  %device_at = getelementptr i8, ptr %tensor, i64 8
  %device = load i32, ptr %device_at
  %is_cpu = icmp eq i32 %device, 1
  br i1 %is_cpu, label %of_offset, label %wrong_device

of_offset:
  %offset_at = getelementptr i8, ptr %tensor, i64 40
  %offset = load i64, ptr %offset_at
  %is_first = icmp eq i64 %offset, 0
  br i1 %is_first, label %of_axes, label %wrong_offset

of_axes:
  %own_extents_at = getelementptr i8, ptr %tensor, i64 24
  %own_extents = load ptr, ptr %own_extents_at
  %last = zext i32 %axes to i64
  br label %axis

axis:
  %k = phi i64 [ 0, %of_axes ], [ %k_next, %of_limit ]
  %elements = phi i64 [ 1, %of_axes ], [ %elements_next, %of_limit ]
  %all = icmp eq i64 %k, %last
  br i1 %all, label %of_strides, label %of_extent

of_extent:
  %k_next = add i64 %k, 1
  %extent_at = getelementptr i64, ptr %extents, i64 %k
  %extent = load i64, ptr %extent_at
  %own_extent_at = getelementptr i64, ptr %own_extents, i64 %k
  %own_extent = load i64, ptr %own_extent_at
  %elements_next = mul i64 %elements, %own_extent
  %is_symbol = icmp slt i64 %extent, 0
  br i1 %is_symbol, label %of_symbol, label %of_number

of_number:
  %same_extent = icmp eq i64 %own_extent, %extent
  br i1 %same_extent, label %of_limit, label %wrong_shape

of_symbol:
  %symbol = xor i64 %extent, -1
  %symbol_at = getelementptr i64, ptr %symbols, i64 %symbol
  %known = load i64, ptr %symbol_at
  %is_unknown = icmp eq i64 %known, -1
  %is_known = icmp eq i64 %known, %own_extent
  %limit_at = getelementptr i64, ptr %limits, i64 %symbol
  %limit = load i64, ptr %limit_at
  %is_small = icmp ule i64 %own_extent, %limit
  store i64 %own_extent, ptr %symbol_at
  %agrees = or i1 %is_unknown, %is_known
  %is_good = and i1 %agrees, %is_small
  br i1 %is_good, label %of_limit, label %wrong_shape

of_limit:
  br label %axis

of_strides:
  %empty = icmp eq i64 %elements, 0
  %strides_at = getelementptr i8, ptr %tensor, i64 32
  %strides = load ptr, ptr %strides_at
  %no_strides = icmp eq ptr %strides, null
  %any_strides = or i1 %no_strides, %empty
  br i1 %any_strides, label %of_data, label %stride

stride:
  %m = phi i64 [ %last, %of_strides ], [ %before, %of_stride ]
  %expected = phi i64 [ 1, %of_strides ], [ %product, %of_stride ]
  %no_more = icmp eq i64 %m, 0
  br i1 %no_more, label %of_data, label %compared

compared:
  %before = sub i64 %m, 1
  %own_at = getelementptr i64, ptr %own_extents, i64 %before
  %own = load i64, ptr %own_at
  %product = mul i64 %expected, %own
  %is_one = icmp eq i64 %own, 1
  %stride_at = getelementptr i64, ptr %strides, i64 %before
  %own_stride = load i64, ptr %stride_at
  %same_stride = icmp eq i64 %own_stride, %expected
  %good_stride = or i1 %is_one, %same_stride
  br i1 %good_stride, label %of_stride, label %wrong_strides

of_stride:
  br label %stride

of_data:
  %data = load ptr, ptr %tensor
  %no_data = icmp eq ptr %data, null
  %not_empty = xor i1 %empty, true
  %missing = and i1 %no_data, %not_empty
  br i1 %missing, label %wrong_data, label %done

done:
  %next = add i32 %i, 1
  br label %each

good:
  ret i32 0

wrong_count:
  %error_count = call i32 @relax_grad_refuse(ptr @relax_grad_text.TypeError, ptr @relax_grad_text.expected_count, ptr %size_text, ptr @relax_grad_text.arguments, ptr @relax_grad_text.none, ptr %signature, ptr @relax_grad_text.end, ptr @relax_grad_text.none)
  ret i32 %error_count

wrong_type:
  %error_type = call i32 @relax_grad_refuse(ptr @relax_grad_text.TypeError, ptr @relax_grad_text.mismatched, ptr @relax_grad_text.none, ptr @relax_grad_text.type, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr @relax_grad_text.tensor)
  ret i32 %error_type

wrong_shape:
  %error_shape = call i32 @relax_grad_refuse(ptr @relax_grad_text.ValueError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.shape, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr %shape_text)
  ret i32 %error_shape

wrong_dtype:
  %error_dtypes = call i32 @relax_grad_refuse(ptr @relax_grad_text.TypeError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.dtype, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr %dtype_text)
  ret i32 %error_dtypes

wrong_device:
  %error_devices = call i32 @relax_grad_refuse(ptr @relax_grad_text.ValueError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.device, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr @relax_grad_text.cpu)
  ret i32 %error_devices

wrong_offset:
  %error_offsets = call i32 @relax_grad_refuse(ptr @relax_grad_text.ValueError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.offset, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr @relax_grad_text.zero)
  ret i32 %error_offsets

wrong_strides:
  %error_strides = call i32 @relax_grad_refuse(ptr @relax_grad_text.ValueError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.strides, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr @relax_grad_text.compact)
  ret i32 %error_strides

wrong_data:
  %error_pointers = call i32 @relax_grad_refuse(ptr @relax_grad_text.ValueError, ptr @relax_grad_text.mismatched, ptr %name, ptr @relax_grad_text.data, ptr %number, ptr %signature, ptr @relax_grad_text.expected, ptr @relax_grad_text.pointer)
  ret i32 %error_pointers
}
"""

_ENTER = """
define internal i32 @relax_grad_enter(ptr %self, ptr %args, i32 %count, ptr %result, ptr %table, ptr %code) noinline {
  %parameters = load ptr, ptr %table
  %size_text_at = getelementptr i8, ptr %table, i64 8
  %size_text = load ptr, ptr %size_text_at
  %signature_at = getelementptr i8, ptr %table, i64 16
  %signature = load ptr, ptr %signature_at
  %limits_at = getelementptr i8, ptr %table, i64 24
  %limits = load ptr, ptr %limits_at
  %size_at = getelementptr i8, ptr %table, i64 32
  %size = load i32, ptr %size_at
  %checked = call i32 @relax_grad_check(ptr %args, i32 %count, ptr %parameters, i32 %size, ptr %size_text, ptr %signature, ptr %limits)
  %right = icmp eq i32 %checked, 0
  br i1 %right, label %run, label %wrong
wrong:
  ret i32 %checked
run:
  %status = tail call i32 %code(ptr %self, ptr %args, i32 %count, ptr %result)
  ret i32 %status
}
"""
