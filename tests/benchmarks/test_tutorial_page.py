"""The pictures and the output in docs/tutorial.md are those of one run of its code."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from _benchmark import MEASURED

tutorial = pytest.importorskip("tutorial")

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text("utf-8")


@pytest.fixture(scope="module")
def measured():
    return json.loads((MEASURED / "tutorial.json").read_text("utf-8"))


def test_the_page_shows_the_output(measured):
    assert "```\n" + "\n".join(measured["printed"][:5]) + "\n```" in PAGE
    before, after = measured["printed"][5].replace(",", "").split()[2::2]
    for accuracy in (before, after):
        assert f"{100 * float(accuracy):.1f} %" in PAGE


def test_the_losses_are_those_of_the_output(measured):
    means = [f"loss {sum(losses) / len(losses):.3f}" for losses in measured["losses"]]
    assert [line.partition(": ")[2].partition(",")[0] for line in measured["printed"][:5]] == means
    first, last = means[0].split()[1], means[-1].split()[1]
    assert f"falls from {first} to {last}" in PAGE


@pytest.mark.parametrize("name", tutorial.PICTURES)
def test_the_pictures_are_of_the_run(measured, name):
    text = (MEASURED / f"tutorial_{name}.svg").read_text("utf-8")
    assert text == tutorial.PICTURES[name](measured), "python benchmarks/run.py tutorial --draw"
    ElementTree.fromstring(text)
    assert f"```{{chart}} tutorial_{name}\n:alt: " in PAGE


def test_the_images_are_read_and_misread(measured):
    images = measured["images"]
    assert len(images["first"]) == tutorial.COUNT
    assert len(images["misread"]) == min(measured["misread"], tutorial.COUNT)
    assert all(image["answer"] != image["digit"] for image in images["misread"])
    right = 1 - measured["misread"] / 360
    assert f"{right:.3f}" in measured["printed"][4]
