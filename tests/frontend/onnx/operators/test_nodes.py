"""The node tests of the package ``onnx``: each is right, or refused for the reason that a table
gives; and gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

from . import _node_gradients, _nodes

#: The parts of the sweeps over all node tests.
PARTS = 8

#: One in so many node tests is run by the default suite, and differentiated.
SHARE = 16


def cases(part: int) -> list:
    return _nodes.cases(_nodes.modules())[part::PARTS]


def test_a_share_of_the_node_tests():
    quick = [name for name in _nodes.modules() if name not in _nodes.SLOW_MODULES]
    found, right, refused = _nodes.faults(_nodes.cases(quick)[::SHARE])
    assert not found, "\n".join(found)
    assert right > 4 * refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_node_tests(part):
    found, right, refused = _nodes.faults(cases(part))
    assert not found, "\n".join(found)
    assert right > 4 * refused > 0


def test_gradients_of_a_share_of_the_node_tests():
    quick = [name for name in _nodes.modules() if name not in _nodes.SLOW_MODULES]
    found, compared, refused = _node_gradients.faults(_nodes.cases(quick)[:: 2 * SHARE])
    assert not found, "\n".join(found)
    assert not refused, "\n".join(refused)
    assert compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_the_node_tests(part):
    found, compared, refused = _node_gradients.faults(cases(part))
    assert not found, "\n".join(found)
    assert not refused, "\n".join(refused)
    assert compared > 100
