"""The images of the training example.

Both loaders return unnormalised 32x32 RGB images in ``uint8`` and NCHW;
:meth:`Dataset.normalise` converts a batch to network input.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

_SIZE = 32
_CLASSES = 10
_CIFAR_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
_CIFAR_TEST = "test_batch"


class DataError(ValueError):
    """The data cannot be read; the message names the file and its fault."""


@dataclass
class Dataset:
    """Images and labels for training, and others for evaluation.

    Attributes
    ----------
    name : str
        The name of the data in messages.
    train_images, test_images : np.ndarray
        Of shape ``(n, 3, 32, 32)`` and dtype uint8.
    train_labels, test_labels : np.ndarray
        Of shape ``(n,)`` and dtype int64, in ``[0, 10)``.
    shift : int
        The number of pixels by which a shift preserves the label of an image.
    mirror : bool
        Whether mirroring preserves the label of an image.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    shift: int
    mirror: bool

    def __post_init__(self):
        # A part of the images suffices for the mean, and keeps the float copy small.
        sample = self.train_images[:10_000].astype("float32")
        self._mean = sample.mean((0, 2, 3), keepdims=True)
        self._std = sample.std((0, 2, 3), keepdims=True) + 1e-6

    def normalise(self, images: np.ndarray) -> np.ndarray:
        """Normalise images to mean 0 and deviation 1 of each channel of the training data, in
        float32."""
        return (images.astype("float32") - self._mean) / self._std

    def batches(
        self, size: int, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the training data of one epoch in a new order, augmented and normalised.

        An incomplete last batch is dropped: its images appear in other epochs.
        """
        order = rng.permutation(len(self.train_labels))
        for start in range(0, len(order) - size + 1, size):
            picked = order[start : start + size]
            images = vary(self.train_images[picked], self.shift, self.mirror, rng)
            yield self.normalise(images), self.train_labels[picked]


def load_digits() -> Dataset:
    """Load scikit-learn's handwritten digits: 1797 grey images of 8x8, scaled up to 32x32.

    The same fifth of each class is always held out.

    Raises
    ------
    DataError
        If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; "
            "install it with: pip install '.[examples]'"
        ) from error
    digits = datasets.load_digits()
    grey = np.rint(scale_up(digits.images / 16 * 255, _SIZE)).astype("uint8")
    images = np.repeat(grey[:, np.newaxis], 3, axis=1)
    train_images, test_images, train_labels, test_labels = model_selection.train_test_split(
        images,
        digits.target.astype("int64"),
        test_size=0.2,
        stratify=digits.target,
        random_state=0,
    )
    return Dataset(
        "digits", train_images, train_labels, test_images, test_labels, shift=2, mirror=False
    )


def load_cifar10(folder: Path) -> Dataset:
    """Load CIFAR-10 from the files of its Python version.

    Parameters
    ----------
    folder : Path
        The folder ``cifar-10-batches-py`` with the files ``data_batch_1`` to ``data_batch_5`` and
        ``test_batch`` (https://www.cs.toronto.edu/~kriz/cifar.html).

    Raises
    ------
    DataError
        If a file is missing or its contents are invalid.
    """
    names = [*_CIFAR_TRAIN, _CIFAR_TEST]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} does not hold {', '.join(missing)}; it must be the folder "
            "cifar-10-batches-py of CIFAR-10's Python version"
        )
    train = [_read_cifar_file(folder / name) for name in _CIFAR_TRAIN]
    train_images, train_labels = map(np.concatenate, zip(*train, strict=True))
    test_images, test_labels = _read_cifar_file(folder / _CIFAR_TEST)
    return Dataset(
        "CIFAR-10", train_images, train_labels, test_images, test_labels, shift=4, mirror=True
    )


def scale_up(images: np.ndarray, size: int) -> np.ndarray:
    """Scale square images ``(n, s, s)`` to ``(n, size, size)`` by bilinear interpolation."""
    old = images.shape[1]
    centres = (np.arange(size) + 0.5) * old / size - 0.5
    weights = np.array([np.interp(centres, np.arange(old), basis) for basis in np.eye(old)])
    return weights.T @ images @ weights


def vary(images: np.ndarray, shift: int, mirror: bool, rng: np.random.Generator) -> np.ndarray:
    """Shift each image by up to ``shift`` pixels, with black at the edge, and mirror every
    other."""
    padded = np.pad(images, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    corners = rng.integers(0, 2 * shift + 1, (len(images), 2))
    mirrored = rng.integers(0, 2, len(images)) if mirror else np.zeros(len(images))
    result = np.empty_like(images)
    for i, (top, left) in enumerate(corners):
        crop = padded[i, :, top : top + _SIZE, left : left + _SIZE]
        result[i] = crop[:, :, ::-1] if mirrored[i] else crop
    return result


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that reads only arrays and plain values: a pickle can name any function to
    call."""

    # By name without the module, because NumPy has moved these between its modules.
    _NUMPY: ClassVar = {
        "_frombuffer": np.empty(1).__reduce_ex__(5)[0],
        "_reconstruct": np.empty(1).__reduce_ex__(2)[0],
        "dtype": np.dtype,
        "ndarray": np.ndarray,
    }
    # Python 3 writes bytes for Python 2 as calls of these.
    _BYTES: ClassVar = {("__builtin__", "bytes"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str):
        if module.partition(".")[0] == "numpy" and name in self._NUMPY:
            return self._NUMPY[name]
        if (module, name) in self._BYTES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def _read_cifar_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # A damaged pickle raises almost anything.
        raise DataError(f"{path} is not a pickle of CIFAR-10 images: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a dict, but it holds a {type(content).__name__}")
    missing = [key for key in (b"data", b"labels") if key not in content]
    if missing:
        raise DataError(f"{path} lacks {missing}; it has {sorted(content, key=repr)}")
    data, labels = content[b"data"], content[b"labels"]
    width = 3 * _SIZE * _SIZE
    if not (isinstance(data, np.ndarray) and data.dtype == "uint8" and data.ndim == 2):
        raise DataError(f"{path}: data must be a matrix of uint8, but it is {_describe(data)}")
    if data.shape[1] != width:
        raise DataError(f"{path}: data must have {width} columns, but it is {_describe(data)}")
    if not len(data):
        raise DataError(f"{path} holds no images")
    try:
        labels = np.asarray(labels).astype("int64", casting="safe").reshape(-1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: labels must be integers, but: {error}") from error
    if len(labels) != len(data):
        raise DataError(f"{path} holds {len(data)} images but {len(labels)} labels")
    if not (labels.min() >= 0 and labels.max() < _CLASSES):
        raise DataError(
            f"{path}: labels must lie in [0, {_CLASSES}), but they go from {labels.min()} to "
            f"{labels.max()}"
        )
    return data.reshape(-1, 3, _SIZE, _SIZE), labels


def _describe(value) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
