"""The tests of each module of the package: ``tests/`` mirrors ``relax_grad/``, and a table names
the tests of the others.

The module ``relax_grad/a/b.py`` or ``relax_grad/a/_b.py`` is tested by ``tests/a/test_b.py``.
``tests/test_mirror.py`` checks the table.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("layers", ROOT / "docs/_ext/layers.py")
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)


def _in(folder: str, *names: str) -> tuple[str, ...]:
    """Return the test files of a folder by their names."""
    return tuple(f"{folder}/test_{name}.py" for name in names)


#: The tests of modules without a test file of their name: patterns of names of modules, and test
#: files in ``tests/``. The first pattern that matches counts.
TABLE: dict[str, tuple[str, ...]] = {
    # The package and its command line.
    "": ("test_install.py", "test_import.py"),
    "__main__": ("cli/test_start.py",),
    "_entry": ("cli/test_start.py",),
    "target": ("cpu/test_target.py",),
    "transform": ("cpu/passes/test_public_passes.py", "test_import.py"),
    "runtime": (
        "training/test_export.py",
        "training/test_damaged_folders.py",
        "training/test_c_api.py",
        "training/test_folders.py",
    ),
    "cli": ("cli/test_start.py", "cli/test_check.py"),
    "cli._arguments": ("cli/test_check.py", "cli/test_coverage.py"),
    **dict.fromkeys(("cli._diagnosis", "cli._plan", "cli._specs"), ("cli/test_doctor.py",)),
    **dict.fromkeys(("cli._fold", "cli._stderr"), ("cli/test_start.py",)),
    "cli._text": ("cli/test_check.py", "cli/test_start.py"),
    # Differentiation.
    "autodiff._adjoint": ("autodiff/test_gradient.py", "autodiff/test_complexity.py"),
    "autodiff._checks": ("autodiff/test_user_rules.py", "autodiff/test_gradient.py"),
    "autodiff._cotangents": ("autodiff/test_targets.py",),
    "autodiff._recomputation": ("autodiff/test_split.py",),
    "autodiff._reverse": ("autodiff/test_gradient.py", "autodiff/test_branches.py"),
    "autodiff.local": ("frontend/torch/tracing/test_gradients.py",),
    "autodiff.missing": ("test_coverage.py",),
    "autodiff.obstacles": ("test_coverage.py", "autodiff/test_gradient.py"),
    # Helpers for modules.
    "ir.arguments": ("autodiff/test_call_extents.py", "autodiff/test_forward.py"),
    "ir.asynchronous": ("distributed/test_overlap.py",),
    "ir.blocks": ("ir/test_conditions.py", "ir/test_shared_values.py"),
    "ir.bindings": ("autodiff/test_gradient.py", "autodiff/test_simplify.py"),
    "ir.branches": ("autodiff/test_branches.py", "cpu/passes/test_lift.py"),
    "ir.dataflow": ("autodiff/test_gradient.py", "cpu/passes/test_fusion.py"),
    "ir.dtypes": ("op/test_conformance.py", "tir/test_conventions.py"),
    "ir.expressions": ("cpu/schedule/test_schedule.py", "cpu/schedule/test_dependence.py"),
    "ir.float32": ("gpu/test_halves.py", "cpu/schedule/test_halves.py"),
    "ir.inlining": ("cpu/passes/test_inline.py", "training/test_setup_trainer.py"),
    "ir.module": ("autodiff/test_gradient.py", "autodiff/test_gradient_pass.py"),
    "ir.partials": ("test_registry.py", "autodiff/test_user_rules.py"),
    "ir.legalizations": ("cpu/test_programs.py",),
    "ir.remat": ("training/test_remat.py",),
    "ir.int64": ("cpu/schedule/test_schedule.py", "tir/test_functions.py"),
    # Operators: rules, declarations, legalizations and tensor expressions.
    "legalize.quantized": ("cpu/dispatch/test_quantized.py", "op/test_conformance.py"),
    "legalize.recurrent": ("topi/test_recurrent.py", "op/test_conformance.py"),
    "rules._linear": ("rules/grad/test_index.py", "rules/grad/test_pool.py"),
    "rules.control": ("op/test_control.py",),
    "rules.grad.ccl": ("rules/test_ccl.py",),
    "rules.grad.image": ("rules/test_image.py", "testing/test_samples.py"),
    "rules.grad.index_write": ("rules/test_index_write.py", "testing/test_samples.py"),
    "rules.grad.statistical": ("rules/test_statistical.py", "testing/test_samples.py"),
    "rules.grad.*": ("testing/test_samples.py",),
    "op._infer": ("op/test_declare.py", "op/test_conformance.py"),
    "op._norm_*": ("op/test_norm.py", "op/test_norm_statistics.py"),
    "op.ccl": ("rules/test_ccl.py",),
    "op.grid_sample": ("op/test_image.py",),
    "op.index_nd": ("op/test_index_write.py", "rules/test_index_nd.py"),
    "op.manipulate_*": ("op/test_manipulate.py",),
    "op.pad": ("op/test_manipulate.py", "rules/nn/test_pad.py"),
    "op.rank": ("op/test_conv.py", "op/test_pool.py"),
    "op.statistical": ("rules/test_statistical.py",),
    "op.stock_layout": ("op/test_layout.py", "op/test_layout_conversion.py"),
    **dict.fromkeys(
        (
            *("backend.joins", "backend.library_call", "backend.primitives"),
            *("backend.torch_library", "backend._torch_function", "backend._torch_norms"),
            *("backend._torch_losses", "backend._torch_attention"),
        ),
        ("backend/test_dispatch.py", "backend/test_dispatched_steps.py"),
    ),
    "gpu.devices": ("training/test_device.py",),
    "gpu.graphs": ("training/test_graph.py",),
    "gpu.siblings": ("gpu/test_elements.py",),
    "gpu.stages": ("gpu/test_pipeline.py",),
    "legalize._gpu": ("gpu/test_operators.py",),
    "legalize._util": ("legalize/test_stock.py",),
    "legalize.ccl": ("rules/test_ccl.py",),
    "legalize.control": ("op/test_control.py",),
    "legalize.dropout": ("rules/nn/test_dropout.py",),
    "legalize.index_nd": ("rules/test_index_nd.py", "legalize/test_stock.py"),
    "legalize.index_slice": ("legalize/test_index.py", "rules/grad/test_index.py"),
    "legalize.index_write": ("rules/test_index_write.py",),
    "legalize.loss": ("rules/nn/test_loss.py", "rules/grad/test_loss.py"),
    "legalize.manipulate": ("rules/test_manipulate.py", "legalize/test_stock.py"),
    "legalize.manipulate_join": ("rules/test_manipulate_join.py", "legalize/test_stock.py"),
    "legalize.manipulate_order": ("rules/test_manipulate_order.py", "legalize/test_stock.py"),
    "legalize.scan": ("rules/test_scan.py",),
    "legalize.vision": ("legalize/test_image.py", "testing/test_samples.py"),
    "topi.philox": ("frontend/test_random.py",),
    "topi.dropout": ("op/test_attention_dropout.py", "testing/test_samples.py"),
    "topi.quantized": ("cpu/dispatch/test_quantized.py", "testing/test_samples.py"),
    "topi._loops": ("topi/test_threads.py",),
    "topi._pool_windows": ("topi/test_pool.py",),
    "topi._scatter": ("topi/test_index_write.py",),
    "topi.binary": ("legalize/test_binary.py", "tir/test_conventions.py"),
    "topi.ccl": ("rules/test_ccl.py",),
    **dict.fromkeys(
        ("topi.affine_grid", "topi.grid_sample"), ("topi/test_threads.py", "rules/test_image.py")
    ),
    "topi.index_nd": ("topi/test_index_write.py", "topi/test_threads.py"),
    "topi.layout": ("legalize/test_pool.py", "rules/nn/test_pool.py"),
    "topi.linear_algebra": ("rules/test_linear_algebra.py", "legalize/test_linear_algebra.py"),
    "topi.manipulate_join": ("rules/test_manipulate_join.py",),
    "topi.manipulate_order": ("rules/test_manipulate_order.py",),
    "topi.pad": ("rules/nn/test_pad.py", "legalize/test_pad.py"),
    "topi.position": ("topi/test_index.py", "topi/test_loss.py"),
    "topi.roi_*": ("topi/test_regions.py", "topi/test_threads.py"),
    "topi.recurrent_cells": ("frontend/onnx/operators/test_recurrent_cells.py",),
    "topi.linear_attention": ("frontend/onnx/operators/test_linear_attention.py",),
    "topi.statistical": ("legalize/test_statistical.py", "rules/test_statistical.py"),
    "topi.util": ("topi/test_conv.py", "topi/test_norm.py"),
    # Tensor functions.
    "tir": ("test_bad_input.py", "test_examples.py"),
    **dict.fromkeys(("tir._candidates", "tir._contraction"), ("tir/test_recognise.py",)),
    "tir.access": ("tir/test_accesses.py", "tir/test_guard_pages.py"),
    "tir.bits": ("tir/test_refusals.py",),
    "tir.call": ("tir/test_calls.py",),
    "tir.general": ("tir/test_functions.py",),
    "tir.derivatives": ("tir/test_conventions.py", "tir/test_functions.py"),
    "tir.primal": ("tir/test_functions.py",),
    "tir.program": ("tir/test_functions.py", "tir/test_refusals.py"),
    "tir.*": ("tir/test_functions.py", "tir/test_accesses.py"),
    # Code for CPUs.
    "static._reader": ("static/test_planner.py",),
    "cpu.memory": ("training/test_memory.py", "training/test_remat.py"),
    "cpu.storages": ("training/test_memory.py", "training/test_remat.py"),
    "cpu.stages": ("cpu/test_pipeline.py", "cpu/passes/test_fusion.py"),
    "cpu.codegen._check": ("cpu/codegen/test_arguments.py",),
    "cpu.codegen.compiler": _in("cpu/codegen", "compile", "generic"),
    "cpu.codegen.entries": ("cpu/codegen/test_compile.py", "cpu/codegen/test_generic.py"),
    "cpu.codegen.sources": ("cpu/codegen/test_declarations.py",),
    "cpu.dispatch._convolution": ("cpu/dispatch/test_conv.py", "cpu/dispatch/test_conv_weight.py"),
    "cpu.dispatch._identity": ("cpu/codegen/test_declarations.py", "cpu/dispatch/test_work.py"),
    "cpu.dispatch.declare": ("cpu/codegen/test_declarations.py", "cpu/dispatch/test_work.py"),
    "cpu.dispatch.norm_residuals": (
        *("cpu/dispatch/test_residuals.py", "cpu/dispatch/test_norm.py"),
    ),
    "cpu.dispatch.unread": ("cpu/dispatch/test_recurrent.py",),
    **dict.fromkeys(("cpu.limits", "cpu.kernel_limits"), ("cpu/test_tuning.py",)),
    # Kernels.
    "cpu.kernel.language._amx_code": _in("cpu/kernel/language", "amx"),
    "cpu.kernel.language.activations": (
        *_in("cpu/kernel/language", "functions"),
        "cpu/schedule/test_identities.py",
    ),
    "cpu.kernel.language.epilogue": ("cpu/dispatch/test_biases.py",),
    "cpu.kernel.language.plans": (
        *_in("cpu/kernel/matmul", "plan"),
        *_in("cpu/kernel/conv", "plan"),
    ),
    "cpu.kernel.language.streams": (
        "cpu/kernel/reduction/test_pool.py",
        "cpu/schedule/test_schedule.py",
    ),
    "cpu.kernel.language.*": _in("cpu/kernel/language", "builder"),
    **dict.fromkeys(
        [f"cpu.kernel.matmul.{name}" for name in ("_amx_products", "tiled")],
        _in("cpu/kernel/matmul", "pairs"),
    ),
    "cpu.kernel.matmul._generator": _in("cpu/kernel/matmul", "matmul", "tasks"),
    "cpu.kernel.matmul._plans": _in("cpu/kernel/matmul", "plan"),
    "cpu.kernel.matmul._ways": _in("cpu/kernel/matmul", "matmul", "tasks", "turned"),
    "cpu.kernel.matmul.tile": (
        *_in("cpu/kernel/matmul", "matmul"),
        *_in("cpu/kernel/language", "builder"),
    ),
    "cpu.kernel.matmul.*": _in("cpu/kernel/matmul", "matmul", "prefetches"),
    "cpu.kernel.attention.*": _in("cpu/kernel/attention", "forward", "backward"),
    "cpu.kernel.conv._*_plan": _in("cpu/kernel/conv", "plan"),
    "cpu.kernel.conv._channels_last": _in("cpu/kernel/conv", "weight", "few_channels", "depthwise"),
    "cpu.kernel.conv._chunks": _in("cpu/kernel/conv", "weight", "depthwise_weight"),
    "cpu.kernel.conv.gathering": _in("cpu/kernel/conv", "direct", "few_channels"),
    "cpu.kernel.conv.geometry": _in("cpu/kernel/conv", "direct", "weight"),
    "cpu.kernel.conv._winograd_choice": ("cpu/dispatch/test_winograd.py",),
    "cpu.kernel.conv.*winograd_*": _in("cpu/kernel/conv", "winograd"),
    **dict.fromkeys(
        [f"cpu.kernel.conv.{name}" for name in ("_amx_lines", "tiles", "weight_tiles")],
        _in("cpu/kernel/conv", "pairs"),
    ),
    "cpu.kernel.conv.*": _in("cpu/kernel/conv", "direct", "conv3d"),
    "cpu.kernel.recurrent.*": _in("cpu/kernel/recurrent", "recurrence"),
    "cpu.kernel.reduction.norm_backward": _in("cpu/kernel/reduction", "norm"),
    "cpu.kernel.reduction.pool_*": _in("cpu/kernel/reduction", "pool"),
    "cpu.passes": ("cpu/passes/test_public_passes.py",),
    "cpu.passes.attention.*": ("cpu/passes/attention/test_fuse.py",),
    "cpu.passes.remat.*": ("training/test_remat.py",),
    "cpu.passes._consumer_order": ("cpu/passes/test_consumers.py",),
    "cpu.passes._slices": ("cpu/passes/test_join.py", "cpu/passes/test_divide.py"),
    "cpu.passes._tensor_sums": ("cpu/passes/test_join.py", "cpu/passes/test_products.py"),
    "cpu.passes._target": ("cpu/passes/test_schedule.py", "cpu/passes/test_siblings.py"),
    "cpu.passes.dispatch": ("cpu/dispatch/test_work.py", "cpu/codegen/test_declarations.py"),
    "cpu.passes.updates": ("training/test_memory.py", "training/test_donation.py"),
    "cpu.passes.extents": ("autodiff/test_conditional_extents.py",),
    "cpu.schedule._product_consumers": ("cpu/passes/test_consumers.py",),
    "cpu.schedule._functions": (
        "cpu/test_functions_of_float32.py",
        "cpu/kernel/language/test_functions.py",
    ),
    "cpu.schedule._in_place": ("cpu/passes/test_donate.py",),
    "cpu.schedule._merge": ("cpu/passes/test_siblings.py",),
    "cpu.schedule._nest": ("cpu/schedule/test_dependence.py", "cpu/schedule/test_schedule.py"),
    **dict.fromkeys(
        ("cpu.schedule", "cpu.schedule.*"),
        ("cpu/schedule/test_schedule.py", "cpu/schedule/test_samples.py"),
    ),
    # Several workers.
    **dict.fromkeys(
        ("distributed._gloo", "distributed._reduction", "distributed._arrays"),
        ("distributed/test_collectives.py", "distributed/test_shared.py"),
    ),
    "distributed._memory": ("distributed/test_shared.py",),
    "distributed._mpi_job": ("distributed/test_mpi.py",),
    "distributed._parts": (*("distributed/test_groups.py", "distributed/test_tensor_trainer.py"),),
    "distributed._parallel_trainer": (
        *("distributed/test_trainer.py", "distributed/test_tensor_trainer.py"),
    ),
    "distributed._replica": ("distributed/test_trainer.py", "distributed/test_tensor_trainer.py"),
    "distributed._tasks": ("distributed/test_session.py", "distributed/test_collectives.py"),
    **dict.fromkeys(
        (
            "distributed._calls",
            "distributed._nodes",
            "distributed._options",
            "distributed._processes",
            "distributed._relay",
            "distributed._worker",
        ),
        ("distributed/test_session.py",),
    ),
    "distributed.errors": ("distributed/test_session.py",),
    "distributed.shards": ("distributed/test_tensor_trainer.py",),
    "distributed.transform._batch_norm": (
        *("distributed/test_transform.py", "distributed/test_trainer.py"),
    ),
    **dict.fromkeys(
        ("distributed.transform._emitter", "distributed.transform.buckets"),
        ("distributed/test_transform.py", "distributed/test_overlap.py"),
    ),
    "distributed.transform.data_parallel": (
        *("distributed/test_transform.py", "distributed/test_trainer.py"),
    ),
    "distributed.transform.*": (
        *("distributed/test_tensor_parallel_rules.py", "distributed/test_tensor_parallel_pass.py"),
    ),
    # Imports of models.
    "frontend.extremes": (
        "frontend/onnx/operators/test_extremes.py",
        "frontend/torch/test_exactness.py",
    ),
    "frontend._explanation": ("frontend/test_batch.py", "frontend/onnx/test_explain.py"),
    "frontend._arguments": ("frontend/onnx/test_model.py", "frontend/torch/test_model.py"),
    "frontend.onnx._arguments": _in("frontend/onnx", "shapes", "model"),
    "frontend.onnx._importer": _in("frontend/onnx/operators", "operators"),
    "frontend.onnx._loss": _in("frontend/onnx", "training"),
    "frontend.onnx._selection": _in("frontend/onnx", "explain", "model"),
    "frontend.onnx.read.load": _in("frontend/onnx", "write", "model"),
    "frontend.onnx.extents.*": _in("frontend/onnx/extents", "extents"),
    "frontend.onnx.graph.expand": _in("frontend/onnx/operators", "operators"),
    "frontend.onnx.graph.fold": _in("frontend/onnx", "shapes"),
    "frontend.onnx.graph.inference": _in("frontend/onnx", "training"),
    "frontend.onnx.graph.types": _in("frontend/onnx/operators", "fused"),
    "frontend.onnx.graph.unroll": _in("frontend/onnx/operators", "transforms"),
    "frontend.onnx.graph.*": _in("frontend/onnx", "explain", "model"),
    "frontend.onnx.operators.converters": _in("frontend/onnx/operators", "operators"),
    "frontend.onnx.operators.interpolate": _in("frontend/onnx/operators", "resize"),
    "frontend.onnx.operators.symbolic": _in("frontend/onnx/extents", "extents"),
    "frontend.onnx.operators.top_k": (
        *_in("frontend/onnx/operators", "extremes"),
        *_in("frontend/onnx/extents", "extents"),
    ),
    "frontend.onnx.operators.windows": (
        *_in("frontend/onnx/operators", "operators"),
        *_in("frontend/onnx/extents", "extents"),
    ),
    **dict.fromkeys(
        ("frontend.onnx.operators.integers", "frontend.onnx.operators.small_types"),
        _in("frontend/onnx/operators", "nodes"),
    ),
    "frontend.onnx.operators.*": _in("frontend/onnx/operators", "support"),
    "frontend.onnx.*": _in("frontend/onnx", "model"),
    "frontend.torch": ("frontend/torch/test_model.py",),
    "frontend.torch.export.aliases": ("frontend/torch/export/test_writes.py",),
    "frontend.torch.run.*": ("frontend/torch/run/test_wrap.py",),
    "frontend.torch.tracing.ctc": ("frontend/torch/test_features.py",),
    "frontend.torch._operators": (
        *("frontend/torch/tracing/test_functions.py", "frontend/torch/tracing/test_gradients.py"),
    ),
    "frontend.torch._symbols": (
        "frontend/torch/inputs/test_extents.py",
        "frontend/torch/test_exactness.py",
    ),
    "frontend.torch._converters.attention": (
        *("frontend/torch/test_converters.py", "frontend/torch/test_transformers.py"),
    ),
    "frontend.torch._converters.batch_norm": (
        *("frontend/torch/test_model.py", "frontend/torch/test_features.py"),
    ),
    "frontend.torch._converters.control": (
        *("frontend/torch/tracing/test_functions.py", "frontend/torch/tracing/test_gradients.py"),
        "frontend/torch/test_model.py",
    ),
    "frontend.torch._converters.recurrent": ("frontend/torch/tracing/test_recurrent.py",),
    "frontend.torch._converters.random": ("frontend/torch/test_random.py",),
    "frontend.torch._converters.*": ("frontend/torch/test_converters.py",),
    "frontend.torch.*": ("frontend/torch/test_model.py", "frontend/torch/test_features.py"),
    # Training.
    "training._adapters": ("training/test_lora.py",),
    "training._allocator": ("training/test_varying_batches.py", "training/test_moment.py"),
    **dict.fromkeys(
        ("training._build", "training._recipe", "training._update"),
        ("training/test_train_step.py", "training/test_nonfinite.py"),
    ),
    "training._functions": ("training/test_train_step.py", "training/test_export.py"),
    "training._loss": ("training/test_evaluation.py",),
    "training._steps": ("training/test_trainer.py", "training/test_moment.py"),
    "training._trainer_type": ("training/test_trainer.py", "distributed/test_trainer.py"),
    "training._files": ("training/test_trainer.py", "training/test_folders.py"),
    "training._inputs": ("training/test_check_inputs.py", "training/test_trainer.py"),
    "training._names": ("test_mistakes.py",),
    "training._optimizer": ("training/test_optimizers.py",),
    "training._source": ("training/test_train_step.py", "frontend/onnx/test_training.py"),
    "training._tensors": ("training/test_train_step.py", "training/test_trainer.py"),
    "training._totals": ("training/test_train_step.py", "training/test_nonfinite.py"),
    "training._variant": ("training/test_rows.py", "training/test_trainer.py"),
    "training._static": ("training/test_static_export.py", "static/test_planner.py"),
    "training.step": ("training/test_train_step.py",),
    "training.*": ("training/test_trainer.py",),
    # The checker and the fuzzer.
    "testing._arguments": ("testing/test_check.py", "testing/test_parity.py"),
    **dict.fromkeys(("testing._chain", "testing._program"), ("testing/test_check.py",)),
    "testing.samples.*": ("testing/test_samples.py",),
    "testing.fuzz.differential": ("autodiff/test_random_programs.py",),
    "testing.fuzz.pipelines": ("cpu/test_random_pipelines.py",),
    "testing.fuzz.tir.*": ("testing/test_fuzz_tir.py",),
    "testing.fuzz.*": ("testing/test_fuzz.py",),
}


def own_test_file(module: str, root: Path = ROOT) -> Path:
    """Return the test file of a module by its name, whether it exists or not."""
    *folders, name = module.split(".")
    return root.joinpath("tests", *folders, f"test_{name.strip('_')}.py")


def entry_of(module: str, table: Mapping[str, tuple[str, ...]] = TABLE) -> str | None:
    """Return the pattern of the table that names the tests of a module, or None."""
    return next((pattern for pattern in table if fnmatchcase(module, pattern)), None)


def files_of(
    module: str, root: Path = ROOT, table: Mapping[str, tuple[str, ...]] = TABLE
) -> list[Path]:
    """Return the test files of a module of the package: that of its name, or those of the table."""
    own = own_test_file(module, root)
    if own.exists():
        return [own]
    return [root / "tests" / file for file in table.get(entry_of(module, table), ())]


def reexports_only(path: Path) -> bool:
    """Tell whether a file is an ``__init__`` that only imports names, and so has no tests of its
    own."""
    if path.name != "__init__.py":
        return False
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    return all(
        isinstance(stmt, (ast.Import, ast.ImportFrom))
        or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
        or (isinstance(stmt, ast.Assign) and ast.unparse(stmt.targets[0]) == "__all__")
        for stmt in statements
    )
