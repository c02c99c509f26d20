"""Invalid calls of the functions that import PyTorch models; none where PyTorch is not
installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator


def bad_torch_calls() -> Iterator[tuple[str, str, Callable, type, str]]:
    """Yield the function's name, the fault, the call, the expected error and its message."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from relax_grad.frontend.torch import Imported, from_exported_program, from_module, wrap

    importer, program = "frontend.torch.from_module", "frontend.torch.from_exported_program"
    dense, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    others = {"None": None, "a number": 3, "a list": [None], "a tensor": x}
    for what, value in others.items():
        yield (
            importer,
            what,
            lambda v=value: from_module(v, (x,)),
            TypeError,
            "module must be a torch",
        )
        yield program, what, lambda v=value: from_exported_program(v), TypeError, "ep must be a"
    for argument, value, error, message in (
        ("args", x, TypeError, "args must be a sequence"),
        ("args", (x, x), TypeError, r"do not fit Linear\.forward\(input\): too many positional"),
        ("kwargs", 3, TypeError, "kwargs must be a mapping"),
        ("kwargs", {"y": x}, TypeError, r"do not fit Linear\.forward\(input\): got an unexpected"),
        ("loss", 3, TypeError, "loss must be a function"),
        ("targets", x, TypeError, "targets must be a sequence"),
        ("targets", (x,), ValueError, "targets are arguments of a loss"),
        ("batch", "4", TypeError, "batch must be an integer, but it is '4'"),
        ("batch", 0, ValueError, "batch must be a positive integer, but it is 0"),
        ("dynamic_shapes", 3, TypeError, "dynamic_shapes must be a mapping"),
        ("dynamic_shapes", {"y": {0: "n"}}, ValueError, "there is no input 'y'; the inputs are"),
        ("dynamic_shapes", {"input": {5: "n"}}, ValueError, "has 2 axes, and 5 is none"),
        ("dynamic_shapes", {"input": 3}, TypeError, "the axes of a tensor must be a mapping"),
        ("dynamic_shapes", {"input": {0: "n-1"}}, ValueError, "must be an identifier"),
        ("dynamic_shapes", {"input": {0: 0.5}}, ValueError, "dynamic_shapes does not fit"),
        ("dynamic_shapes", {"input": {1: "n"}}, ValueError, "specialized it to be a constant"),
        ("dynamic_shapes", {"input": ["n", "n"]}, ValueError, "is not equal to"),
        ("args", (x.to("meta"),), ValueError, "input is on the device meta"),
        ("trainable", 3, TypeError, "trainable must be names"),
        ("trainable", [None], TypeError, "trainable must be names"),
        ("trainable", "head", ValueError, "no parameter matches 'head'"),
        ("batch_norm", "none", ValueError, 'batch_norm must be "update" or "frozen"'),
        ("custom_convert_map", {"relu.default": 3}, TypeError, "custom_convert_map must be"),
    ):
        options = {"args": (x,), argument: value}
        yield (
            importer,
            f"{argument}: {value if isinstance(value, (str, int, dict)) else type(value).__name__}",
            lambda keywords=options: from_module(dense, **keywords),
            error,
            message,
        )
    for what, value in others.items():
        call = lambda v=value: wrap(v, (x,))  # noqa: E731
        yield "frontend.torch.wrap", what, call, TypeError, "module must be a torch"
    for argument, value, error, message in (
        ("args", x, TypeError, "args must be a sequence"),
        ("kwargs", {"y": x}, TypeError, r"do not fit Linear\.forward\(input\): got an unexpected"),
        ("module", wrap(dense, (x,)), ValueError, "module is wrapped already"),
        ("target", 3, TypeError, "target must be"),
        ("target", "nonsense", ValueError, "target is not one of TVM's, 'nonsense'"),
        ("target", {"kind": 3}, ValueError, "target is not one of TVM's"),
        ("target", {"kind": "cuda", "arch": "sm_80"}, ValueError, "target must be a CPU"),
        ("compile_options", 3, TypeError, "compile_options must be a mapping"),
        ("dynamic_shapes", 3, TypeError, "dynamic_shapes must be a mapping"),
        ("dynamic_shapes", {"y": {0: "n"}}, ValueError, "there is no input 'y'"),
        ("custom_convert_map", {"relu.default": 3}, TypeError, "custom_convert_map must be"),
    ):
        options = {"module": dense, "args": (x,), argument: value}
        yield (
            "frontend.torch.wrap",
            f"{argument}: {type(value).__name__} {str(value)[:20]}",
            lambda keywords=options: wrap(**keywords)(x),
            error,
            message,
        )
    empty = torch.nn.Linear(3, 2, device="meta")
    for name, function in (("from_module", from_module), ("wrap", lambda *a: wrap(*a)(x))):
        call = lambda f=function: f(empty, (x,))  # noqa: E731
        yield f"frontend.torch.{name}", "no values", call, ValueError, "weight is on the device"
    yield "frontend.torch.Imported", "no arguments", Imported, TypeError, "missing 8 required"
