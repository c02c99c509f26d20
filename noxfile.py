"""The versions that relax_grad supports: a fixed part of the tests on each of them, and lanes with
the newest and the oldest ones.

``make test-matrix``, ``make test-newest`` and ``make test-oldest`` run the sessions. Each has a
virtual environment in ``.nox``, of one or two gigabytes, which is used again by the next run;
``make distclean`` removes them. The matrix takes about an hour on two cores. ``MATRIX=all`` in
the environment runs all tests in each of its sessions, in many hours.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
#: Each TVM with the apache-tvm-ffi of its build, and the newest one with a newer apache-tvm-ffi.
BUILDS = [
    ("0.26.0", "0.1.14.post0"),
    ("0.27.0", "0.1.14.post1"),
    ("0.27.0.post1", "0.1.14.post1"),
    ("0.27.0.post1", "0.1.15.post2"),
]
#: Releases of PyTorch and NumPy that are tested together.
TORCHES = {
    "2.11.0": "1.26.4",
    "2.12.1": "2.0.2",
    "2.13.0": "2.2.6",
    "2.14.1": "2.3.5",
    "2.15.0": "2.4.6",
}

#: The release of PyTorch beside which each Python and TVM is tested.
TORCH = "torch==2.13.0"

#: The floors of the requirements that the package imports. PyPI has no wheel of mpi4py 4.0.
OLDEST = (
    *("apache-tvm==0.26.0", "apache-tvm-ffi==0.1.14.post0", "numpy==1.26.0", "onnx==1.17.0"),
    *("matplotlib==3.8.0", "rich==13.0.0", "safetensors==0.5.0", "shtab==1.7.0"),
)

ROOT = Path(__file__).parent
#: The results of the last runs, by row of the table in docs/_measured/versions.md.
RESULTS = ROOT / "docs/_measured/versions.json"
CONSTRAINTS = ("--constraint", "tests/constraints.txt")

#: What PyTorch imports. Its other requirements are CUDA's libraries, several gigabytes.
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")

#: Every import, README, the private names of PyTorch, the converters' cases, thirteen networks, and
#: the uses of NumPy.
LANE = (
    *("tests/test_import.py::test_every_module_is_imported", "tests/test_packages.py"),
    *("tests/ir/test_arrays.py", "tests/ir/test_compat.py", "tests/ir/test_index_ranges.py"),
    "tests/frontend/torch/test_private_names.py",
    "tests/frontend/torch/test_converters.py",
    "tests/frontend/torch/export/test_writes.py::test_every_operator_that_writes_is_in_one_table",
    "tests/frontend/torch/test_zoo.py::test_models",
    "tests/frontend/torch/test_features.py::test_three_steps",
    "tests/frontend/torch/tracing/test_functions.py",
    *("tests/frontend/test_constants.py", "tests/frontend/test_random.py"),
    *("tests/test_functional.py", "tests/training/test_setup_trainer.py"),
    "tests/test_docs.py::test_code_runs[README.md]",
)


#: The tests of numbers of gradients.
CORE = ("-m", "core and not slow")


def install_torch(session: nox.Session, requirement: str) -> None:
    """Install PyTorch with empty libraries instead of CUDA's."""
    session.install("--no-deps", requirement)
    session.install(*OF_TORCH)
    session.run_install("python", "tests/support/without_cuda.py")


def test(session: nox.Session, part: tuple[str, ...], versions: str) -> None:
    """Run a part of the tests, and write the result to the row of the versions."""
    report = Path(session.create_tmp()) / "report.xml"
    report.unlink(missing_ok=True)
    kind = {CORE: "core", LANE: "lane"}[part]
    if os.environ.get("MATRIX") == "all":
        kind, part = "all tests", ()
    command = ("python", "-m", "pytest", f"--junitxml={report}", *part, *session.posargs)
    try:
        session.run(*command)
    finally:
        if report.exists():
            note(f"{kind}: {versions}", report.read_text())


def note(row: str, report: str) -> None:
    """Write the number of tests that passed and failed to :data:`RESULTS`."""
    # pytest's own report, whose first suite has the numbers.
    names = ("tests", "failures", "errors", "skipped")
    number = {name: int(re.search(rf'\b{name}="(\d+)"', report)[1]) for name in names}
    failed = number["failures"] + number["errors"]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[row] = {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


@nox.session(python=PYTHONS)
def python(session: nox.Session) -> None:
    """Run the lane on one release of Python, with the newest TVM."""
    session.install(*CONSTRAINTS, "--editable", ".[test,examples]", f"apache-tvm=={BUILDS[-1][0]}")
    install_torch(session, TORCH)
    test(session, LANE, f"Python {session.python}, PyTorch {TORCH.partition('==')[2]}")


@nox.session
@nox.parametrize("torch", list(TORCHES), ids=list(TORCHES))
def frontend(session: nox.Session, torch: str) -> None:
    """Run the lane with one release of PyTorch, and a NumPy of its time."""
    session.install(*CONSTRAINTS, "--editable", ".[test,examples]")
    session.install(f"numpy=={TORCHES[torch]}")
    install_torch(session, f"torch=={torch}")
    test(session, LANE, f"PyTorch {torch}, NumPy {TORCHES[torch]}")


@nox.session
@nox.parametrize("tvm,ffi", BUILDS, ids=[f"{tvm}-{ffi}" for tvm, ffi in BUILDS])
def core(session: nox.Session, tvm: str, ffi: str) -> None:
    """Run the core with one TVM and one apache-tvm-ffi."""
    session.install(*CONSTRAINTS, "--editable", ".[test,examples]", f"apache-tvm=={tvm}")
    session.install("--no-deps", f"apache-tvm-ffi=={ffi}")
    install_torch(session, TORCH)
    test(session, CORE, f"TVM {tvm}, apache-tvm-ffi {ffi}")


@nox.session
def newest(session: nox.Session) -> None:
    """Run the lane of the newest PyTorch that can be had, and of the newest NumPy that was tested;
    with ``NEWEST=any`` in the environment, of the newest other packages too."""
    if os.environ.get("NEWEST") == "any":
        session.install("--upgrade", "--editable", ".[test,examples]")
    else:
        session.install(*CONSTRAINTS, "--editable", ".[test,examples]")
        session.install(f"numpy=={list(TORCHES.values())[-1]}")
    install_torch(session, "torch")
    session.run("python", "-m", "relax_grad", "doctor")
    session.run("python", "-m", "pytest", *LANE, *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests marked ``core`` with the oldest packages that setup.py takes."""
    session.install(*CONSTRAINTS, "--editable", ".[test,examples]", *OLDEST)
    install_torch(session, f"torch=={next(iter(TORCHES))}")
    session.run("python", "-m", "pytest", *CORE, *session.posargs)
