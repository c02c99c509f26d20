"""Metadata and extras; the build system and the tools are configured in pyproject.toml."""

import os
import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(
    r'^__version__ = "(.+)"$', (root / "relax_grad/__init__.py").read_text(), re.MULTILINE
).group(1)

#: The address of the repository's files, such as https://github.com/OWNER/relax_grad/blob/v0.3.0.
FILES = os.environ.get("RELAX_GRAD_FILES", "").rstrip("/")


def description(readme: str, files: str = FILES) -> str:
    """Return README.md as PyPI shows it: links to files are absolute, or text without an address.

    Comments and the chart, a file of the repository, are left out.
    """
    readme = re.sub(r"<!--.*?-->\n*|<img [^>]*>\n*", "", readme, flags=re.DOTALL)
    links = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")
    return links.sub(rf"[\1]({files}/\2)" if files else r"\1", readme)


# What the package imports has no upper bounds besides those of TVM, its FFI, NumPy and PyTorch: an
# installation changes no other package of an environment. tests/constraints.txt has the versions
# that CI tests with.
of = runpy.run_path(str(root / "relax_grad/_packages.py"))["REQUIREMENTS"]
cli = [of["rich"], of["shtab"]]
matplotlib, mpi, torch = of["matplotlib"], of["mpi4py"], of["torch"]
onnx, safetensors = of["onnx"], of["safetensors"]

setup(
    name="relax_grad",
    version=version,
    description="Train Relax, PyTorch and ONNX models with Apache TVM",
    long_description=description((root / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["tvm", "relax", "autodiff", "gradient", "training", "compiler"],
    packages=find_packages(include=["relax_grad", "relax_grad.*"]),
    package_data={
        "relax_grad": [
            *("py.typed", "runtime/*.cc", "runtime/*.h", "runtime/CMakeLists.txt"),
            *("static/c/*.c", "static/c/*.h", "static/c/CMakeLists.txt"),
            *("static/web/*.c", "static/web/include/*.h", "static/web/*.mjs", "static/web/*.mts"),
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "apache-tvm>=0.26,<0.28",
        # Its binary interface is that of TVM's build.
        "apache-tvm-ffi>=0.1.14.post0,<0.1.16",
        "numpy>=1.26,<3",
    ],
    extras_require={
        "cli": cli,
        "test": [
            *cli,
            "hypothesis>=6.100",
            # A library of MPI and its mpiexec, for the sessions of processes that it starts.
            mpi,
            "mpich>=5",
            onnx,
            # The written files of ONNX models run in it.
            "onnxruntime>=1.20",
            "pytest>=9",
            "pytest-xdist>=3.6",
            safetensors,
        ],
        "torch": [torch],
        # gloo, which moves the bytes between workers, comes with PyTorch.
        "distributed": [torch],
        # It needs a library of MPI: one of the machine, or the packages mpich or openmpi.
        "mpi": [mpi],
        # The trainer's progress bar, picture of the loss and files.
        "train": [*cli, matplotlib, safetensors],
        # Files of the values of an imported PyTorch module.
        "safetensors": [torch, safetensors],
        # Models of these libraries, with random weights, are imported by tests.
        "zoo": [
            torch,
            "torchvision>=0.26",
            "transformers>=5.18",
            "timm>=1.0.29",
            "peft>=0.21",
            # PyTorch's newer exporter writes ONNX files with it.
            "onnxscript>=0.7",
        ],
        "onnx": [onnx],
        # It simplifies ONNX models whose shapes are known only at run time.
        "onnxsim": [onnx, of["onnxsim"] + '; python_version >= "3.11"'],
        "examples": [*cli, matplotlib, "scikit-learn>=1.4"],
        "docs": ["sphinx>=8", "myst-parser>=4", "furo>=2024.8.6"],
        # JAX is one of the columns, and is left out where it is not installed.
        "bench": [*cli, matplotlib, torch, 'jax>=0.10.2; python_version >= "3.11"'],
        "matrix": ["nox>=2025.5.1"],
        "release": ["build>=1.2", "twine>=6"],
        # The formatter's output changes between minor versions.
        "lint": [
            *("ruff>=0.17.5,<0.18", "mypy>=2.4.1,<2.5", "clang-format>=19.1,<20"),
            "vermin>=1.6,<2",
        ],
    },
    entry_points={"console_scripts": ["relax-grad=relax_grad.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Compilers",
        "Typing :: Typed",
    ],
)
