"""Public functions have types, which the package promises by its file py.typed."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "relax_grad"


def functions(body: list[ast.stmt], is_class: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the public functions and methods, each with whether its first parameter is an
    object."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_special = node.name.startswith("__") and node.name.endswith("__")
            if is_special or not node.name.startswith("_"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                yield node, is_class and "staticmethod" not in decorators
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body, is_class=True)
        elif isinstance(node, ast.If | ast.Try):
            yield from functions(node.body, is_class)
            yield from functions(node.orelse, is_class)


def untyped(source: str) -> Iterator[str]:
    """Yield the parameters without a type, and the functions without that of their result.

    A constructor returns nothing: it needs no type of its result.
    """
    for function, is_method in functions(ast.parse(source).body):
        parameters = [*function.args.posonlyargs, *function.args.args][is_method:]
        parameters += [
            *function.args.kwonlyargs,
            *filter(None, (function.args.vararg, function.args.kwarg)),
        ]
        for parameter in parameters:
            if parameter.annotation is None:
                yield f"{function.name}({parameter.arg})"
        if function.returns is None and function.name != "__init__":
            yield f"{function.name} -> ?"


def test_functions_without_types_are_found():
    source = """
def f(a, b: int, *c, d, **e) -> None: ...
def g(): ...
def _private(a): ...
class C:
    def __init__(self, x): ...
    def method(self, y: int): ...
    @staticmethod
    def of(z) -> C: ...
    def _hidden(self, x): ...
class _D:
    def method(self, x): ...
if True:
    def h(x) -> None: ...
else:
    def i(y) -> None: ...
"""
    assert list(untyped(source)) == [
        "f(a)",
        "f(d)",
        "f(c)",
        "f(e)",
        "g -> ?",
        "__init__(x)",
        "method -> ?",
        "of(z)",
        "h(x)",
        "i(y)",
    ]


def test_public_functions_have_types():
    modules = [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if not any(
            part.startswith("_") and part != "__init__.py" for part in path.relative_to(ROOT).parts
        )
    ]
    assert len(modules) > 300
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in modules
        for problem in untyped(path.read_text())
    ]
    assert not problems, "annotate these public parameters and results:\n" + "\n".join(problems)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the packages that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def test_types_are_checked_without_the_extras():
    """The style is checked where no other package is installed."""
    packages = {
        name for path in ROOT.rglob("*.py") for name in imported(ast.parse(path.read_text()))
    }
    packages -= {"relax_grad", *sys.stdlib_module_names}
    assert {"numpy", "tvm"} <= packages
    text = (ROOT.parent / "pyproject.toml").read_text()
    settings = text[text.index("[tool.mypy]") : text.index("[tool.pytest")]
    # ml_dtypes is a dependency of TVM, and has types.
    missing = packages - set(re.findall(r'"(\w+)\.\*"', settings)) - {"ml_dtypes"}
    assert not missing, f"list these under [[tool.mypy.overrides]] in pyproject.toml: {missing}"
