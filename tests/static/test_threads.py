"""Parallel loops of steps without a runtime in POSIX threads, under ThreadSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from static_trainer import COMPILER

from relax_grad.static import c_source

#: Loops of 0 to 3 tasks; 0 stands for all threads. Each element is counted once in each loop, and
#: the barrier shows the elements of another task. Then one task of a loop fails.
PROGRAM = """
#include <stdio.h>
#include "relax_grad_model.h"
static int counts[64];
static int body(int task, relax_grad_tasks* of, void* data) {
  int i;
  (void)data;
  for (i = task; i < 64; i += of->tasks) ++counts[i];
  relax_grad_barrier(task, of);
  return counts[(task + 1) % of->tasks] == 0;
}
static int failing(int task, relax_grad_tasks* of, void* data) {
  (void)of, (void)data;
  return task == 1 ? -1 : 0;
}
int main(void) {
  static uint8_t workspaces[4 * 64];
  int i, sum = 0, code = 0;
  relax_grad_use_workspaces(workspaces, 64);
  for (i = 0; i < 5000; ++i) code |= relax_grad_launch(body, NULL, i % 4);
  for (i = 0; i < 64; ++i) sum += counts[i];
  printf("%d %d %d\\n", code, sum, relax_grad_launch(failing, NULL, 0));
  return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, cc or gcc")
def test_loops_have_no_races(tmp_path):
    sources = Path(c_source.__file__).parent / "c"
    (tmp_path / "program.c").write_text(PROGRAM)
    files = [tmp_path / "program.c", sources / "relax_grad_threads.c"]
    files.append(sources / "relax_grad_kernels.c")
    flags = ["-std=c99", "-g", "-O1", "-fsanitize=thread", "-pthread", "-DRELAX_GRAD_THREADS=4"]
    command = [COMPILER, *flags, "-I", sources, *files, "-o", tmp_path / "program"]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if built.returncode:
        assert "tsan" in built.stderr, built.stderr
        pytest.skip("needs a C compiler with ThreadSanitizer")
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address space layout")
    assert (run.stdout, run.returncode) == (f"0 {5000 * 64} -1\n", 0), run.stderr
