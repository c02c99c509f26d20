"""The tables of a plan in C."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import relax_grad.runtime
from relax_grad.static import c_source

#: The functions that name the size of a batch, of which the library with TVM's runtime takes any.
WITH_SIZES = {"batch", "input"}

#: The members of structures that only one of the headers has, and the reasons.
OF_ONE_HEADER = {
    "num_threads": "threads of TVM's runtime",
    "level": "a library of several levels of x86-64",
    "symbols": "symbolic extents",
    "drop_history": "room in the caller's memory",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs the C compiler cc")
def test_numbers_and_texts_have_their_values_in_c(tmp_path):
    reals = [0.1, -1e300, 5e-324, -0.0, math.inf, -math.inf, math.nan]
    integers = [0, -(2**63), 2**63 - 1]
    text = 'a"b\\c??/ \u00e9\n'
    program = f"""
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
int main(void) {{
  double reals[] = {{{", ".join(map(c_source._real, reals))}}};
  int64_t integers[] = {{{", ".join(map(c_source._integer, integers))}}};
  const char* text = {c_source.text_of(text)};
  int i;
  for (i = 0; i < {len(reals)}; ++i) printf("%a\\n", reals[i]);
  for (i = 0; i < {len(integers)}; ++i) printf("%" PRId64 "\\n", integers[i]);
  for (; *text; ++text) printf("%02x", (unsigned char)*text);
  return 0;
}}
"""
    (tmp_path / "program.c").write_text(program)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run(
        ["cc", *flags, str(tmp_path / "program.c"), "-o", str(tmp_path / "program")], check=True
    )
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    *lines, written = run.stdout.splitlines()
    values = [float.fromhex(line) for line in lines[: len(reals)]]
    assert str(values) == str(reals)
    assert [int(line) for line in lines[len(reals) :]] == integers
    assert bytes.fromhex(written).decode() == text


def declared(header: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the parameters of functions and the members of structures and enumerations."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S).replace("RELAX_GRAD_API ", "")
    functions = {
        name: " ".join(parameters.split())
        for name, parameters in re.findall(
            r"^\S+ \*?\*?relax_grad_(\w+)\((.*?)\);", text, re.M | re.S
        )
    }
    structures = {
        name: [" ".join(member.split()) for member in members.split(";")[:-1]]
        for members, name in re.findall(r"struct \w+ \{(.*?)\} (\w+);", text, re.S)
    }
    structures["codes"] = re.findall(r"RELAX_GRAD_\w+ = \d", text)
    return functions, structures


def test_both_headers_mean_the_same_by_the_same_names():
    """But for sizes, and members that only one of them needs."""
    static = declared(Path(c_source.__file__).parent / "c/relax_grad_static.h")
    general = declared(relax_grad.runtime.folder() / "relax_grad_trainer.h")
    common = static[0].keys() & general[0].keys()
    assert {"step", "predict", "output", "metric", "set_hyperparameter", "get_counters"} <= common
    for name in common:
        expected = general[0][name]
        if name in WITH_SIZES:
            expected = expected.replace("int64_t index", "int64_t size, int64_t index")
        assert static[0][name] == expected, name
    assert static[1].keys() >= {"relax_grad_tensor", "relax_grad_counters", "codes"}
    for name in static[1].keys() & general[1].keys():
        kept = [
            [m for m in members[name] if m.split()[-1].lstrip("*") not in OF_ONE_HEADER]
            for members in (static[1], general[1])
        ]
        assert kept[0] == kept[1], name
    own = {"memory_bytes", "num_sizes", "open_static", "predict_ema"}
    assert static[0].keys() - general[0].keys() == own | {
        *("load_state", "save_state", "state_bytes"),
    }
