"""Metadata and extras; the build system and the tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(
    r'^__version__ = "(.+)"$', (root / "relax_grad/__init__.py").read_text(), re.MULTILINE
).group(1)

cli = ["rich>=13,<16"]
test = [
    *cli,
    "hypothesis>=6.100,<7",
    "pytest>=8,<10",
    "pytest-xdist>=3.6,<4",
]

setup(
    name="relax_grad",
    version=version,
    description="Gradients of every operator for automatic differentiation in Apache TVM Relax",
    long_description=(root / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["relax_grad", "relax_grad.*"]),
    package_data={"relax_grad": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "apache-tvm>=0.26,<0.28",
        # 0.1.15 crashes tvm.ir.save_json.
        "apache-tvm-ffi>=0.1.14.post0,<0.1.15",
        # relax.training and half of TVM's own tests fail with 2.3.
        "numpy>=1.26,<2.3",
    ],
    extras_require={
        "cli": cli,
        "test": test,
        "torch": ["torch==2.13.0"],
        "examples": [*cli, "matplotlib>=3.8,<4", "scikit-learn>=1.4,<2"],
        "docs": ["sphinx>=8,<10", "myst-parser>=4,<6", "furo>=2024.8.6"],
        "bench": ["matplotlib>=3.8,<4", "torch==2.13.0"],
        "lint": ["ruff>=0.14,<0.18"],
    },
    entry_points={"console_scripts": ["relax-grad=relax_grad.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
