"""The examples of public names: every name of the pages on the API has one, and those in docstrings
run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from processes import forks_of_source

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: The names without an example, with the reason.
WITHOUT = {
    **dict.fromkeys(
        (
            "relax_grad.MissingGradient",
            "relax_grad.coverage.OperatorCoverage",
            "relax_grad.distributed.DataParallelTrainer",
            "relax_grad.distributed.Session",
            "relax_grad.distributed.Shard",
            "relax_grad.distributed.TensorParallelTrainer",
            "relax_grad.frontend.constants.Lifted",
            "relax_grad.frontend.onnx.Imported",
            "relax_grad.frontend.torch.Imported",
            "relax_grad.registry.Classification",
            "relax_grad.registry.Declaration",
            "relax_grad.testing.GradientReport",
            "relax_grad.training.Adapter",
            "relax_grad.training.History",
            "relax_grad.training.Lora",
            "relax_grad.training.Memory",
            "relax_grad.training.QuantizedWeight",
            "relax_grad.training.StepResult",
            "relax_grad.training.TrainStep",
        ),
        "another function returns it, and has an example",
    ),
    "relax_grad.distributed.WorkerError": "raised where a worker ends",
    "relax_grad.frontend.onnx.UnsupportedOperatorError": "raised by the importers",
    "relax_grad.training.Optimizer": "the base class of the optimizers",
    "relax_grad.testing.check.TOLERANCES": "a constant that the page shows",
    **dict.fromkeys(
        (
            "relax_grad.register_legalize",
            "relax_grad.registry.register_infer_layout",
            "relax_grad.registry.register_infer_type",
            "relax_grad.registry.register_nondifferentiable",
        ),
        "takes an operator without the attribute; register_gradient has an example",
    ),
}

#: The packages that the examples of a file import.
NEEDED = {
    "backend/dispatch.py": ("torch",),
    "distributed/_processes.py": ("torch",),
    "distributed/session.py": ("torch",),
    "distributed/tensor_trainer.py": ("torch",),
    "distributed/trainer.py": ("torch",),
    "frontend/torch/_imported.py": ("torch",),
    "frontend/torch/run/wrap.py": ("torch",),
    "frontend/torch/model.py": ("torch",),
    "testing/parity.py": ("torch",),
}


def public_names() -> list[str]:
    """Return the names on the pages on the API, except the members of classes."""
    names, module = [], ""
    pages = sorted((ROOT / "docs/api").glob("*.md"))
    for line in "\n".join(page.read_text() for page in pages).splitlines():
        if directive := re.match(r"\.\. auto(\w+):: (\S+)", line):
            kind, name = directive.groups()
            module = name if kind == "module" else ""
            if kind != "module":
                names.append(name)
        elif module and (members := re.match(r"\s+:members: (.+)", line)):
            names += [f"{module}.{name}" for name in members[1].split(", ")]
    return names


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file that have examples."""
    source = path.read_text()
    if ">>> " not in source:  # most files, which take long to parse
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and ">>> " in text:
            yield text


def examples_of(text: str) -> str:
    """Return the statements of a docstring's examples."""
    return "\n".join(re.findall(r"^\s*(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE))


def used(code: str) -> set[str]:
    """Return the words of code without its imports."""
    lines = [line for line in code.splitlines() if not re.match(r"\s*(import|from) ", line)]
    return set(re.findall(r"\w+", "\n".join(lines)))


WITH_EXAMPLES = [
    path for path in sorted((ROOT / "relax_grad").rglob("*.py")) if any(docstrings(path))
]


def test_every_public_name_has_an_example():
    words = set()
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            words |= used(block)
    for path in WITH_EXAMPLES:
        for text in docstrings(path):
            words |= used(examples_of(text))
    names = public_names()
    assert len(names) > 100
    missing = {name for name in names if name.rpartition(".")[2] not in words}
    assert missing == set(WITHOUT)


#: Names of these modules that only the package itself uses.
INTERNAL = {"relax_grad.cpu.dispatch": {"CallSite", "Kernel", "kernel_for"}}


def test_every_public_name_is_on_a_page():
    titles = {
        path.read_text().partition("\n")[0].removeprefix("# "): path.read_text()
        for path in (ROOT / "docs/api").glob("*.md")
    }
    index = (ROOT / "docs/api.md").read_text()
    assert all(f"[`{name}`]" in index or f"[{name}]" in index for name in titles)
    for name, page in titles.items():
        is_absent = "torch" in name and not importlib.util.find_spec("torch")
        if is_absent or not name.startswith("relax_grad"):
            continue
        module = importlib.import_module(name)
        public = set(getattr(module, "__all__", ())) - {"__version__"} - INTERNAL.get(name, set())
        # Modules have pages of their own.
        public = {
            member for member in public if not isinstance(getattr(module, member), ModuleType)
        }
        # The page of the package has the names that it exports itself.
        missing = {member for member in public if not re.search(rf"\b{member}\b", page)}
        missing -= {
            member for member in missing if f"relax_grad.{member}\n" in titles["relax_grad"]
        }
        assert missing == set(), name


def test_an_import_is_no_example():
    assert used("from relax_grad import vjp\nx = hvp(y)\n") == {"x", "hvp", "y"}
    assert examples_of("text\n>>> a = 1\n>>> with b:\n...     c\n1\n") == "a = 1\nwith b:\n    c"


@pytest.fixture(scope="module")
def forks():
    """Yield separate processes, because examples make registrations and set the number of
    threads."""
    with forks_of_source() as processes:
        yield processes


def program_of(texts: list[str], module: str) -> str:
    """Return a program that runs the examples of docstrings of a module, each with names of its
    own."""
    return (
        "import doctest, importlib\n"
        f"names = vars(importlib.import_module({module!r}))\n"
        "runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()\n"
        f"for i, text in enumerate({texts!r}):\n"
        "    runner.run(parser.get_doctest(text, dict(names), f'docstring {i}', None, None))\n"
        "assert runner.tries and not runner.failures\n"
    )


@pytest.mark.parametrize(
    "path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT / "relax_grad").as_posix()
)
def test_examples_run(path, forks, tmp_path):
    file = path.relative_to(ROOT)
    for package in NEEDED.get(file.relative_to("relax_grad").as_posix(), ()):
        if not importlib.util.find_spec(package):
            pytest.skip(f"the examples need {package}")
    program = tmp_path / "example.py"
    program.write_text(
        program_of(
            list(docstrings(path)), ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        )
    )
    code, printed = forks.run(program)
    assert code == 0, printed


def test_an_example_that_is_wrong_is_told(forks, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(program_of([">>> 1 + 1\n3\n"], "relax_grad"))
    code, printed = forks.run(program)
    assert code == 1
    assert "Expected:" in printed
