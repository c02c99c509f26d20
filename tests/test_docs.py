"""The documentation: every Python block of every page runs, and Sphinx builds it without a
warning."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import forks_of_source

from relax_grad.registry import operators

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^(`{3,})(\S*)", re.MULTILINE)


def python_of(page: str) -> str:
    """Return the Python blocks of a page as one program with the line numbers of the page."""
    lines = [""] * (page.count("\n") + 1)
    for block in _BLOCK.finditer(page):
        first = page.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


WITH_CODE = [page for page in PAGES if python_of(page.read_text()).strip()]


def test_python_of_keeps_line_numbers():
    page = "text\n```python\na = 1\n```\n\n```console\nls\n```\n```python\nb = a\n\nc = b\n```\n"
    assert python_of(page) == "\n\na = 1\n\n\n\n\n\n\nb = a\n\nc = b\n"


def test_pages_with_code_are_found():
    assert {page.name for page in WITH_CODE} >= {
        "README.md",
        "backward_operators.md",
        "checking.md",
        "conventions.md",
        "csv.md",
        "deployment.md",
        "differentiation.md",
        "distributed.md",
        "exporting.md",
        "errors.md",
        "fine_tuning.md",
        "getting_started.md",
        "layouts.md",
        "limits.md",
        "loops.md",
        "lora.md",
        "onnx.md",
        "onnxruntime.md",
        "operators.md",
        "own_operator.md",
        "pytorch.md",
        "rules.md",
        "semantics.md",
        "symbolic_batch.md",
        "trainer.md",
        "training.md",
        "tutorial.md",
        "web.md",
        "without_runtime.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_code_goes_unrun(page):
    """A block in any other language would appear on the page but never run."""
    fences = _FENCE.findall(page.read_text())
    # Longer fences are for directives that contain others.
    assert all(fence == "```" or not language or language[0] == "{" for fence, language in fences)
    languages = {language for _, language in fences} - {"", "python", "console"}
    if page.name in ("deployment.md", "without_runtime.md"):
        # tests/training/test_export.py, test_c_api.py and test_static_export.py compile it.
        languages -= {"cpp", "c"}
    if page.name == "web.md":
        languages -= {"js"}  # test_web_export.py and test_web_page.py run it
    assert all(re.fullmatch(r"\{[\w-]+\}", language) for language in languages), languages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_the_column(page):
    """A page of 1400 pixels shows 88 characters; docs/ruff.toml has the same number for Python."""
    code = re.findall(r"^```(?:python|cpp|c|js|console)\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert [line for block in code for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_an_editor(page):
    """Rows of tables and addresses cannot be divided."""
    lines = [line.strip() for line in page.read_text().splitlines() if len(line) > 100]
    assert [line for line in lines if not line.startswith(("|", "<img"))] == []


def test_installation_is_from_a_release_or_a_clone():
    """The first commands are those of both; errors name packages, and other pages the extra of a
    clone."""
    first = re.search(r"```console\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    packages = ["relax_grad[torch,train]", ".[torch,train]"]
    assert re.findall(r"^\$ pip install '(\S+)'", first, re.MULTILINE) == packages
    assert re.findall(r"^\$ make (\w+)", first, re.MULTILINE) == ["demo", "test"]
    folders = [ROOT / name for name in ("relax_grad", "examples", "benchmarks")]
    pages = [page for page in PAGES if page.name not in ("README.md", "index.md")]
    files = [*pages, *(path for folder in folders for path in folder.rglob("*.py"))]
    assert len(files) > 400
    assert [str(path) for path in files if "install 'relax_grad" in path.read_text()] == []
    assert [str(path) for path in files if re.search(r"relax_grad\[\w+\]", path.read_text())] == []


def test_the_comparison_has_a_source_for_each_system():
    page = (ROOT / "docs/comparisons.md").read_text()
    systems = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:]
    named = dict(zip(systems[::2], systems[1::2], strict=True))
    assert set(named) >= {"PyTorch eager", "torch.compile", "JAX", "ONNX Runtime training"}
    for name, text in named.items():
        assert re.search(r"\]\(https://", text), name
        assert re.search(r"\]\(\w+\.md", text), name
        # A measured figure comes from docs/_measured.
        assert not re.search(r"\d+\.\d\d\b(?!\.)|\d+ (?:times|%|ms)", text), name
    assert "docs/comparisons.md" in (ROOT / "README.md").read_text()


def sections() -> dict[str, list[str]]:
    """Return the pages of each section of the front page."""
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```$", (ROOT / "docs/index.md").read_text(), re.M | re.S
    )
    return {
        re.search(r":caption: (.+)", tree)[1]: re.findall(r"^\w+$", tree, re.M) for tree in trees
    }


def test_titles_of_guides_begin_with_a_verb():
    verbs = {
        "Add",
        "Check",
        "Compile",
        "Convert",
        "Differentiate",
        "Export",
        "Fine-tune",
        "Offload",
    }
    verbs |= {"Train", "Write"}
    pages = sections()
    guides = [*pages["First steps"], *pages["Training"], *pages["Compilation and gradients"]]
    guides += [page for page in pages["Contributors"] if page not in ("architecture", "upstream")]
    assert len(guides) > 15
    titles = {name: (ROOT / f"docs/{name}.md").read_text().partition("\n")[0] for name in guides}
    assert {name for name, title in titles.items() if title.split()[1] not in verbs} == set()
    assert all(title.startswith("# ") for title in titles.values())


def test_links_to_pages_name_their_titles():
    """A link whose text is a title has that of the page."""
    titles = {path.name: path.read_text().partition("\n")[0][2:] for path in PAGES[1:]}
    for page in PAGES:
        for text, target in re.findall(r"\[([^\]`]+)\]\((?:docs/)?(\w+\.md)\)", page.read_text()):
            if text in titles.values():
                assert titles[target] == text, (page.name, text)


@pytest.fixture(scope="module")
def forks():
    """Yield separate processes, since a page may make registrations that other tests must not
    see."""
    with forks_of_source() as processes:
        yield processes


def with_transformers(program: str) -> str:
    """Return a program that uses transformers at its end: without that part if the package is not
    installed.

    transformers imports torchvision, which needs help where its binary library does not fit
    PyTorch.
    """
    part = "from transformers import"
    assert program.startswith("\n")
    assert program.count(part) == 1
    if not importlib.util.find_spec("transformers"):
        return program.partition(part)[0]
    support = ROOT / "tests" / "support"
    first = f"import sys; sys.path.append({str(support)!r}); import torch_packages as _packages; "
    return first + "_packages.torchvision()" + program


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_runs(page, forks, tmp_path):
    if page.name == "tutorial.md":
        pytest.importorskip("sklearn", reason="the data of the tutorial come with scikit-learn")
    if page.name == "pytorch.md":
        pytest.importorskip("torch", reason="the page trains PyTorch models: extra torch")
        pytest.importorskip("sklearn", reason="its data come with scikit-learn")
    if page.name == "distributed.md":
        pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    if page.name in ("README.md", "loops.md"):
        pytest.importorskip("torch", reason="the page trains a PyTorch model: extra torch")
    own = ("csv.md", "deployment.md", "fine_tuning.md", "lora.md", "trainer.md")
    if page.name == "web.md":
        from relax_grad.static import webassembly

        try:
            webassembly.tools()
        except FileNotFoundError as error:
            pytest.skip(str(error))
    if page.name in (*own, "web.md", "without_runtime.md"):
        pytest.importorskip("torch", reason="the page trains a PyTorch model: extra torch")
        pytest.importorskip("safetensors", reason="the page writes a file: extra train")
    if page.name in ("README.md", "onnx.md", "onnxruntime.md"):
        pytest.importorskip("onnx", reason="the model of the page is made with onnx: extra onnx")
    program = tmp_path / f"{page.stem}.py"
    text = python_of(page.read_text())
    if page.name == "pytorch.md":
        text = with_transformers(text)
    program.write_text(text)
    code, printed = forks.run(program)
    assert code == 0, printed


def test_a_page_that_fails_is_told(forks, tmp_path):
    program = tmp_path / "page.py"
    program.write_text("import relax_grad\nrelax_grad.mark = 1\nprint('before')\nassert 1 > 2\n")
    code, printed = forks.run(program)
    assert code == 1
    assert "before" in printed
    assert "line 4" in printed
    other = tmp_path / "other.py"
    other.write_text("import relax_grad\nassert not hasattr(relax_grad, 'mark')\n")
    assert forks.run(other) == (0, "")


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Return the folder of the pages that Sphinx builds, once for all workers of a test run, or
    that the run of CI has built: ``BUILT_DOCS``."""
    if "BUILT_DOCS" in os.environ:
        return ROOT / os.environ["BUILT_DOCS"]
    missing = [
        name for name in ("sphinx", "myst_parser", "furo") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; install with the extra docs")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or fcntl is None:
        return _build(tmp_path_factory.mktemp("html"), tmp_path_factory.mktemp("doctrees"))
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "html.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / f"html-{run}"
        if not (folder / "built").exists():
            _build(folder, shared / f"doctrees-{run}")
            (folder / "built").touch()
    return folder


def _build(folder: Path, doctrees: Path) -> Path:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    result = subprocess.run(
        [*command, ROOT / "docs", folder, "-d", doctrees],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_operator_is_in_the_table(html):
    page = (html / "operators.html").read_text()
    for op_name in operators():
        assert f">{op_name}<" in page, op_name


def test_every_backward_builder_is_in_the_reference(html):
    page = (html / "api/backward_operators.html").read_text()
    for name in ("conv2d_backward_data", "conv2d_backward_weight"):
        assert f'id="relax_grad.op.conv.{name}"' in page


@pytest.mark.parametrize(
    ("word", "guides"),
    [
        ("dropout", {"deployment", "onnx", "pytorch", "trainer"}),
        ("state_dict", {"pytorch", "trainer"}),
        ("AdamW", {"deployment", "index", "lora", "pytorch", "trainer"}),
    ],
)
def test_the_search_finds_the_guides(html, word, guides):
    """The search of the pages looks up the stem of a word in the index."""
    from sphinx.search.en import SearchEnglish

    text = (html / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    stem = SearchEnglish({}).stem(word.lower())
    names = set()
    for kind in ("terms", "titleterms"):
        numbers = index[kind].get(stem, [])
        numbers = numbers if isinstance(numbers, list) else [numbers]
        names |= {index["docnames"][i] for i in numbers}
    assert names >= guides
