"""The skeleton of a rule or of a backward operator:
``python tests/support/new_operator.py NAME FAMILY``.

NAME is an operator of TVM, for which a rule is added (``relax.cos``), or a new backward operator
(``softplus_backward_data``), with all its entries. FAMILY names the module of each part, as in
``unary`` or ``nn/pool``. ``--corrects`` states the fault of TVM's rule, which the new one replaces.
Samples that exist are kept. What remains to be written raises an error that says so, and is printed
at the end.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class SkeletonError(ValueError):
    """A name or a family for which there is no skeleton."""


@dataclass(frozen=True)
class Entry:
    """The text that is added to a file, and the names that it imports: pairs of a module and a
    name."""

    path: str
    text: str
    imports: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Operator:
    """An operator of TVM: its name, and the names of its arguments and attributes.

    Attributes
    ----------
    attributes : dict[str, str]
        The attributes of its builder, with the text of their defaults; empty for one without a
        default.
    attrs_type : str
        The type key of the attributes; empty without any.
    """

    name: str
    arguments: tuple[str, ...]
    attributes: dict[str, str]
    attrs_type: str

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def builder(self) -> str:
        """The builder as an expression."""
        return f"relax.op.{self.name.removeprefix('relax.')}"


def operator_of(name: str) -> Operator:
    """Return an operator of the installed TVM."""
    from tvm import relax
    from tvm.ir import Op

    if name not in Op.list_op_names():
        raise SkeletonError(f"TVM has no operator {name}")
    arguments = tuple(str(argument.name) for argument in Op.get(name).arguments)
    builder = relax.op
    for part in name.removeprefix("relax.").split("."):
        builder = getattr(builder, part, None)
    if builder is None:
        raise SkeletonError(f"TVM has no builder of {name} in relax.op")
    params = list(inspect.signature(builder).parameters.values())[len(arguments) :]
    attributes = {p.name: "" if p.default is p.empty else repr(p.default) for p in params}
    attrs_type = Op.get(name).attrs_type_key if attributes else ""
    return Operator(name, arguments, attributes, attrs_type)


def forward_of(name: str) -> Operator:
    """Return the forward operator of a backward operator, by its name."""
    from tvm.ir import Op

    forward = name.partition("_backward")[0]
    names = [
        op
        for op in Op.list_op_names()
        if op.startswith("relax.") and op.rpartition(".")[2] == forward
    ]
    if len(names) != 1:
        known = f"several operators {', '.join(sorted(names))}" if names else "no operator"
        raise SkeletonError(
            f"{name} is the gradient of {forward}, but TVM has {known} of that name"
        )
    return operator_of(names[0])


def entries_of(name: str, family: str, corrects: str = "") -> list[Entry]:
    """Return the entries of a rule (``relax.*``) or of a backward operator."""
    if name.startswith("relax."):
        return _of_rule(operator_of(name), family, corrects)
    if corrects:
        raise SkeletonError(
            f"corrects states the fault of TVM's rule, but {name} is no operator of TVM"
        )
    if "_backward" not in name or not name.isidentifier():
        raise SkeletonError(
            "NAME must be an operator of TVM such as relax.nn.softplus, or "
            f"<forward>_backward_<argument> or <forward>_backward, but it is {name}"
        )
    return _of_backward(name, forward_of(name), family)


def check_free(name: str, corrects: str = "") -> None:
    """Raise an error if relax_grad has the rule, or the backward operator, or a reason for having
    none, or if TVM has a rule whose fault is not stated."""
    from relax_grad import registry

    full = name if name.startswith("relax.") else f"relax.grad.{name}"
    if full not in registry.operators():
        return
    entry = registry.classify(full)
    if full != name:
        raise SkeletonError(f"relax_grad has the operator {full} already")
    if entry.kind == "non-differentiable":
        raise SkeletonError(
            f"{name} has no gradient: {entry.reason}; remove it from "
            "relax_grad/rules/nondifferentiable.py first"
        )
    if entry.rule == "relax_grad":
        raise SkeletonError(f"relax_grad has a rule of {name} already")
    if entry.rule == "TVM" and not corrects:
        raise SkeletonError(
            f"TVM has a rule of {name}, which python -m relax_grad check {name} examines; a rule "
            "that replaces it states the fault of TVM's: CORRECTS='its gradient at 0 is NaN'"
        )
    if entry.rule != "TVM" and corrects:
        raise SkeletonError(f"corrects states the fault of TVM's rule, but TVM has none of {name}")


def has_samples(name: str) -> bool:
    """Tell whether an operator has samples."""
    from relax_grad.testing.samples import samples

    try:
        return bool(samples(name))
    except ValueError:
        return False


def _of_rule(operator: Operator, family: str, fault: str) -> list[Entry]:
    name, arguments = operator.last_name, operator.arguments
    corrects = f", corrects={json.dumps(fault)}" if fault else ""
    partials = ", ".join(f"{argument}_grad" for argument in arguments)
    rule = f'''
@register_gradient("{operator.name}"{corrects})
def {name}(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of {name}.

    Forward form: ``result = {name}({", ".join(arguments)})``.

    Backward form: ``[{partials}]``.
    """
    raise GradientError("the rule of {name} is not written")
'''
    dots = "." * (2 + family.count("/"))
    imports = [
        ("tvm", "relax"),
        (f"{dots}errors", "GradientError"),
        (f"{dots}registry", "register_gradient"),
    ]
    entries = [Entry(f"relax_grad/rules/{family}.py", rule, imports)]
    if not has_samples(operator.name):
        attributes = operator.attributes
        entries.append(_samples(operator.name, name, len(arguments), attributes, family))
    return entries


def _of_backward(name: str, forward: Operator, family: str) -> list[Entry]:
    last = family.rpartition("/")[2]
    argument = name.partition("_backward")[2].removeprefix("_") or forward.arguments[0]
    if argument not in forward.arguments:
        raise SkeletonError(
            f"{forward.name} has no argument {argument}, but {', '.join(forward.arguments)}"
        )
    arguments = ("output_grad", *forward.arguments)
    attributes = "".join(f"call.attrs.{attribute},\n        " for attribute in forward.attributes)
    return [
        Entry(
            f"relax_grad/op/{last}.py",
            _declaration(name, forward, argument),
            [
                ("tvm", "relax"),
                ("tvm.ir", "Op"),
                ("._infer", "check_shape"),
                ("._infer", "forward_type"),
                ("._infer", "tensor_type"),
                ("._layout", "follow_elementwise"),
                (".declare", "declare_op"),
            ],
        ),
        Entry(f"relax_grad/topi/{last}.py", _expression(name, forward, argument), [("tvm", "te")]),
        Entry(
            f"relax_grad/legalize/{last}.py",
            f'''
@register_legalize("relax.grad.{name}")
def _{name}(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_{last}.{name},
        *call.args,
        {attributes}primfunc_name_hint="{name}",
    )
''',
            [
                ("tvm", "relax"),
                ("..registry", "register_legalize"),
                ("..topi", f"{last} as topi_{last}"),
            ],
        ),
        Entry(
            f"relax_grad/rules/grad/{last}.py",
            f'''
@register_gradient("relax.grad.{name}")
def {name}(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of {name}.

    Forward form: ``{argument}_grad = {name}({", ".join(arguments)})``.

    Backward form: ``[{", ".join(f"{operand}_grad" for operand in arguments)}]``.
    """
    raise GradientError("the rule of {name} is not written")
''',
            [
                ("tvm", "relax"),
                ("...errors", "GradientError"),
                ("...registry", "register_gradient"),
            ],
        ),
        _samples(f"relax.grad.{name}", name, len(arguments), forward.attributes, last),
    ]


def _declaration(name: str, forward: Operator, argument: str) -> str:
    params = "".join(f"{operand}: relax.Expr, " for operand in forward.arguments)
    attributes = "".join(
        f"{attribute}={default}, " if default else f"{attribute}, "
        for attribute, default in forward.attributes.items()
    )
    call = f"{forward.builder}({', '.join([*forward.arguments, *forward.attributes])})"
    described = "".join(
        f'        ("{operand}", "Tensor", "As given to {forward.last_name}."),\n'
        for operand in forward.arguments
    )
    attrs = f"        {call}.attrs,\n" if forward.attributes else ""
    as_given = (
        f"    {', '.join(forward.attributes)}\n        As given to ``{forward.builder}``.\n"
        if forward.attributes
        else ""
    )
    attrs_type = f'    "{forward.attrs_type}",\n' if forward.attrs_type else ""
    return f'''
def {name}(output_grad: relax.Expr, {params}{attributes}) -> relax.Call:
    """Gradient of {forward.last_name} with respect to its {argument}.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``{forward.last_name}``.
    {", ".join(forward.arguments)} : relax.Expr
        As given to ``{forward.builder}``.
{as_given}
    Returns
    -------
    result : relax.Call
        A tensor of the type of ``{argument}``; half precision is computed in float32.
    """
    return relax.Call(
        Op.get("relax.grad.{name}"),
        [output_grad, {", ".join(forward.arguments)}],
{attrs}    )


def _infer_{name}(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    forward = relax.Call(Op.get("{forward.name}"), call.args[1:], call.attrs)
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    return tensor_type(call, {1 + forward.arguments.index(argument)}, "{argument}")


declare_op(
    "{name}",
    [
        (
            "output_grad",
            "Tensor",
            "The gradient with respect to the result of {forward.last_name}.",
        ),
{described}    ],
    _infer_{name},
    {name},
{attrs_type})
follow_elementwise("relax.grad.{name}")
'''


def _expression(name: str, forward: Operator, argument: str) -> str:
    params = "".join(f"{operand}: te.Tensor, " for operand in ("output_grad", *forward.arguments))
    attributes = ", ".join(forward.attributes)
    return f'''
def {name}({params}{attributes}) -> te.Tensor:
    """Gradient of {forward.last_name} with respect to its {argument}.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    {", ".join([*forward.arguments, *forward.attributes])}
        As given to {forward.last_name}.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of ``{argument}``.
    """
    raise NotImplementedError("the tensor expression of {name} is not written")
'''


def _samples(
    operator: str, function: str, tensors: int, attributes: dict[str, str], family: str
) -> Entry:
    inputs = ", ".join(["rng.normal(size=(2, 3, 4))"] * tensors)
    settings = ", ".join(f'"{name}": {default or "..."}' for name, default in attributes.items())
    text = f'''
@register_samples("{operator}")
def {function}(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([{inputs}], {{{settings}}}, note="plain")
'''
    imports = [
        ("collections.abc", "Iterator"),
        ("._sample", "Sample"),
        ("._sample", "register_samples"),
    ]
    return Entry(f"relax_grad/testing/samples/{family.rpartition('/')[2]}.py", text, imports)


def with_imports(source: str, imports: Sequence[tuple[str, str]]) -> str:
    """Return a module that imports these names too, each behind the other imports from its
    module."""
    for module, name in imports:
        tree = ast.parse(source)
        imports_of = [stmt for stmt in tree.body if isinstance(stmt, ast.ImportFrom)]
        same = [stmt for stmt in imports_of if f"{'.' * stmt.level}{stmt.module or ''}" == module]
        names = [_text(alias) for stmt in same for alias in stmt.names]
        if name in names:
            continue
        lines = source.splitlines(keepends=True)
        if same:
            first, last = same[0].lineno - 1, same[0].end_lineno
            added = sorted({*map(_text, same[0].names), name})
            lines[first:last] = [f"from {module} import {', '.join(added)}\n"]
        else:
            starts = [stmt for stmt in tree.body if isinstance(stmt, ast.Import | ast.ImportFrom)]
            lines.insert(starts[-1].end_lineno, f"from {module} import {name}\n")
        source = "".join(lines)
    return source


def _text(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def write(entries: Sequence[Entry], root: Path) -> Iterator[Path]:
    """Add the entries to their files, or none of them; yield the files."""
    texts = {}
    for entry in entries:
        path = root / entry.path
        if not path.is_file():
            known = sorted(file.stem for file in path.parent.glob("[!_]*.py"))
            raise SkeletonError(
                f"there is no module {entry.path}; make it first, with a docstring and an import "
                "of it in the __init__.py of its package, or choose a family of these: "
                f"{', '.join(known)}"
            )
        source = path.read_text()
        for statement in ast.parse(entry.text).body:
            name = getattr(statement, "name", None)
            if name and f"\ndef {name}(" in source:
                raise SkeletonError(f"{entry.path} has a function {name} already")
        texts[path] = with_imports(source, entry.imports).rstrip("\n") + "\n\n" + entry.text
    for path, text in texts.items():
        path.write_text(text)
        yield path


def remaining(name: str, family: str) -> Iterator[str]:
    """Yield what is left to do for the skeleton."""
    operator = name if name.startswith("relax.") else f"relax.grad.{name}"
    if name.startswith("relax."):
        yield "write the rule (docs/rules.md)"
    else:
        last = family.rpartition("/")[2]
        forward = forward_of(name).name
        yield (
            f"write the tensor expression in relax_grad/topi/{last}.py (docs/backward_operators.md)"
        )
        yield (
            f"write its gradient in relax_grad/rules/grad/{last}.py, or declare it by "
            "register_linear"
        )
        yield f"let the rule of {forward} emit it"
        yield (
            "examine the inference of types and the layout in relax_grad/op: the skeleton is for "
            "an element-wise operator"
        )
    if not name.startswith("relax."):
        yield "add samples of its attributes, broadcasting and edges (docs/samples.md)"
    elif has_samples(operator):
        yield f"examine whether the samples of {operator} show the fault; add those that do"
    else:
        yield "write the samples, with PyTorch's function where there is one (docs/samples.md)"
    yield "make format"
    yield f"python -m relax_grad check {operator}"
    yield f"make accuracy ARGS={operator}"
    yield "a line in CHANGELOG.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the skeleton of a rule or of an operator.")
    parser.add_argument("name", help="relax.cos, or softplus_backward_data")
    parser.add_argument("family", help="the module of its parts: unary, nn/pool, ...")
    parser.add_argument("--corrects", default="", help="the fault of TVM's rule, in one line")
    parser.add_argument("--root", type=Path, default=ROOT, help="the root of the repository")
    args = parser.parse_args(argv)
    try:
        check_free(args.name, args.corrects)
        for path in write(entries_of(args.name, args.family, args.corrects), args.root):
            print(f"written: {path.relative_to(args.root)}")
    except SkeletonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("remaining:")
    for line in remaining(args.name, args.family):
        print(f"  - {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
