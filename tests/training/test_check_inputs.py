"""Indices out of range: an error where PyTorch raises one, and NaN without the check."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import relax

from relax_grad.training import SGD, Trainer, train_step

ROWS, CLASSES = 20, 12


@pytest.fixture(scope="module")
def language():
    """A step of a language model with two inputs and targets that are moved by one place."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, 8, padding_idx=0)
            self.kinds = torch.nn.Embedding(3, 8)
            self.scores = torch.nn.Linear(8, CLASSES)

        def forward(self, ids, kinds):
            return self.scores(self.table(ids) + self.kinds(kinds[:, None]))

    def loss(scores, target):
        moved = torch.nn.functional.pad(target, (0, 1), value=-100)[:, 1:].contiguous()
        return torch.nn.functional.cross_entropy(scores.view(-1, CLASSES), moved.view(-1))

    torch.manual_seed(0)
    net = Net()
    ids = torch.arange(10).reshape(2, 5)
    names = {"ids": {0: "n"}, "kinds": {0: "n"}, "target": {0: "n"}}
    imported = from_module(
        net, (ids, ids[:, 0] % 3), loss=loss, targets=(ids % CLASSES,), dynamic_shapes=names
    )
    trainer = Trainer(train_step(imported, SGD(0.1)), on_nan="skip")
    return net, loss, trainer


def drawn(rng):
    return {
        "ids": rng.integers(ROWS, size=(3, 5)),
        "kinds": rng.integers(3, size=3),
        "target": rng.integers(CLASSES, size=(3, 5)),
    }


WRONG = {"ids": (-1, -ROWS, ROWS), "kinds": (-3, 3), "target": (-1, -CLASSES, CLASSES, -101)}


def test_errors_are_where_those_of_torch_are(language):
    """For drawn places and values; the first target of a row is none, and -100 is ignored."""
    torch = pytest.importorskip("torch")
    net, loss, trainer = language
    rng = np.random.default_rng(0)
    state = {k: v.numpy().tobytes() for k, v in trainer.params.items()}
    raised = 0
    for i in range(60):
        batch = drawn(rng)
        name = list(batch)[i % 3]
        place = tuple(map(int, (rng.integers(extent) for extent in batch[name].shape)))
        value = int(rng.choice([*WRONG[name], *([-100] if name == "target" else [])]))
        batch[name][place] = value
        tensors = {k: torch.from_numpy(v) for k, v in batch.items()}
        try:
            wanted = loss(net(tensors["ids"], tensors["kinds"]), tensors["target"]).item()
        except IndexError:
            raised += 1
            where = re.escape(f"{name}[{', '.join(map(str, place))}] is {value}, but it selects")
            with pytest.raises(IndexError, match=where):
                trainer.step(**batch)
            with pytest.raises(IndexError, match=r"check_inputs=False leaves such values"):
                trainer.step(*tensors.values())
        else:
            assert trainer.step(**batch, lr=0.0).loss == pytest.approx(wanted, rel=1e-5)
    assert 20 < raised < 60
    assert {k: v.numpy().tobytes() for k, v in trainer.params.items()} == state
    assert trainer.steps == 60 - raised
    assert trainer.skipped == 0


def test_values_out_of_range_compute_nan(language, monkeypatch):
    """Without the check, negative ones too; nothing is trained."""
    _, _, trainer = language
    monkeypatch.setattr(trainer._variants.main, "ranges", ())
    before = {k: v.numpy().tobytes() for k, v in trainer.params.items()}
    rng = np.random.default_rng(1)
    for name, values in WRONG.items():
        for value in values:
            batch = drawn(rng)
            batch[name][(1, 2)[: batch[name].ndim]] = value
            assert np.isnan(trainer.step(**batch).loss), (name, value)
    assert {k: v.numpy().tobytes() for k, v in trainer.params.items()} == before


def test_predictions_are_examined(language):
    _, _, trainer = language
    batch = drawn(np.random.default_rng(2))
    trainer.predict(batch["ids"], batch["kinds"])
    batch["kinds"][2] = -1
    with pytest.raises(IndexError, match=r"kinds\[2\] is -1, but it selects one of 3 elements"):
        trainer.predict(batch["ids"], batch["kinds"])
    with pytest.raises(TypeError, match="check_inputs must be True or False, but it is 1"):
        Trainer(trainer.train_step, check_inputs=1)
    assert Trainer.__init__.__kwdefaults__["check_inputs"] is True


def test_a_wrapped_module_raises_as_torch_does():
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import wrap

    table = torch.nn.Embedding(5, 2)
    wrapped = wrap(table, (torch.tensor([1, 2]),))
    for value in (-1, 5):
        with pytest.raises(IndexError):
            table(torch.tensor([0, value]))
        with pytest.raises(IndexError, match=rf"\[1\] is {value}, but it selects one of 5"):
            wrapped(torch.tensor([0, value]))


#: Calls that read, and two that write.
CALLS = (
    lambda torch, x, i: torch.gather(x, 0, i[:, None].expand(-1, 3)),
    lambda torch, x, i: torch.index_select(x, 0, i),
    lambda torch, x, i: x[i],
    lambda torch, x, i: x[i, torch.arange(2)],
    lambda torch, x, i: torch.take(x, i),
    lambda torch, x, i: torch.zeros(4, 3).scatter_add(
        0, i[:, None].expand(-1, 3), torch.ones(2, 3)
    ),
    lambda torch, x, i: torch.zeros(4, 3).index_add(0, i, torch.ones(2, 3)),
)


def test_operators_of_torch_compute_nan():
    """Each operator that takes indices, for values that PyTorch refuses and for those that count
    from the end."""
    torch = pytest.importorskip("torch")
    import tvm

    from relax_grad.frontend.torch import from_module

    class Net(torch.nn.Module):
        def forward(self, x, i):
            return tuple(call(torch, x, i) for call in CALLS)

    x = torch.arange(12.0).reshape(4, 3)
    imported = from_module(Net(), (x, torch.tensor([0, 1])))
    module = imported.module
    built = tvm.compile(module, "llvm", relax_pipeline="relax_grad")
    forward = relax.VirtualMachine(built, tvm.cpu())["forward"]
    for value in (0, 3, -1, -4, 4, -5, -8, 11, -12, 12, -13):
        i = torch.tensor([2, value])
        results = forward(tvm.runtime.from_dlpack(x), tvm.runtime.from_dlpack(i))
        for at, result in enumerate(results):
            kept = result.numpy()
            try:
                wanted = CALLS[at](torch, x, i).numpy()
            except (IndexError, RuntimeError):
                if at < 5:  # the others write nothing
                    assert np.isnan(kept[1]).all(), (at, value)
                else:
                    assert kept.sum() == 3, (at, value)
            else:
                np.testing.assert_array_equal(kept, wanted, f"{at} {value}")


#: Calls with one index tensor that write.
WRITES = (
    lambda torch, x, i: torch.zeros(4, 3).index_add(0, i, torch.ones(2, 3)),
    lambda torch, x, i: torch.zeros(3, 4).index_add(1, i, x[:2].T),
    lambda torch, x, i: x.index_copy(0, i, torch.ones(2, 3)),
    lambda torch, x, i: x.index_fill(0, i, 1.0),
    lambda torch, x, i: torch.index_put(x, (i,), torch.ones(2, 3)),
    lambda torch, x, i: torch.index_put(x, (i,), torch.ones(2, 3), accumulate=True),
    lambda torch, x, i: torch.take(x, i),
)


def test_ranges_are_those_of_torch():
    """One import with an index of its own for each call; nothing is compiled."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module
    from relax_grad.ir.index_ranges import index_ranges

    class Net(torch.nn.Module):
        def forward(self, x, *indices):
            return tuple(call(torch, x, i) for call, i in zip(WRITES, indices, strict=True))

    x = torch.arange(12.0).reshape(4, 3)
    imported = from_module(Net(), (x, *(torch.tensor([0, 1]) for _ in WRITES)))
    _, *names = imported.inputs
    ranges = index_ranges(imported.module, "forward", names)
    assert sorted(entry.input for entry in ranges) == sorted(names)
    by_name = {entry.input: entry for entry in ranges}
    for call, name in zip(WRITES, names, strict=True):
        for value in (0, 3, 4, 11, 12, -1, -4, -5, -12, -13):
            i = torch.tensor([2, value])
            try:
                call(torch, x, i)
            except (IndexError, RuntimeError):
                with pytest.raises(IndexError, match=rf"\[1\] is {value}, but it selects"):
                    by_name[name].check(i.numpy(), {})
            else:
                by_name[name].check(i.numpy(), {})
