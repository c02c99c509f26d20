"""The table "Exact and refused features" of docs/pytorch.md: each row names the tests that hold it,
or is tested here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from tvm import relax  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.frontend.torch import UnsupportedOperatorError, from_module  # noqa: E402

nn, F = torch.nn, torch.nn.functional
HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "pytorch.md"

#: By the first words of a row, the tests that hold it.
ROWS = {
    "`from_module` of a module in evaluation mode": (
        "test_page.py::test_the_loss_is_that_of_training_mode",
        "test_model.py::test_flags_of_submodules_are_kept",
        "run/test_wrap.py::test_states_modes_dropout_and_structures",
    ),
    "`detach`, `detach_`, `data`": (
        "test_model.py::test_regions_without_gradients",
        "test_model.py::test_a_straight_through_estimator",
        "test_messages.py::test_inference_mode",
        "export/test_writes.py::test_gradients_that_a_detach_cuts",
    ),
    "in-place operators, also on views": (
        "export/test_writes.py::test_graphs_of_operators_that_write",
        "export/test_writes.py::test_compiled_writes",
    ),
    "in-place operators on a detached tensor": (
        "export/test_writes.py::test_writes_that_are_refused_name_their_line",
        "export/test_writes.py::test_random_programs_are_equal_or_refused",
    ),
    "`set_`, `resize_`": (
        "export/test_writes.py::test_every_operator_that_writes_is_in_one_table",
    ),
    "BatchNorm statistics": (
        "test_model.py::test_running_statistics",
        "test_model.py::test_written_buffers_are_states",
        "test_features.py::test_three_steps",
    ),
    "BatchNorm in a section": (
        "test_features.py::test_statistics_of_a_checkpointed_section_are_updated_once",
    ),
    "extents for which PyTorch raises": (
        "inputs/test_extents.py::test_a_batch_of_one_row_is_refused_before_statistics_change",
        "inputs/test_extents.py::test_extents_without_a_value_are_refused",
        "inputs/test_extents.py::test_reductions_of_few_rows",
    ),
    "extents outside of the range": (
        "inputs/test_extents.py::test_extents_beyond_the_graph_are_refused",
    ),
    "`torch.func.vmap`, `jvp`": (
        "tracing/test_transforms.py::test_values_and_gradients",
        "tracing/test_transforms.py::test_symbolic_rows",
        "tracing/test_transforms.py::test_refused",
    ),
    "ties of `fmax`, `fmin` and `clamp`": ("test_exactness.py::test_nan_and_infinities",),
    "buffers that a call assigns to each other": (
        "tracing/test_buffers.py::test_all_buffers_are_read_before_the_first_is_written",
    ),
    "buffers in the memory of another buffer": (
        "tracing/test_buffers.py::test_buffers_without_a_meaning_in_a_graph_are_refused",
        "tracing/test_buffers.py::test_a_buffer_in_the_memory_of_a_parameter",
    ),
    "assignments at an integer": (
        "tracing/test_indices.py::test_writes",
        "tracing/test_indices.py::test_refused",
    ),
    "modules that `torch.compile` returned": (
        "test_model.py::test_a_compiled_module_is_the_one_that_it_was_made_of",
    ),
    "parameters without influence": ("run/test_wrap.py::test_parameters_without_influence",),
    "tied weights": (
        "test_model.py::test_tied_parameters_are_one",
        "tracing/test_buffers.py::test_layers_that_are_registered_twice",
        "test_features.py::test_three_steps",
    ),
    "dropout of all kinds": (
        "test_random.py::test_dropout_of_all_kinds",
        "test_random.py::test_dropout_between_the_layers_of_recurrent_networks",
        "test_random.py::test_attention_with_the_drawn_mask",
    ),
    "`rand`, `randn`": (
        "test_random.py::test_operators_have_the_moments_of_pytorch",
        "test_random.py::test_gumbel_softmax_and_rrelu",
    ),
    "dropout of an infinity": ("test_page.py::test_dropout_of_an_infinity",),
    "`torch.utils.checkpoint`": ("test_model.py::test_checkpointed_sections_are_recomputed",),
    "autocast inside": (
        "test_features.py::test_autocast",
        "test_exactness.py::test_dtypes",
    ),
    "`scaled_dot_product_attention`": ("test_features.py::test_three_steps",),
    "attention written out": ("test_page.py::test_an_attention_that_is_written_out",),
    "`LSTM`, `GRU`, `RNN`": (
        "test_features.py::test_three_steps",
        "tracing/test_packed.py::test_packed_sequences",
        "tracing/test_recurrent.py::test_layers_are_operators",
    ),
    "packed sequences whose lengths are an input": (
        "tracing/test_packed.py::test_lengths_that_are_an_input",
        "tracing/test_packed.py::test_lengths_that_are_no_example",
        "tracing/test_packed.py::test_other_uses_of_lengths_at_run_time_are_refused",
    ),
    "symbolic steps and batch": (
        "tracing/test_recurrent.py::test_symbolic_steps_and_batch",
        "tracing/test_recurrent.py::test_projections_of_symbolic_steps_and_batch",
    ),
    "recurrent layers and cells in half precision": (
        "tracing/test_recurrent.py::test_half_precision",
        "tracing/test_recurrent.py::test_autocast_of_symbolic_steps_and_batch",
        "tracing/test_recurrent.py::test_autocast_of_cells",
        "tracing/test_packed.py::test_autocast",
    ),
    "`ctc_loss`": ("test_features.py::test_connectionist_temporal_classification",),
    "`index_put`, `index_copy`": (
        "export/test_writes.py::test_values_of_writes_at_places_that_repeat",
    ),
    "`interpolate` in linear": ("test_exactness.py::test_an_infinity_spreads_in_its_channel",),
    "slices of a symbolic": ("inputs/test_extents.py::test_slices_of_few_rows_are_python_s",),
    "`interpolate`, `roll`": ("test_exactness.py::test_images_of_symbolic_size",),
    "`linalg.solve`": ("test_converters.py::test_all_cases",),
    "checks of values": (
        "test_features.py::test_three_steps",
        "test_messages.py::test_distributions_with_and_without_checks",
    ),
    "`eigh`, `svd`": (),
    "`sparse=True`": ("test_page.py::test_a_sparse_embedding_is_imported",),
    "a generator": ("test_random.py::test_other_draws_are_refused",),
    "`max_norm`": (),
    "`torch.autograd.Function`": (
        "tracing/test_functions.py::test_gradients_are_those_of_the_backward_function",
        "tracing/test_functions.py::test_second_derivatives_are_those_of_the_backward_function",
        "tracing/test_functions.py::test_functions_that_cannot_be_exact_are_errors_with_their_line",
        "tracing/test_gradients.py::test_gradients_within_the_model",
        "tracing/test_gradients.py::test_gradients_that_are_refused_name_the_line",
    ),
    "hooks of gradients": (
        "tracing/test_hooks.py::test_hooks_of_gradients_are_refused",
        "test_model_errors.py::test_operations_that_cannot_be_exact_are_errors_with_their_line",
    ),
    "hooks of forward passes that change": (
        "tracing/test_hooks.py::test_hooks_that_change_tensors_are_parts_of_the_graph",
    ),
    "hooks of forward passes that only look": (
        "tracing/test_hooks.py::test_hooks_that_only_look_are_refused",
    ),
    "attributes that a call": (
        "test_zoo.py::test_state_of_python_is_an_error",
        "test_zoo.py::test_caches_and_notes_are_imported",
    ),
    "variables outside": ("test_page.py::test_variables_outside_are_constants",),
    "writes to inputs": (),
    "sparse parameters": ("test_messages.py::test_errors_name_the_cause_and_the_way_out",),
    "shapes that depend on values": ("test_model.py::test_a_branch",),
}


class Of(nn.Module):
    """A function of a layer and of the input."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self, x)


def written_parameter(m, x):
    with torch.no_grad():
        m.layer.weight.mul_(2)
    return m.layer(x).sum()


def assigned_data(m, x):
    y = m.layer(x)
    y.data = x.clone()
    return y.sum()


IDS = torch.tensor([0, 1, 1])

#: Refusals by the row: a function of a module and of the input, and the operator in the message.
REFUSED = [
    ("`set_`", lambda m, x: m.layer(x).set_(x.clone()).sum(), "set_"),
    ("`set_`", lambda m, x: m.layer(x).detach().resize_(2, 8).sum(), "resize_"),
    ("`set_`", lambda m, x: m.layer(x).detach().resize_as_(x[:2]).sum(), "resize_as_"),
    ("`eigh`", lambda m, x: torch.linalg.eigh(m.layer(x))[0].sum(), "eigh"),
    ("`eigh`", lambda m, x: torch.linalg.svd(m.layer(x))[1].sum(), "svd"),
    ("`eigh`", lambda m, x: torch.linalg.qr(m.layer(x))[0].sum(), "qr"),
    ("`eigh`", lambda m, x: torch.fft.rfft(m.layer(x)).abs().sum(), "fft"),
    ("`eigh`", lambda m, x: torch.complex(m.layer(x), x).abs().sum(), "complex"),
    (
        "`max_norm`",
        lambda m, x: F.embedding(IDS, m.layer.weight * 1, max_norm=1.0).sum(),
        "embedding",
    ),
    (
        "`max_norm`",
        lambda m, x: F.embedding(IDS, m.layer.weight, scale_grad_by_freq=True).sum(),
        "embedding",
    ),
    ("hooks of gradients", lambda m, x: m.layer(x).sum().backward(), "backward"),
    ("writes to inputs", lambda m, x: m.layer(x.mul_(2)).sum(), "input x"),
    ("writes to inputs", written_parameter, "parameter layer.weight|mul_"),
    ("writes to inputs", assigned_data, "Tensor.data"),
    ("shapes", lambda m, x: m.layer(x)[x[:, 0] > 0].sum(), "nonzero|index|data"),
    ("shapes", lambda m, x: m.layer(x).sum() if x.sum() > 0 else x.sum(), "Control flow"),
    ("a generator", lambda m, x: m.layer(x).multinomial(2).sum() + m.layer(x).sum(), "multinomial"),
]


def rows() -> dict[str, str]:
    """Return the second cells of the table by the first ones."""
    text = PAGE.read_text(encoding="utf-8").partition("## Exact and refused features")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return dict(line.strip("| ").split(" | ", 1) for line in lines)


def test_every_row_has_tests():
    table = rows()
    assert len(table) == len(ROWS)
    tested = {begin for begin, *_ in REFUSED}
    for cell, said in table.items():
        begins = [begin for begin in ROWS if cell.startswith(begin)]
        assert len(begins) == 1, f"a test for the row: {cell}"
        is_tested = any(cell.startswith(begin) for begin in tested)
        assert ROWS[begins[0]] or is_tested, f"a test for the row: {cell}"
        if said.startswith("refused"):
            names = " ".join(ROWS[begins[0]])
            assert is_tested or re.search("refused|error", names), f"a refusal for the row: {cell}"
    for begin in tested:
        assert any(cell.startswith(begin) for cell in table), f"no row begins with {begin}"
    for name in {name for names in ROWS.values() for name in names}:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (HERE / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("function", "message"), [case[1:] for case in REFUSED], ids=[case[2] for case in REFUSED]
)
def test_refused_features(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        from_module(Of(function), (torch.ones(4, 4),))
    assert "test_page.py:" in str(caught.value)


def test_other_memory_for_a_buffer_or_from_a_storage():
    def of_a_buffer(m, x):
        m.b.set_(x.detach().clone())
        return m.layer(x + m.b).sum()

    def of_a_storage(m, x):
        return x.new_empty(0).set_((x * 2).untyped_storage()).sum() + m.layer(x).sum()

    for function in (of_a_buffer, of_a_storage):
        module = Of(function)
        module.register_buffer("b", torch.zeros(4, 4))
        with pytest.raises(UnsupportedOperatorError, match=r"set_ .*; write .* with tensor.copy_"):
            from_module(module, (torch.ones(4, 4),))


def test_a_scale_factor_that_is_no_whole_number():
    data = torch.ones(2, 1, 4, 4)
    function = lambda m, x: F.interpolate(m.layer(x), scale_factor=1.5, mode="bilinear").sum()  # noqa: E731
    with pytest.raises(UnsupportedOperatorError, match="upsample"):
        from_module(Of(function), (data,), dynamic_shapes={"x": {2: "height"}})


def test_the_loss_is_that_of_training_mode():
    """Also where the module is in evaluation mode, as models from from_pretrained are."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    data = torch.ones(3, 4)
    imported = from_module(module, (data,), loss=F.mse_loss, targets=(data,))
    assert "seed" in {var.name for var in relax.analysis.free_vars(imported.module["loss"].body)}
    assert len(imported.states) == 3
    assert imported.module["forward"].params[0].name == "input"
    assert not any(part.training for part in module.modules())


def test_a_sparse_embedding_is_imported():
    table = nn.Embedding(5, 4, sparse=True)
    imported = from_module(table, (IDS,), loss=lambda y: y.sum())
    module = relax_grad.value_and_grad(imported.module, "loss", wrt=["weight"])
    (gradient,) = module["loss_adjoint"].ret_ty.fields[1].fields
    assert [int(n) for n in gradient.shape] == [5, 4]


COUNTS = [0]


def counted(m, x):
    COUNTS[0] += 1
    return m.layer(x).sum() * COUNTS[0]


def test_variables_outside_are_constants():
    assert list(from_module(Of(counted), (torch.ones(3, 4),)).params) == [
        "layer.weight",
        "layer.bias",
    ]


def test_dropout_of_an_infinity():
    from torch_models import compiled

    imported = from_module(nn.Dropout(0.5), (torch.ones(64),))
    outputs, _ = compiled(imported, False, "training")(
        "training", torch.tensor(0), torch.full((64,), torch.inf)
    )
    assert set(outputs[0].tolist()) == {0.0, torch.inf}


class Written(nn.Module):
    """Attention written out, as models that return its weights if asked do, with one of several
    masks."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.mix = masks, nn.Linear(8, 24)
        self.register_buffer("kept", torch.ones(7, 7).tril().bool())

    def forward(self, x, padding):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mix(x).split(8, -1))
        length = x.shape[1]
        scores = q @ k.transpose(-2, -1) / 2
        if self.masks == "buffer":
            scores = scores.masked_fill(~self.kept, -torch.inf)
        elif self.masks == "constant":
            scores = scores.masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
        elif self.masks == "added":
            scores = scores + padding[:, None, None] * torch.finfo(torch.float32).min
        elif self.masks == "both":
            scores = scores.masked_fill(~self.kept | (padding[:, None, None] > 0), -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (y * y.cos()).sum()


@pytest.mark.parametrize(
    "masks",
    [
        "none",
        "both",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("buffer", "constant", "added")),
    ],
)
def test_an_attention_that_is_written_out(masks):
    from torch_models import close, compiled

    torch.manual_seed(0)
    module = Written(masks)
    x, padding = torch.randn(3, 7, 8), torch.zeros(3, 7)
    padding[1, 5:], padding[2] = 1, 1  # all keys of the last sequence are hidden
    has_length = masks in ("none", "added")
    axes = {0: "batch", 1: "length"} if has_length else {0: "batch"}
    imported = from_module(module, (x, padding), dynamic_shapes={"x": axes, "padding": axes})
    assert "R.nn.attention" in imported.module["loss"].script()
    run = compiled(imported, forward=False)
    values = [torch.from_numpy(value.numpy()) for value in imported.values]
    for batch, length in ((3, 7), (2, 3 if has_length else 7)):
        data, hidden = x[:batch, :length], padding[:batch, :length]
        wanted = module(data, hidden)
        gradients = torch.autograd.grad(wanted, list(module.parameters()))
        (loss, *_), grads = run("loss_adjoint", torch.tensor(0), data, hidden, *values)
        close("loss", [loss], [wanted])
        close("gradients", grads, gradients)
