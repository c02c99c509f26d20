"""Planted faults: their kinds, their draw, and a small package whose tests find one of two."""

from __future__ import annotations

import pytest
from mutants import Mutant, draw, mutants_of, outcome, planted

SOURCE = '''"""A - 1 in a docstring."""

def gradient(x, axis):
    if x.ndim < 2:
        raise ValueError("1 - 2")
    total = op.subtract(x, cast(-x, "float32"))
    return op.sum(total, axis=1) + shape[0] * (n - 1) if axis else text + ["no", "sum"]
'''

#: The kinds of faults of that source, and the text in whose place each stands.
PLANTED = [
    ("offset", "(x.ndim <= 2)"),
    ("sign", "op.add"),
    ("sign", "(x)"),
    ("dtype", "'float64'"),
    ("condition", "not (axis)"),
    ("sign", "(op.sum(total, axis=1) - (shape[0] * (n - 1)))"),
    ("term", "(op.sum(total, axis=1))"),
    ("axis", "2"),
    ("sign", "(shape[0] + (n - 1))"),
    ("term", "(shape[0])"),
    ("axis", "1"),
    ("sign", "(n + 1)"),
    ("term", "(n)"),
    ("offset", "2"),
]


def test_kinds_of_faults():
    found = mutants_of("relax_grad/rules/a.py", SOURCE)
    assert sorted((mutant.kind, mutant.text) for mutant in found) == sorted(PLANTED)
    for mutant in found:
        compile(mutant.applied(SOURCE), "a.py", "exec")
    (total,) = (mutant for mutant in found if mutant.text == "op.add")
    expected = 'relax_grad/rules/a.py:6: sign: total = op.add(x, cast(-x, "float32"))'
    assert total.described(SOURCE) == expected


def test_positions_count_bytes():
    (mutant,) = (m for m in mutants_of("a.py", 'x = "é" ; y = a - b\n') if m.kind == "sign")
    assert mutant.applied('x = "é" ; y = a - b\n') == 'x = "é" ; y = (a + b)\n'


@pytest.fixture
def shop(tmp_path):
    files = {
        "relax_grad/__init__.py": "",
        "relax_grad/rules/__init__.py": "",
        "relax_grad/rules/price.py": "def total(a, b):\n    return a + b\n",
        "relax_grad/topi/__init__.py": "",
        "relax_grad/topi/size.py": "def size(a, b):\n    return a - b\n",
        "tests/rules/test_price.py": (
            "from relax_grad.rules.price import total\ndef test():\n    assert total(0, 0) == 0\n"
            "def test_more():\n    assert total(1, 2) == 3\n"
        ),
        "pytest.ini": "[pytest]\nmarkers = core\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_draw_takes_rooms_in_turn(shop):
    rooms = ("rules", "topi")
    mutants = draw(shop, 3, 0, rooms)
    assert [mutant.path.split("/")[1] for mutant in mutants] == ["rules", "topi", "rules"]
    assert mutants == draw(shop, 3, 0, rooms)
    assert len(draw(shop, 100, 0, rooms)) == 4


def test_a_fault_is_found_by_the_first_test_that_fails_or_survives(shop):
    path = shop / "relax_grad/rules/price.py"
    before = path.read_text()
    (sign,) = (m for m in mutants_of("relax_grad/rules/price.py", before) if m.kind == "sign")
    assert outcome(shop, sign, 20) == "tests/rules/test_price.py::test_more"
    same = Mutant(sign.path, "none", sign.start, sign.stop, "b + a")
    assert outcome(shop, same, 20) == "survived"
    with planted(shop, sign):
        assert "a - b" in path.read_text()
    assert path.read_text() == before
