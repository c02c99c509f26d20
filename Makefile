# Every target makes the virtual environment .venv and installs what it needs there.
#   PYTHON   the Python (3.10 or later) that .venv is made with
#   WORKERS  the processes that the tests run in
#   NAME, FAMILY  the operator of new-operator, and the module of its parts
#   CORRECTS the fault of TVM's rule, which a new rule replaces
#   INSTALL  --no-install: test-oldest and test-newest use the environments of lanes as they are
#   ARGS     what is passed on to pytest, to the example or to the benchmarks

PYTHON ?= python3
WORKERS ?= 2
INSTALL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# One stamp for each set of extras; it is stale when what the metadata are made of is newer.
STAMP := $(VENV)/.installed-
# The extras of the targets that CI calls.
OF_CI := lint test,examples,docs docs release matrix

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo bench bench-chart bench-web bench-passes bench-tir accuracy test test-profile test-slow test-mutants arm cross cross-tools web web-tools test-newest test-oldest test-matrix lanes dev environment torch lint format docs wheels test-wheel new-operator clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)cli,examples ## train a small ResNet through relax_grad
	$(BIN)/python examples/train_resnet9.py $(ARGS)

bench: $(STAMP)bench ## measure kernels and training steps against PyTorch (ARGS: --only, --against; --json stores them in docs/_measured)
	$(BIN)/python benchmarks/run.py speed $(ARGS)

bench-chart: $(STAMP)bench ## measure training steps of all frameworks, and draw the chart of the first page (ARGS: --against, --only)
	$(BIN)/python benchmarks/run.py frameworks --json $(ARGS)

bench-web: $(STAMP)bench ## measure training in Node and Chromium beside TensorFlow.js and ONNX Runtime, for the page on its speed (ARGS: --seconds, --rounds)
	npm install --prefix build/peers --no-audit --no-fund @tensorflow/tfjs@4.22.0 @tensorflow/tfjs-backend-wasm@4.22.0 @tensorflow/tfjs-backend-webgpu@4.22.0 onnxruntime-web@1.19.2
	-$(BIN)/python -m pip install --quiet --no-deps --target build/peers/ort onnxruntime-training-cpu==1.19.2
	$(BIN)/python benchmarks/run.py web --json --peers build/peers $(ARGS)

bench-passes: $(STAMP)cli ## print the time of every pass for networks of 100, 200 and 400 layers (ARGS: --only, --layers)
	$(BIN)/python benchmarks/run.py passes $(ARGS)

bench-tir: $(STAMP)bench ## print the time of adjoints of tensor functions, relative to the functions (ARGS: --only)
	$(BIN)/python benchmarks/run.py adjoints $(ARGS)

accuracy: $(STAMP)bench ## measure the error of every gradient, into docs/_measured (ARGS: operators)
	$(BIN)/python benchmarks/run.py accuracy --json $(if $(ARGS),--only $(ARGS))

test: $(STAMP)test,examples,docs ## run the tests; parity with PyTorch where it is installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-profile: $(STAMP)test,examples,docs ## run the tests, and print the processor and wall seconds of folders, files and the slowest
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cpu-times $(ARGS)

test-slow: $(STAMP)test,examples,docs ## run the long sweeps (SLICE=2/4: the second of four parts)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

test-mutants: $(STAMP)test,examples ## plant 100 faults in the package, and print those that no test finds (ARGS: --number, --seed, --rooms)
	$(BIN)/python tests/support/mutants.py $(ARGS)

web: $(STAMP)test,examples ## build pages in which a CNN learns digits and classes, and train in them in Node and Chromium
	$(BIN)/python examples/web_page.py build/web
	$(BIN)/python -m pytest -m 'slow or not slow' tests/examples/test_web_page.py tests/training/test_web_export.py $(ARGS)

web-tools: ## install the Debian packages for web pages where they are missing: clang, lld, nodejs
	tests/support/tools.sh web

cross-tools: ## install the Debian compilers and emulators for Cortex-M, AArch64 and RISC-V where they are missing
	tests/support/tools.sh cross

cross: $(STAMP)test,examples ## train steps without a runtime on Cortex-M7, Cortex-M55, AArch64 and RISC-V, under qemu (after make cross-tools)
	$(BIN)/python -m pytest tests/static/test_devices.py $(ARGS)

arm: $(STAMP)test,examples,docs ## fetch TVM's runtime for AArch64 and run the tests that need it, under qemu-user
	$(BIN)/python -m pip install --quiet --upgrade --target build/aarch64 --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
		$$($(BIN)/python -c 'from importlib.metadata import version as v; print(*(f"{n}=={v(n)}" for n in ("apache-tvm", "apache-tvm-ffi")))')
	$(BIN)/python -m pytest tests/arm tests/static/test_devices.py $(ARGS)

lanes: $(STAMP)matrix ## install the environments of test-oldest and test-newest, which then take INSTALL=--no-install
	$(BIN)/python -m nox --reuse-existing-virtualenvs --install-only --session oldest newest

test-oldest: $(STAMP)matrix ## run the numeric core of the tests with the oldest packages that are supported
	$(BIN)/python -m nox --reuse-existing-virtualenvs $(INSTALL) --session oldest -- -n $(WORKERS) $(ARGS)

test-newest: $(STAMP)matrix ## run the imports, README and the importer of PyTorch models with the newest PyTorch and NumPy (NEWEST=any: all packages)
	$(BIN)/python -m nox --reuse-existing-virtualenvs $(INSTALL) --session newest -- -n $(WORKERS) $(ARGS)

test-matrix: $(STAMP)matrix ## run a part of the tests on every supported TVM, PyTorch, and Python that is installed, into docs/_measured (MATRIX=all: all tests)
	$(BIN)/python -m nox --reuse-existing-virtualenvs --no-error-on-missing-interpreters --session python frontend core -- -n $(WORKERS) $(ARGS)

dev: $(STAMP)cli,test,examples,docs,lint ## install everything for development but PyTorch

environment: $(STAMP)cli,test,examples,docs,lint,matrix,release ## install at once what the steps of CI need, but PyTorch
	@touch $(addprefix $(STAMP),$(OF_CI))

torch: $(BIN)/python ## install the PyTorch that the tests compare with, and the package with which it writes ONNX files
	$(BIN)/python -m pip install --constraint tests/constraints.txt torch==2.13.0 onnxscript

lint: $(STAMP)lint ## check the style, and the types of public functions
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	git ls-files '*.cc' '*.h' '*.c' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --eval-annotations --exclude long --target=3.10- relax_grad

format: $(STAMP)lint ## mend the style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	git ls-files '*.cc' '*.h' '*.c' | xargs $(BIN)/clang-format -i

docs: $(STAMP)docs ## build the documentation in docs/_build/html (after make web: with its pages)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

wheels: $(STAMP)release ## build the wheel and the source distribution in dist, and check them
	rm -rf build dist && mkdir build
	$(BIN)/python -m build --outdir dist > build/wheels.log 2>&1 || { cat build/wheels.log; false; }
	$(BIN)/python -m twine check --strict dist/*

test-wheel: ## install the wheel of dist in an environment of its own, and use it there (after make wheels)
	rm -rf build/installed && $(PYTHON) -m venv build/installed
	build/installed/bin/python -m pip install --quiet --constraint tests/constraints.txt "$$(echo dist/*.whl)[cli]"
	cp tests/support/installed.py build/installed
	cd build/installed && export RELAX_GRAD_CACHE=0 && bin/python -I installed.py && bin/relax-grad doctor && bin/python -m pip check

new-operator: $(STAMP)lint ## write the skeleton of a rule or a backward operator (NAME=softplus_backward_data FAMILY=activation)
	$(BIN)/python tests/support/new_operator.py '$(NAME)' '$(FAMILY)' --corrects '$(CORRECTS)'
	$(BIN)/ruff format --quiet relax_grad
	$(BIN)/ruff check --quiet --fix --exit-zero relax_grad
	$(BIN)/ruff format --quiet relax_grad

clean: ## remove what was built
	rm -rf build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find relax_grad tests examples docs -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environments too
	rm -rf $(VENV) .nox

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("relax_grad needs Python 3.10 or later, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP)%: setup.py pyproject.toml README.md LICENSE tests/constraints.txt relax_grad/__init__.py relax_grad/_packages.py | $(BIN)/python
	PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[$*]'
	@touch '$@'
