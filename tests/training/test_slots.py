"""Names of the optimizer's state and of hyperparameters are parsed to what they were made of."""

from __future__ import annotations

import pytest

from relax_grad.training._slots import Hyperparameter, Slot


@pytest.mark.parametrize(
    "slot",
    [
        Slot("step"),
        Slot("exp_avg", "fc.weight"),
        Slot("master", "layers/0/weight"),
        Slot("ema", "a:b/c"),
        Slot("gradient", ""),
    ],
)
def test_a_slot_is_parsed(slot):
    assert Slot.parse(str(slot)) == slot


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lr", ("lr", None)),
        ("lr:*.bias", ("lr", "*.bias")),
        ("weight_decay:blocks/*", ("weight_decay", "blocks/*")),
        ("lr:a:b", ("lr", "a:b")),
        ("lr:", ("lr", "")),
    ],
)
def test_a_hyperparameter_is_parsed(name, parts):
    hyperparameter = Hyperparameter.parse(name)
    assert hyperparameter == parts
    assert str(hyperparameter) == name


def test_the_learning_rate_of_a_group_is_no_kind_of_its_own():
    assert Hyperparameter.parse("lr_of_something").kind == "lr_of_something"
    assert str(Slot.parse("emaciated/w")) == "emaciated/w" != str(Slot("ema", "ciated/w"))
