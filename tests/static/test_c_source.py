"""The tables of a plan in C."""

import math
import shutil
import subprocess

import pytest

from relax_grad.static import c_source


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
