"""The examples of training steps: digits by the trainer, a GPT of characters with adapters, an ONNX
file trained further."""

from __future__ import annotations

import pytest


def command(name: str, *packages: str):
    """Return the module of a command, or skip the test if one of its packages is not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"a package of the example is not installed: {package}")
    return __import__(name)


def test_digits(tmp_path):
    main = command("digits_trainer", "torch", "sklearn", "safetensors").main
    state = tmp_path / "state"
    assert main(["--epochs", "1", "--save", str(state)]) > 0.9
    folder = tmp_path / "exported"
    resumed = [
        *("--epochs", "2", "--resume", str(state), "--save", str(tmp_path / "resumed")),
        *("--export", str(folder)),
    ]
    assert main(resumed) > 0.95
    assert (folder / "manifest.json").is_file()


def test_a_gpt_of_characters_and_adapters(tmp_path):
    main = command("char_gpt", "torch", "safetensors").main
    small = ("--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--batch", "8")
    path = tmp_path / "adapters"
    results = main(
        [
            *small,
            *("--steps", "150", "--lora", "4", "--lora-steps", "100", "--sample", "5"),
            *("--lr", "0.01", "--save", str(path), "--frozen", "int4"),
        ]
    )
    assert results["manual"] < 20  # 96 for equal chances of all characters
    assert results["code"] < results["code before"]
    assert results["difference"] < 1e-3
    assert path.stat().st_size < 20000
    with pytest.raises(SystemExit):
        main(["--width", "10", "--heads", "3"])


@pytest.mark.slow
@pytest.mark.parametrize("more", [("--parts", "2"), ()], ids=["parts", "replicas"])
def test_a_gpt_of_characters_by_two_processes(more):
    main = command("char_gpt", "torch", "safetensors").main
    small = ("--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--batch", "8")
    steps = ("--steps", "150", "--lr", "0.01", "--sample", "5", "--workers", "2")
    results = main([*small, *steps, *more])
    assert results["manual"] < 20  # 96 for equal chances of all characters


@pytest.mark.slow
def test_digits_by_two_processes(tmp_path):
    main = command("distributed_digits", "torch", "sklearn", "safetensors").main
    state = tmp_path / "state"
    assert main(["--epochs", "2", "--save", str(state)]) > 0.9
    assert main(["--epochs", "3", "--resume", str(state), "--workers", "1"]) > 0.9


def test_an_onnx_file(tmp_path):
    main = command("continue_onnx", "onnx", "sklearn").main
    path, further = tmp_path / "first.onnx", tmp_path / "further.onnx"
    results = main(["--epochs", "4", "--out", str(path)])
    assert results["turned"] > results["turned before"] + 0.2
    results = main(["--epochs", "2", "--model", str(path), "--last", "--out", str(further)])
    import onnx

    before, after = (
        {tensor.name: tensor.raw_data for tensor in onnx.load(file).graph.initializer}
        for file in (path, further)
    )
    assert {name for name in before if before[name] != after[name]} == {"fc1.weight", "fc1.bias"}
