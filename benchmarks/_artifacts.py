"""Makes the files of ONNX Runtime's training from networks in ONNX.

It needs onnxruntime-training-cpu 1.19.2."""

from __future__ import annotations

import traceback
from pathlib import Path


def make(source: str, target: str) -> None:
    """Make the files of each network of a folder."""
    folder, out = Path(source), Path(target)
    import onnx
    from onnxruntime.training import artifacts

    for path in sorted(folder.glob("*.onnx")):
        model = onnx.load(path)
        made = out / path.stem
        made.mkdir(parents=True, exist_ok=True)
        statistics = {
            name
            for node in model.graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[3:5]
        }
        trained = [w.name for w in model.graph.initializer if w.name not in statistics]
        try:
            artifacts.generate_artifacts(
                model,
                requires_grad=[name for name in trained if "." in name or name == "position"],
                frozen_params=sorted(statistics),
                loss=artifacts.LossType.CrossEntropyLoss,
                # The module for pages lacks SGD.
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=str(made),
            )
            _make_readable(made / "optimizer_model.onnx")
        except Exception:  # the page reports that the files are missing
            traceback.print_exc()


def _make_readable(path: Path) -> None:
    """Give a file a version that ONNX Runtime 1.19 reads; newer packages of onnx write theirs."""
    import onnx

    model = onnx.load(path)
    model.ir_version = 8
    onnx.save(model, path)
