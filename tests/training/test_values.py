"""Values of Python as JSON."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from relax_grad.training._values import described, restored


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text"], "b": {"c": {}}},
        {2: "two", 2.5: None, None: [{1: 1}]},
        {"1": "text", 1: "number"},
        Counter({3: 2, 9: 1}),
        Counter(),
        {"relax_grad.kind": "dict", "items": [[1, 2]]},
    ],
)
def test_values_keep_their_types(value):
    found = restored(json.loads(json.dumps(described(value, "more"))))
    assert found == value
    assert type(found) is type(value)


def test_other_values_are_named():
    with pytest.raises(TypeError, match=r"more\['a'\]\[0\] is <function.*: leave it out"):
        described({"a": [described]}, "more")
    with pytest.raises(TypeError, match=r"holds no complex, but more\['a'\] is 1j"):
        described({"a": 1j}, "more")
    with pytest.raises(TypeError, match=r"keys of more\['a'\] must be text or numbers"):
        described({"a": {(1,): 1}}, "more")
    for damaged in ({"items": []}, {"relax_grad.kind": "set", "items": []}):
        damaged.setdefault("relax_grad.kind", "set")
        with pytest.raises(ValueError, match="unknown object"):
            restored(damaged)
    with pytest.raises(ValueError, match="unknown object"):
        restored({"relax_grad.kind": "dict", "items": [[1, 2, 3]]})
