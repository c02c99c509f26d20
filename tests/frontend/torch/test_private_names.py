"""PyTorch's private names that the importer uses: each exists in the installed release."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import relax_grad  # noqa: E402

ROOT = Path(relax_grad.__file__).parent

#: Names that the sources spell out.
SPELLED = {
    "torch._C.DisableTorchFunction",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._set_grad_enabled",
    "torch._check",
    "torch._decomp.decompositions",
    "torch._dynamo.OptimizedModule",
    "torch._dynamo.exc.Unsupported",
    "torch._dynamo.exc.UserError",
    "torch._dynamo.exc.UserErrorType",
    "torch._fake_quantize_learnable_per_channel_affine",
    "torch._fake_quantize_learnable_per_tensor_affine",
    "torch._foreach_copy_",
    "torch._functorch.apis",
    "torch._functorch.eager_transforms",
    "torch._guards.detect_fake_mode",
    "torch._is_all_true",
    "torch._ops.OpOverload",
    "torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND",
    "torch._prims_common.elementwise_dtypes",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.autograd.function._SingleLevelFunction",
    "torch.export._trace",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.ops.aten._assert_tensor_metadata.default",
    "torch.ops.aten._efficient_attention_backward",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._fused_rms_norm",
    "torch.ops.aten._fused_rms_norm_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.utils._pytree",
}

#: Names that are replaced during a trace, attributes of objects, and functions that are public
#: within private modules.
OTHERS = {
    *(f"torch._decomp.decompositions.{name}" for name in ("_rnn_helper", "lstm_cell")),
    *(f"torch._decomp.decompositions.{name}" for name in ("gru_cell", "rnn_cell_data")),
    *(f"torch._functorch.eager_transforms.{name}" for name in ("grad_and_value_impl",)),
    "torch._functorch.apis.vmap_impl",
    "torch._functorch.eager_transforms._jvp_with_argnums",
    "torch._functorch.eager_transforms._vjp_with_argnums",
    "torch._functorch.eager_transforms.linearize",
    "torch.autograd._engine_run_backward",
    "torch.autograd.functional._grad_preprocess",
    "torch.autograd.graph.saved_tensors_hooks.__enter__",
    "torch.distributions.Distribution._validate_args",
    "torch.fx.proxy.TracerBase._filter_traceback_frames",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.BatchNorm2d._check_input_dim",
    "torch.ops.aten.add.Tensor._opname",
    "torch.ops.aten.add.Tensor._schema",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
}


def _spelled(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of PyTorch with a private part that a module imports or reads."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and known.get(node.id) == "torch":
            yield ".".join(("torch", *parts))


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _is_part(name: str, names: Iterable[str]) -> bool:
    """Tell whether a name is a module or a class of another one."""
    return any(other.startswith(f"{name}.") for other in names)


def _exists(name: str) -> bool:
    place: object = torch
    for at, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(place, part):
            try:
                importlib.import_module(".".join(name.split(".")[:at]))
            except ImportError:
                return False
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True


@pytest.mark.core
def test_the_names_exist():
    """A release of PyTorch that has moved one fails here by its name."""
    moved = sorted(name for name in SPELLED | OTHERS if not _exists(name))
    assert not moved, f"PyTorch {torch.__version__} has moved {', '.join(moved)}"


def test_the_list_is_complete():
    used: dict[str, Path] = {}
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used.update((name, path.relative_to(ROOT)) for name in _spelled(tree) if _is_private(name))
    whole = {name: str(path) for name, path in used.items() if not _is_part(name, used)}
    unlisted = {name: path for name, path in whole.items() if name not in SPELLED}
    assert not unlisted, "list these in SPELLED, or use public names"
    assert not set(SPELLED) - set(whole), "nothing uses these"
