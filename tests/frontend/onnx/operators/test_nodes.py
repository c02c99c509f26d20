"""The node tests of the package ``onnx``: each is right, or refused for the reason that a table
gives; and gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_node_gradients
import onnx_nodes

#: The parts of the sweeps over all node tests.
PARTS = 8

#: One in so many node tests is run by the default suite, and differentiated.
SHARE = 16


def cases(part: int) -> list:
    return onnx_nodes.cases(onnx_nodes.modules())[part::PARTS]


def test_a_share_of_the_node_tests():
    quick = [name for name in onnx_nodes.modules() if name not in onnx_nodes.SLOW_MODULES]
    found, right, refused = onnx_nodes.faults(onnx_nodes.cases(quick)[::SHARE])
    assert not found, "\n".join(found)
    assert right > 4 * refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_node_tests(part):
    found, right, refused = onnx_nodes.faults(cases(part))
    assert not found, "\n".join(found)
    assert right > 4 * refused > 0


def test_gradients_of_a_share_of_the_node_tests():
    quick = [name for name in onnx_nodes.modules() if name not in onnx_nodes.SLOW_MODULES]
    found, compared, refused = onnx_node_gradients.faults(onnx_nodes.cases(quick)[:: 2 * SHARE])
    assert not found, "\n".join(found)
    assert not refused, "\n".join(refused)
    assert compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_the_node_tests(part):
    found, compared, refused = onnx_node_gradients.faults(cases(part))
    assert not found, "\n".join(found)
    assert not refused, "\n".join(refused)
    assert compared > 100
