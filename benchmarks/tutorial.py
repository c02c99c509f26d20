"""Losses and answers of the code of docs/tutorial.md.

The run needs scikit-learn.
"""

from __future__ import annotations

import contextlib
import io
import re
from argparse import Namespace

import numpy as np
import tvm
from _benchmark import MEASURED, Benchmark, Layout, facts
from _charts import OTHERS, OURS, TEXT, picture

PAGE = MEASURED.parent / "tutorial.md"

#: The number of images in a row of the picture; the misread ones have a second row.
COUNT = 10

_WIDTH, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 640, 46, 30, 580, 200
_PIXEL, _GAP = 6, 14


def measured(_: str, args: Namespace) -> dict:
    """Run the blocks of the page as one program, and return what the pictures show."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    namespace: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), str(PAGE), "exec"), namespace)
    images = tvm.runtime.tensor(namespace["test_images"])
    values = namespace["trainer"].params.values()
    answers = namespace["machine"]["predict"](images, *values).numpy().argmax(1)
    labels = namespace["test_labels"]
    wrong = np.flatnonzero(answers != labels)
    shown = {"first": range(COUNT), "misread": wrong[:COUNT]}
    return {
        "printed": printed.getvalue().splitlines(),
        "losses": [[round(loss, 4) for loss in losses] for losses in namespace["history"]],
        "misread": len(wrong),
        "images": {
            kind: [
                {
                    "pixels": [int(pixel) for pixel in namespace["test_images"][i].ravel() * 16],
                    "answer": int(answers[i]),
                    "digit": int(labels[i]),
                }
                for i in indices
            ]
            for kind, indices in shown.items()
        },
    }


def draw_loss(measured: dict) -> str:
    """Return the chart of the loss of each batch, with the mean of each epoch."""
    epochs = measured["losses"]
    losses = [loss for epoch in epochs for loss in epoch]
    largest = max(losses)
    bottom = _TOP + _PLOT_HEIGHT

    def place(i: float, loss: float) -> str:
        x = _LEFT + _PLOT_WIDTH * i / len(losses)
        return f"{x:.1f},{bottom - _PLOT_HEIGHT * loss / largest:.1f}"

    parts = [
        '<text x="0" y="16" font-weight="bold">Loss of each batch, and mean of each epoch</text>'
    ]
    step = 0.5
    for i in range(int(largest / step) + 1):
        y = bottom - _PLOT_HEIGHT * i * step / largest
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}h{_PLOT_WIDTH}" stroke="{OTHERS}" stroke-width="0.5"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{i * step:.1f}</text>'
        )
    points = " ".join(place(i, loss) for i, loss in enumerate(losses))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{OURS}" stroke-width="1.2"/>')
    start = 0
    for i, epoch in enumerate(epochs):
        mean = sum(epoch) / len(epoch)
        left, right = place(start, mean), place(start + len(epoch), mean)
        parts.append(f'<polyline points="{left} {right}" stroke="{TEXT}" stroke-width="2"/>')
        x = _LEFT + _PLOT_WIDTH * (start + len(epoch) / 2) / len(losses)
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">epoch {i + 1}: '
            f"{mean:.3f}</text>"
        )
        start += len(epoch)
    return picture(parts, (_WIDTH, bottom + 28), 12, "The loss of each batch of the tutorial")


def draw_digits(measured: dict) -> str:
    """Return the picture of the images with the answers of the network."""
    titles = {
        "first": "The first images of the test set",
        "misread": f"The misread ones of {measured['misread']}",
    }
    if measured["misread"] <= COUNT:
        titles["misread"] = "The misread images"
    parts, y = [], 16
    side = 8 * _PIXEL
    for kind, images in measured["images"].items():
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{titles[kind]}</text>')
        y += 12
        for i, image in enumerate(images):
            x = i * (side + _GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" '
                f'stroke="{OTHERS}"/>'
            )
            for at, value in enumerate(image["pixels"]):
                if value:
                    row, column = divmod(at, 8)
                    parts.append(
                        f'<rect x="{x + column * _PIXEL}" y="{y + row * _PIXEL}" width="{_PIXEL}" '
                        f'height="{_PIXEL}" fill="{OURS}" fill-opacity="{value / 16:.2f}"/>'
                    )
            answer = str(image["answer"])
            if image["answer"] != image["digit"]:
                answer += f" ({image['digit']})"
            parts.append(
                f'<text x="{x + side / 2}" y="{y + side + 18}" text-anchor="middle">{answer}</text>'
            )
        y += side + 46
    return picture(
        parts, (_WIDTH, y - 16), 12, "Digits of the tutorial with the answers of the network"
    )


#: The pictures, by the name in the file.
PICTURES = {"loss": draw_loss, "digits": draw_digits}


def _drawn(measured: dict) -> None:
    for name, draw in PICTURES.items():
        (MEASURED / f"tutorial_{name}.svg").write_text(draw(measured), "utf-8")
    print(*measured["printed"], sep="\n")


BENCHMARK = Benchmark(
    rows=lambda args: {"tutorial": "tutorial"},
    measure=measured,
    json="tutorial.json",
    head=lambda args: facts("date", "processor", "tvm", "numpy"),
    layout=Layout(lambda head, rows: {**head, **rows["tutorial"]}),
    draw=_drawn,
)
