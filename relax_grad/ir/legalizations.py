"""The legalizations of operators, and whether a user has changed them."""

from __future__ import annotations

from tvm.ir import Op

#: The legalizations by operator when relax_grad had registered its own.
_known: dict[str, object] = {}


def note() -> None:
    """Remember the present legalizations, by TVM and relax_grad, in the first call."""
    if not _known:
        _known.update(_present())


def are_unchanged() -> bool:
    """Tell whether all legalizations are by TVM and relax_grad.

    With others, two programs may differ although their modules are equal. A replacement that was
    registered before ``import relax_grad`` is not recognized.
    """
    present = _present()
    return present.keys() == _known.keys() and all(
        name.startswith("relax.") and rule.same_as(_known[name])  # type: ignore[attr-defined]
        for name, rule in present.items()
    )


def _present() -> dict[str, object]:
    rules = {name: Op.get(name).get_attr("FLegalize") for name in map(str, Op.list_op_names())}
    return {name: rule for name, rule in rules.items() if rule is not None}
