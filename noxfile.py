"""The versions that relax_grad supports: its suite on each of them, and its numeric core on one.

``make test-matrix`` and ``make test-core`` run the sessions. Each has a virtual environment of its
own in ``.nox``, of one or two gigabytes, which is used again by the next run; ``make distclean``
removes them.
"""

from __future__ import annotations

import importlib.util
import sys

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TVMS = ["0.26.0", "0.27.0", "0.27.0.post1"]
TORCH = "torch==2.13.0"


def install(session: nox.Session, tvm: str) -> None:
    """Install the package with what its tests need and this TVM; setup.py gives the range of its
    FFI."""
    session.install("--editable", ".[test,examples]", f"apache-tvm=={tvm}")


@nox.session(python=PYTHONS)
@nox.parametrize("tvm", TVMS, ids=TVMS)
def suite(session: nox.Session, tvm: str) -> None:
    """Run the suite; with PyTorch on the Python that nox runs in, if that has it.

    Elsewhere the tests that compare with PyTorch are skipped: for some of these Pythons it is
    several gigabytes.
    """
    install(session, tvm)
    is_this = session.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    if is_this and importlib.util.find_spec("torch"):
        session.install(TORCH)
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
@nox.parametrize("tvm", TVMS, ids=TVMS)
def core(session: nox.Session, tvm: str) -> None:
    """Run the tests marked ``core``, with the Python that nox runs in and without PyTorch."""
    install(session, tvm)
    session.run("python", "-m", "pytest", "-m", "core and not slow", *session.posargs)
