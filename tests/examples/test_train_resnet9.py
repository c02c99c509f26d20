"""The training example: its data, its networks, its training step and its command."""

from __future__ import annotations

import pickle
import sys

import _compile
import _data
import _network
import _training
import numpy as np
import pytest
import tvm
from _gradient_check import check_gradient
from tvm import relax
from tvm.relax import op
from tvm.relax.training.optimizer import Adam, MomentumSGD

from relax_grad.cpu.target import host
from relax_grad.errors import GradientCheckError

BATCH = 8


@pytest.fixture
def command():
    """Return the command's module. The extra ``examples`` provides its packages."""
    for package in ("rich", "matplotlib", "sklearn"):
        pytest.importorskip(package, reason=f"the extra 'examples' is missing: no {package}")
    import train_resnet9

    return train_resnet9


@pytest.fixture(scope="module")
def target():
    return host()


def make_batches(count: int, size: int = BATCH, seed: int = 0):
    """Return learnable batches: each class has its own pattern under some noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(10, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    batches = []
    for _ in range(count):
        labels = rng.integers(0, 10, size)
        images = patterns[labels] + 0.5 * rng.normal(size=(size, 3, 32, 32))
        batches.append((images.astype("float32"), labels))
    return batches


def make_trainer(target, model="resnet9", layout="nchw", optimizer=None, size=BATCH, seed=0):
    optimizer = MomentumSGD(0.02, 0.9) if optimizer is None else optimizer
    return _training.Trainer(_network.NETWORKS[model], size, layout, optimizer, target, seed)


class TestCifar10:
    """The loader of CIFAR-10's Python version."""

    FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

    @staticmethod
    def content(count: int = 4, seed: int = 0) -> dict:
        rng = np.random.default_rng(seed)
        return {
            b"batch_label": b"a part",
            b"labels": rng.integers(0, 10, count).tolist(),
            b"data": rng.integers(0, 256, (count, 3072), dtype="uint8"),
            b"filenames": [b"image.png"] * count,
        }

    @pytest.fixture
    def folder(self, tmp_path):
        for seed, name in enumerate(self.FILES):
            self.write(tmp_path / name, self.content(seed + 2, seed))
        return tmp_path

    @staticmethod
    def write(path, content, protocol=2):
        path.write_bytes(pickle.dumps(content, protocol=protocol))

    def test_reads_written_files(self, folder):
        data = _data.load_cifar10(folder)
        expected = [self.content(seed + 2, seed) for seed in range(6)]
        images = np.concatenate([part[b"data"] for part in expected[:5]]).reshape(-1, 3, 32, 32)
        np.testing.assert_array_equal(data.train_images, images)
        np.testing.assert_array_equal(
            data.train_labels, np.concatenate([part[b"labels"] for part in expected[:5]])
        )
        np.testing.assert_array_equal(data.test_images, expected[5][b"data"].reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(data.test_labels, expected[5][b"labels"])
        assert data.train_labels.dtype == "int64"

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_every_pickle_protocol(self, folder, protocol):
        self.write(folder / "test_batch", self.content(3, 9), protocol)
        data = _data.load_cifar10(folder)
        np.testing.assert_array_equal(data.test_images.reshape(3, -1), self.content(3, 9)[b"data"])

    def test_names_missing_files(self, folder):
        (folder / "data_batch_2").unlink()
        (folder / "test_batch").unlink()
        with pytest.raises(_data.DataError, match="data_batch_2, test_batch"):
            _data.load_cifar10(folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: [1, 2], "must hold a dict, but it holds a list"),
            (lambda c: {b"data": c[b"data"]}, "lacks .*labels"),
            (lambda c: {**c, b"data": c[b"data"].astype("float32")}, "of uint8.*float32"),
            (lambda c: {**c, b"data": c[b"data"].tolist()}, "of uint8.*a list"),
            (lambda c: {**c, b"data": c[b"data"][:, :-1]}, "3072 columns.*3071"),
            (lambda c: {**c, b"data": c[b"data"][0]}, "a matrix"),
            (lambda c: {**c, b"data": c[b"data"][:0], b"labels": []}, "no images"),
            (lambda c: {**c, b"labels": c[b"labels"][:-1]}, "4 images but 3 labels"),
            (lambda c: {**c, b"labels": [0, 1, 2, 10]}, r"\[0, 10\).*0 to 10"),
            (lambda c: {**c, b"labels": [0, -1, 2, 3]}, r"\[0, 10\).*-1 to 3"),
            (lambda c: {**c, b"labels": [0.5, 1, 2, 3]}, "integers"),
            (lambda c: {**c, b"labels": [b"cat", b"dog", 2, 3]}, "integers"),
            (lambda c: {**c, b"labels": [[0, 1], [2]]}, "integers"),
        ],
    )
    def test_malformed_files_are_named(self, folder, change, message):
        self.write(folder / "data_batch_3", change(self.content()))
        with pytest.raises(_data.DataError, match=f"data_batch_3.*{message}"):
            _data.load_cifar10(folder)

    @pytest.mark.parametrize("cut", [0, 1, 100, -1])
    def test_truncated_file(self, folder, cut):
        path = folder / "data_batch_1"
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(_data.DataError, match="data_batch_1 is not a pickle"):
            _data.load_cifar10(folder)

    def test_runs_no_code(self, folder, tmp_path):
        class Malicious:
            def __reduce__(self):
                return (open, (str(tmp_path / "written"), "w"))

        self.write(folder / "test_batch", Malicious())
        with pytest.raises(_data.DataError, match=r"test_batch.*open"):
            _data.load_cifar10(folder)
        assert not (tmp_path / "written").exists()


class TestImages:
    """The preparation of images for training."""

    def test_scale_up(self, torch):
        images = np.random.default_rng(0).uniform(size=(2, 8, 8))
        expected = torch.nn.functional.interpolate(
            torch.tensor(images[:, None]), size=32, mode="bilinear"
        )
        np.testing.assert_allclose(_data.scale_up(images, 32), expected[:, 0].numpy(), atol=1e-12)

    @pytest.mark.parametrize("mirror", [True, False])
    @pytest.mark.parametrize("shift", [0, 2])
    def test_vary(self, shift, mirror):
        rng = np.random.default_rng(0)
        images = rng.integers(1, 256, (64, 3, 32, 32), dtype="uint8")
        padded = np.pad(images, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
        possible = [
            (top, left, step)
            for top in range(2 * shift + 1)
            for left in range(2 * shift + 1)
            for step in ((1, -1) if mirror else (1,))
        ]
        seen = set()
        for image, wide in zip(_data.vary(images, shift, mirror, rng), padded, strict=True):
            matches = [
                (top, left, step)
                for top, left, step in possible
                if np.array_equal(image[:, :, ::step], wide[:, top : top + 32, left : left + 32])
            ]
            assert len(matches) == 1
            seen.update(matches)
        assert len(seen) > len(possible) / 2

    def test_batches_go_over_all_images_once(self):
        images = np.arange(10, dtype="uint8")[:, None, None, None] * np.ones((3, 32, 32), "uint8")
        data = _data.Dataset(
            "ten", images, np.arange(10), images, np.arange(10), shift=0, mirror=False
        )
        batches = list(data.batches(3, np.random.default_rng(0)))
        labels = np.concatenate([labels for _, labels in batches])
        assert len(batches) == 3
        assert len(set(labels)) == 9
        for batch_images, batch_labels in batches:
            assert batch_images.dtype == "float32"
            expected = (batch_labels - 4.5) / np.std(np.arange(10))
            np.testing.assert_allclose(batch_images[:, 1, 5, 7], expected, rtol=1e-5)

    def test_digits(self, command):
        data = _data.load_digits()
        assert data.train_images.shape == (1437, 3, 32, 32)
        assert data.test_images.shape == (360, 3, 32, 32)
        shares = np.bincount(data.test_labels) / np.bincount(data.train_labels)
        np.testing.assert_allclose(shares, 0.25, atol=0.02)
        again = _data.load_digits()
        np.testing.assert_array_equal(again.test_images, data.test_images)
        normal = data.normalise(data.train_images)
        np.testing.assert_allclose(normal.mean(), 0, atol=1e-3)
        np.testing.assert_allclose(normal.std(), 1, atol=1e-3)


def test_initial_values():
    _, layers = _training.loss_module(_network.NETWORKS["resnet9"], BATCH, "nhwc")
    values = _network.draw_all(layers.parameters, seed=0)
    first, bias, gamma, beta = values[:4]
    assert first.shape == (7, 7, 3, 16)
    fan_in = 3 * 7 * 7
    assert 0.95 < np.abs(first).max() / (6 / fan_in) ** 0.5 <= 1
    assert 0.5 < np.abs(bias).max() / fan_in**-0.5 <= 1
    assert np.all(gamma == 1)
    assert np.all(beta == 0)
    # Eight convolutions of four parameters, two linear layers of two, and two statistics for each
    # batch_norm.
    assert len(values) == 8 * 4 + 2 * 2
    assert len(layers.statistics) == 8 * 2
    matrix, bias = values[-2:]
    assert matrix.shape == (10, 128)
    assert 0.95 < np.abs(matrix).max() / (6 / 128) ** 0.5 <= 1
    assert 0.5 < np.abs(bias).max() / 128**-0.5 <= 1


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(MomentumSGD(0.005, 0.9), id="sgd", marks=pytest.mark.slow),
        pytest.param(Adam(0.001), id="adam", marks=pytest.mark.slow),
    ],
)
def test_lenet_learns(optimizer, target):
    trainer = make_trainer(target, "lenet", optimizer=optimizer, size=32)
    losses = [trainer.step(*batch)[0] for batch in make_batches(30, size=32)]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    assert int(trainer.optimizer_state[0].numpy()) == 30


class TestLayouts:
    """The same training in both layouts, from the same weights on the same batches."""

    @pytest.fixture(
        scope="class", params=[pytest.param("resnet9", marks=pytest.mark.slow), "lenet"]
    )
    @staticmethod
    def runs(request, target):
        trainers = [make_trainer(target, request.param, layout) for layout in ("nchw", "nhwc")]
        steps = [[trainer.step(*batch) for batch in make_batches(4)] for trainer in trainers]
        return trainers, steps

    def test_losses(self, runs):
        _, steps = runs
        for (loss, scores), (other_loss, other_scores) in zip(*steps, strict=True):
            np.testing.assert_allclose(loss, other_loss, rtol=1e-4)
            np.testing.assert_allclose(scores, other_scores, rtol=1e-3, atol=1e-3)

    def test_parameters(self, runs):
        (nchw, nhwc), _ = runs
        for value, other, slot in zip(
            nchw.parameters, nhwc.parameters, nhwc.layers.parameters, strict=True
        ):
            plain = value.numpy().transpose(slot.axes)
            np.testing.assert_allclose(plain, other.numpy(), rtol=1e-3, atol=1e-4)

    def test_predictions_of_any_number_of_images(self, runs):
        trainers, _ = runs
        for count in (1, 13):
            ((images, _),) = make_batches(1, count, seed=1)
            scores, other_scores = (trainer.predict(images) for trainer in trainers)
            assert scores.shape == (count, 10)
            np.testing.assert_allclose(scores, other_scores, rtol=1e-2, atol=1e-2)

    def test_prediction_uses_running_statistics(self, runs):
        for trainer in runs[0]:
            ((images, _),) = make_batches(1)
            together = trainer.predict(images)
            np.testing.assert_allclose(
                trainer.predict(images[:1]), together[:1], rtol=1e-4, atol=1e-5
            )
            for i, kept in enumerate(trainer.statistics):
                trainer.statistics[i] = tvm.runtime.tensor(kept.numpy() + 1)
                assert np.abs(trainer.predict(images) - together).max() > 1e-4
                trainer.statistics[i] = kept


def torch_resnet9(torch):
    """Return ResNet-9 in PyTorch, its parameters in the order of the example's."""
    nn = torch.nn

    def conv_bn_relu(inputs, outputs, kernel=3, stride=1):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.inner = nn.Sequential(
                conv_bn_relu(channels, channels), conv_bn_relu(channels, channels)
            )

        def forward(self, x):
            return x + self.inner(x)

    return nn.Sequential(
        conv_bn_relu(3, 16, 7, 4),
        conv_bn_relu(16, 32, 3, 2),
        Residual(32),
        conv_bn_relu(32, 64, 3, 2),
        conv_bn_relu(64, 128, 3, 2),
        Residual(128),
        nn.Flatten(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def test_trains_as_pytorch_does(torch, target):
    size, steps = 16, 20
    trainer = make_trainer(target, size=size)
    reference = torch_resnet9(torch)
    with torch.no_grad():
        for ours, theirs in zip(trainer.parameters, reference.parameters(), strict=True):
            theirs.copy_(torch.tensor(ours.numpy()))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02, momentum=0.9)
    ours, theirs = [], []
    for images, labels in make_batches(steps, size):
        ours.append(trainer.step(images, labels)[0])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            reference(torch.tensor(images)), torch.tensor(labels)
        )
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert np.mean(ours[-3:]) < 0.5 * ours[0]

    norms = [m for m in reference.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    # The sizes of the images that each batch_norm sees.
    pixels = [8 * 8, *[4 * 4] * 3, 2 * 2, *[1] * 3]
    means, variances = trainer.statistics[::2], trainer.statistics[1::2]
    for norm, area, mean, var in zip(norms, pixels, means, variances, strict=True):
        np.testing.assert_allclose(mean.numpy(), norm.running_mean, rtol=1e-2, atol=2e-3)
        # PyTorch keeps the unbiased variance and TVM the biased one; the first value is 1.
        count, first = size * area, 0.9**steps
        expected = (norm.running_var - first) * (count - 1) / count + first
        np.testing.assert_allclose(var.numpy(), expected, rtol=1e-2, atol=1e-3)


class TestGradientCheck:
    """The check of a network's gradient against finite differences."""

    def check(self, network, target):
        ((images, labels),) = make_batches(1)
        return check_gradient(network, "nhwc", images, labels, target, seed=0)

    @pytest.mark.parametrize("model", ["lenet", pytest.param("resnet9", marks=pytest.mark.slow)])
    def test_accepts(self, model, target):
        assert self.check(_network.NETWORKS[model], target) < 1e-6

    def test_refuses_a_wrong_gradient(self, target):
        def scores(layers, images):
            x = layers.bb.emit(op.mean(images, [1, 2]))
            x = layers.linear(x, 10)
            held = layers.bb.emit(op.grad.no_grad(x))
            return layers.bb.emit(op.multiply(x, held))

        with pytest.raises(GradientCheckError, match="finite differences"):
            self.check(_network.Network(scores, _network.softmax_cross_entropy), target)


@pytest.mark.slow
def test_schedules_keep_the_meaning(target):
    module, layers = _training.loss_module(_network.NETWORKS["lenet"], BATCH, "nchw")
    ((images, labels),) = make_batches(1)
    arguments = [images, labels, *_network.draw_all(layers.parameters, seed=0)]
    plain = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    scheduled = _compile.compile_module(module, target)
    results = [
        machine["loss_adjoint"](*map(tvm.runtime.tensor, arguments))
        for machine in (plain, scheduled)
    ]
    for expected, result in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-3, atol=1e-5)


class TestCommand:
    """The command itself."""

    def test_trains_on_digits(self, command, tmp_path, capsys):
        out = tmp_path / "new" / "out"
        options = ["--epochs", "3", "--batch-size", "32", "--lr", "0.02", "--layout", "nhwc"]
        assert command.main([*options, "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "gradient agrees with finite differences" in printed
        accuracy = float(printed.strip().rpartition("held-out accuracy: ")[2].rstrip("%"))
        assert accuracy > 85
        (picture,) = out.iterdir()
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000

    @pytest.mark.slow
    def test_trains_on_cifar10(self, command, tmp_path, capsys):
        for seed, name in enumerate(TestCifar10.FILES):
            TestCifar10.write(tmp_path / name, TestCifar10.content(8, seed))
        options = ["--model", "lenet", "--optimizer", "adam", "--epochs", "1", "--batch-size", "8"]
        assert command.main([*options, "--data", str(tmp_path), "--out", str(tmp_path)]) == 0
        assert "CIFAR-10: 40 images to train on, 8 held out" in capsys.readouterr().out

    def test_says_that_training_diverged(self, command, tmp_path, capsys):
        options = ["--model", "lenet", "--lr", "1e30", "--epochs", "1", "--out", str(tmp_path)]
        assert command.main(options) == 1
        assert "try a smaller --lr" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--epochs", "0"], "--epochs: it must be a positive integer, but it is '0'"),
            (["--epochs", "two"], "--epochs: it must be a positive integer"),
            (["--batch-size", "-4"], "--batch-size: it must be a positive integer"),
            (["--batch-size", "1438"], "--batch-size 1438 is more than the 1437 images"),
            (["--lr", "nan"], "--lr: it must be a positive number"),
            (["--lr", "0"], "--lr: it must be a positive number"),
            (["--seed", "-1"], "--seed: it must be a non-negative integer"),
            (["--model", "vgg"], "--model: invalid choice: 'vgg'"),
            (["--layout", "chwn"], "--layout: invalid choice"),
            (["--optimizer", "lbfgs"], "--optimizer: invalid choice"),
            (["--target", "nonsense"], "--target 'nonsense' is no target that TVM knows"),
            (["--data", "nowhere"], "nowhere does not hold data_batch_1"),
        ],
    )
    def test_refuses_bad_arguments(self, command, arguments, message, capsys):
        with pytest.raises(SystemExit) as exit_info:
            command.main(arguments)
        assert exit_info.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())

    def test_refuses_an_output_that_is_a_file(self, command, tmp_path, capsys):
        (tmp_path / "file").touch()
        with pytest.raises(SystemExit):
            command.main(["--out", str(tmp_path / "file")])
        assert "file" in capsys.readouterr().err

    def test_names_the_missing_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        with pytest.raises(_data.DataError, match=r"'\.\[examples\]'"):
            _data.load_digits()
