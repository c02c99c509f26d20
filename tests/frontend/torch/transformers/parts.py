"""The parts that transformers share: their form, their configurations and their operands."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch_models import set_seeds
from torch_packages import torchvision


class Model(NamedTuple):
    """A module with its arguments, as :func:`torch_models.check` takes them.

    Attributes
    ----------
    module : nn.Module
        The module.
    args, kwargs : tuple, dict
        Its arguments.
    options : dict
        Further arguments of the check.
    """

    module: nn.Module
    args: tuple = ()
    kwargs: dict = {}  # noqa: RUF012  (never written)
    options: dict = {}  # noqa: RUF012


#: The tolerance of a model of float64 that computes its loss, normalisations or angles in float32.
SINGLE = 2e-5

#: The share of the largest element of a tensor that a difference may have.
TOLERANCE = {
    "encoders": 1e-9,
    "decoders": SINGLE,
    "translation": SINGLE,
    "sounds": 1e-8,
    "images": 1e-8,
    "adapters": SINGLE,
    "plain": 1e-9,
}

#: The functions that return models, by family and name.
FAMILIES: dict[str, dict[str, Callable[[], Model]]] = {family: {} for family in TOLERANCE}

#: Models that cannot be imported; the option ``line`` is a pattern of the message.
REFUSED: dict[str, dict[str, Callable[[], Model]]] = {family: {} for family in TOLERANCE}

#: The number of words, the batch and the length of texts.
WORDS, BATCH, LENGTH = 48, 2, 6

TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
IMAGE = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 5,
    **NO_DROPOUT,
}
GPT = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}


def model(family: str, *forms: tuple, table=FAMILIES) -> Callable:
    """Enter a function into a table, once for each form: its suffix and its arguments."""

    def enter(function):
        name = function.__name__.strip("_")
        for suffix, *arguments in forms or [("",)]:
            table[family]["-".join(filter(None, (name, suffix)))] = (
                lambda arguments=tuple(arguments): _seeded(family, function, arguments)
            )
        return function

    return enter


def _seeded(family: str, function: Callable, arguments: tuple) -> Model:
    set_seeds()
    built = function(*arguments)
    return built._replace(options={"tolerance": TOLERANCE[family], **built.options})


def transformers():
    """Return the package transformers."""
    torchvision()
    return importlib.import_module("transformers")


def hugging_face(kind: str, config: str, attention: str = "eager", **values) -> nn.Module:
    """Return a model of transformers of a configuration."""
    package = transformers()
    config = getattr(package, config)(**values)
    config._attn_implementation = attention
    return getattr(package, kind)(config).train().double()


def words(*shape: int) -> torch.Tensor:
    """Return indices of words, none of which is a special one."""
    return torch.randint(5, WORDS, shape or (BATCH, LENGTH))


def padding(length: int = LENGTH, left: bool = False) -> torch.Tensor:
    """Return the attention mask of texts of different lengths."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if left:
        mask[1, : length // 3] = 0
    else:
        mask[1, -(length // 3) :] = 0
    return mask


def texts(labels: torch.Tensor | None = None, left: bool = False) -> dict:
    """Return words, their mask and labels; a padded word has none."""
    mask = padding(left=left)
    if labels is None:
        labels = words().masked_fill(mask == 0, -100)
    return {"input_ids": words(), "attention_mask": mask, "labels": labels}


def images(channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size, dtype=torch.float64)


def classes() -> torch.Tensor:
    return torch.tensor([3, 1])
