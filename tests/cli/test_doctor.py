"""``relax-grad doctor``: its report, and the faults that it finds."""

from __future__ import annotations

import json
import re

import pytest
import tvm

from relax_grad import cli, registry
from relax_grad.cli import _diagnosis
from relax_grad.cpu import threads


def run(capsys, *argv) -> tuple[int, str]:
    code = cli.main(["doctor", *argv])
    return code, capsys.readouterr().out


def test_no_problems(capsys):
    code, out = run(capsys)
    assert code == 0
    assert out.endswith("\nno problems\n")
    names = [line.partition(":")[0] for line in out.splitlines() if re.match(r"\w+: ", line)]
    assert names[:4] == ["Python", "system", "NumPy", "PyTorch"]
    assert (
        len(re.findall(r"^  .* \d+\.\d s  ok$", out, re.MULTILINE)) == len(_diagnosis._CHECKED) + 1
    )


def test_without_checks(capsys):
    code, out = run(capsys, "--no-check")
    assert code == 0
    assert "checks:" not in out


def test_a_wrong_gradient(capsys, monkeypatch):
    def wrong(_name):
        raise ValueError("Traceback from C++\nthe gradient is wrong\n")

    monkeypatch.setattr("relax_grad.testing.samples.samples", wrong)
    code, out = run(capsys)
    assert code == 1
    assert out.count("FAILED") == len(_diagnosis._CHECKED)
    assert "! gradient of relax.matmul: ValueError: the gradient is wrong\n    report it" in out
    assert out.endswith(f"{len(_diagnosis._CHECKED)} problems\n")


@pytest.mark.parametrize(
    ("ffi", "starts"),
    [
        ("0.1.14.post1", []),
        (None, []),
        ("0.1.15.post2", []),
        ("0.1.16", ["apache-tvm-ffi 0.1.16 was not tested"]),
        ("0.2.0", ["apache-tvm-ffi 0.2.0 was not tested"]),
    ],
)
def test_incompatible_versions_are_reported(ffi, starts):
    problems = list(_diagnosis._of_ffi(ffi))
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.symptom.startswith(start)
        assert problem.remedy.startswith("pip install '")


def test_more_threads_than_cores(capsys, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    code, out = run(capsys, "--no-check")
    assert code == 1
    assert "! TVM uses 8 threads, but this process has 2 cores" in out
    assert re.search(r"threads: +8 of TVM, 2 cores \(OMP_NUM_THREADS=8\)", out)


def test_idle_cores_are_reported(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "get_num_threads", lambda: 2)
    facts = dict(_diagnosis.facts())
    assert facts["threads"].startswith("2 of TVM, 4 cores; relax_grad.set_num_threads() uses all")
    assert not list(_diagnosis.find_problems())


@pytest.mark.parametrize("variable", ["TVM_NUM_THREADS", "OMP_NUM_THREADS", None])
def test_the_remedy_for_idle_cores_is_named(capsys, monkeypatch, variable):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "get_num_threads", lambda: 1)
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    code, out = run(capsys, "--no-check", "--target", '{"kind": "llvm", "num-cores": 4}')
    assert code == 0
    reason = f" ({variable}=1)" if variable else ", TVM's default"
    assert f"* TVM uses 1 thread{reason}, and leaves 3 cores of 4 idle\n" in out
    first = f"unset {variable}, and call" if variable else "call"
    assert f"    {first} relax_grad.set_num_threads() before" in out


def test_a_target_that_wastes_the_processor(capsys, monkeypatch):
    for name in ("cores", "get_num_threads"):
        monkeypatch.setattr(threads, name, lambda: 8)
    wide = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 8})
    monkeypatch.setattr(_diagnosis, "host", lambda: wide)
    narrow = '{"kind": "llvm", "mcpu": "haswell", "num-cores": 2}'
    code, out = run(capsys, "--no-check", "--target", narrow)
    assert code == 0
    assert (
        "* the target llvm for haswell uses vectors of 8 float32, and this processor has "
        "vectors of 16\n"
        "    fast path: "
    ) in out
    assert " divides work for 2 cores of 8\n    fast path: tvm.compile(module, " in out
    assert not list(_diagnosis.find_waste(wide))


def test_json(capsys, monkeypatch):
    monkeypatch.setattr(_diagnosis, "_CHECKED", ("relax.matmul", "relax.nothing"))
    monkeypatch.setattr(_diagnosis, "_check_pipeline", lambda: None)
    code, out = run(capsys, "--json")
    assert code == 1
    report = json.loads(out)
    assert list(report) == ["versions", "facts", "checks", "advice", "problems"]
    assert [check["ok"] for check in report["checks"]] == [True, False, True]
    (problem,) = report["problems"]
    assert problem["symptom"].startswith("gradient of relax.nothing: ")
    assert problem["remedy"]


def test_the_plan_of_a_product(capsys):
    target = ("--target", '{"kind": "llvm", "mcpu": "znver5", "num-cores": 2}')
    code, out = run(capsys, "--plan", "128x768x3072", *target)
    assert code == 0
    lines = dict(re.split(": +", line, maxsplit=1) for line in out.splitlines())
    assert lines["product"] == "128 x 768, 3072 steps, NN"
    assert lines["tile"] == "8 rows x 2 vectors, rounds of 4 steps"
    assert "checks" not in lines
    code, out = run(capsys, "--plan", "8x1024x1024:NT", "--json", *target)
    assert code == 0
    report = json.loads(out)
    assert list(report) == ["versions", "plan"]
    assert report["plan"]["product"] == "8 x 1024, 1024 steps, NT"
    assert report["plan"]["way"] == "B is read in place"


def test_the_plan_of_a_convolution(capsys):
    target = ("--target", '{"kind": "llvm", "mcpu": "znver5", "num-cores": 2}')

    def lines_of(text: str) -> dict[str, str]:
        code, out = run(capsys, "--plan", text, *target)
        assert code == 0
        return dict(re.split(": +", line, maxsplit=1) for line in out.splitlines())

    images = lines_of("conv:8x24x14x14,24x24x3x3,padding=1")
    assert images["convolution"] == "8 x 24 x 14 x 14, 24 x 24 x 3 x 3"
    assert images["kernel"] == "direct, channels as lanes"
    assert images["block"] == "14 rows of 2 images"
    # One axis has rows of one line, and volumes of one slice are images.
    assert lines_of("conv:8x24x99,24x24x3")["convolution"] == "8 x 24 x 1 x 99, 24 x 24 x 1 x 3"
    assert lines_of("conv:8x24x1x14x14,24x24x1x3x3,padding=0x1x1")["block"] == images["block"]
    depthwise = lines_of("conv:8x24x14x14,24x1x3x3,stride=2x1,padding=1,of=data")
    assert depthwise["kernel"].startswith("each channel by itself")
    assert depthwise["computes"] == "data gradient"
    weight = lines_of("conv:8x24x14x14,24x24x3x3,dilation=2,of=weight")
    assert weight["computes"] == "weight gradient"


@pytest.mark.parametrize(
    ("text", "line"),
    {
        "attention:8x128x12x64,8x200x4x64": "block: 64 of 128 queries x 224 of 200 keys",
        "attention:1x1x1x8,1x16x1x8,mask=bottom_right": "tile: 4 queries or 8 keys x 1 vectors",
        "pool:8x64x112x112,3x3,stride=2,padding=1": "band: 10 of 56 windows along the first axis",
        "pool:8x34x99,2,stride=2": "tasks: 32, for 136 planes",
        "sum:512x768": "tasks: 1 x 8 stretches of rows x 1 blocks",
        "sum:9x20x70": "sums: over 20 rows of 9 x 70 columns, in registers",
        "norm:512x768": "sums: over 512 rows of 1 x 768 columns, in a cache, 1 rows at once",
        "softmax:8x1000": "tasks: 8, a row each",
        "softmax:8x21x65,axis=1": "tasks: 8 x 2 blocks",
        "recurrent:35x20x300": "weight: 1200 columns in tiles of 5 rows x 3 vectors, 300 steps, "
        "256 of them at once",
        "recurrent:1x1x300,layer=gru_reset,of=data": "last gate: 300 columns in tiles of 1 rows x "
        "3 vectors, 300 steps",
    }.items(),
)
def test_plans_of_other_kernels(capsys, text, line):
    target = ("--target", '{"kind": "llvm", "mcpu": "znver5", "num-cores": 2}')
    code, out = run(capsys, "--plan", text, *target)
    assert code == 0
    lines = [re.sub(": +", ": ", each, count=1) for each in out.splitlines()]
    assert lines[:3] == [
        "processor: Zen 4 and 5: 16 lanes, 32 registers",
        "measured: Zen 4 and Zen 5 (crossovers: Zen 5)",
        "threads: 2",
    ]
    assert line in lines


@pytest.mark.parametrize(
    ("product", "message"),
    [
        ("128x768", "must be ROWSxCOLUMNSxSTEPS, such as 128x768x3072"),
        ("128x768x3072:NX", "but it is '128x768x3072:NX'"),
        ("-1x768x3072", "must be ROWSxCOLUMNSxSTEPS"),
        ("128x768x\u0663", "must be ROWSxCOLUMNSxSTEPS"),
        ("", "must be ROWSxCOLUMNSxSTEPS"),
        ("128x0x3072", "at least 1"),
        ("99999x99999x1", "at most 2147483647 elements"),
        ("conv:8x64x56x56", "must be conv:DATA,WEIGHT"),
        ("conv:8x64x56x56,64x64x3", "must be conv:DATA,WEIGHT"),
        ("conv:8x64x56x56,64x64x3x3,strides=2", "must be conv:DATA,WEIGHT"),
        ("conv:8x64x56x56,64x64x3x3,of=bias", "must be conv:DATA,WEIGHT"),
        ("conv:8x64x56x56,64x64x3x3,2", "must be conv:DATA,WEIGHT"),
        ("conv:8x0x56x56,64x64x3x3", "at least 1"),
        ("conv:8x64x56x56,64x64x3x3,stride=0", "must be one number or 2, such as 1x1"),
        ("conv:8x64x56x56,64x64x3x3,padding=1x1x1", "must be one number or 2, such as 1x1"),
        ("conv:8x64x56x56,64x48x3x3", "which must divide 64 channels"),
        ("conv:8x64x2x56,64x64x3x3", "larger than the data with its padding"),
        ("conv:64x64x999x999,64x64x3x3", "at most 2147483647 elements"),
        ("attention:8x128x12x64", "must be attention:QUERY,KEY"),
        ("attention:8x9x12x64,8x9x12x64,mask=causal", "mask= (none, top_left, bottom_right)"),
        ("attention:8x9x12x64,8x9x5x64", "heads of the key must divide the heads of the query"),
        ("attention:8x9x12x64,4x9x12x64", "must have one batch and the same features"),
        ("attention:999x999x99x99,999x9x1x99", "at most 2147483647 elements"),
        ("lstm:35x20x512", "another kernel begins with conv:, attention:, pool:,"),
        ("pool:8x3", "a pooling must be pool:DATA,WINDOW"),
        ("pool:8x3x9x9,3", "a pooling must be pool:DATA,WINDOW"),
        ("pool:8x3x9x9,3x3,of=data", "a pooling must be pool:DATA,WINDOW"),
        ("pool:8x3x2x2,3x3", "larger than the data with its padding"),
        ("pool:8x3x99x99,8x8", "no kernel computes"),
        ("sum:512", "a sum must be sum:ROWSxCOLUMNS"),
        ("sum:99999x99999", "at most 2147483647 elements"),
        ("norm:2x3x4", "a normalisation must be norm:ROWSxCOLUMNS"),
        ("softmax:", "a softmax must be softmax:SHAPE"),
        ("softmax:8x9,axis=2", "must be one of -2 to 1, but the softmax is 'softmax:8x9,axis=2'"),
        ("softmax:8x9x3,axis=1", "no kernel computes"),
        ("recurrent:3x4", "must be recurrent:STEPSxSEQUENCESxUNITS"),
        ("recurrent:3x4x5,layer=elman", "must be recurrent:STEPSxSEQUENCESxUNITS"),
        ("recurrent:3x4x0", "each extent of a recurrent layer must be at least 1"),
        ("recurrent:3x4x9000", "no kernel computes"),
        ("conv:8x64x99x99,64x64x3x3,stride=33,of=data", "no kernel computes"),
    ],
)
def test_a_malformed_product(capsys, product, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", f"--plan={product}"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plan_for_a_target_without_kernels(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--plan=1x1x1", "--target", "c"])
    assert "--plan needs a target that LLVM compiles for" in capsys.readouterr().err


def test_wrong_use(capsys):
    for wrong in (["--target", "abacus"], ["--target", "{"], ["--json=yes"], ["conv2d"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["doctor", "--no-check", *wrong])
        assert stopped.value.code == 2
        assert capsys.readouterr().err


def test_an_operator_that_is_not_known(monkeypatch):
    known = registry.operators()
    monkeypatch.setattr(registry, "operators", lambda: [*known, "relax.call_tir"])
    unknown = registry.Classification("relax.call_tir", "unclassified")
    classify = registry.classify
    monkeypatch.setattr(
        registry, "classify", lambda name: unknown if name == "relax.call_tir" else classify(name)
    )
    operators = dict(_diagnosis.facts())["operators"]
    assert operators.endswith("; unknown to relax_grad: relax.call_tir")
    assert re.match(r"differentiable: 1\d\d of 2\d\d of TVM, \d+ of 1\d\d backward", operators)
