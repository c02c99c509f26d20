"""Run products that are consumed with their tensors and workspaces flush against inaccessible
pages."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tvm
import tvm.tirx.script.builder as T
from machines import TARGETS, compile_kernels

from relax_grad.cpu.kernel.matmul.consumed import Consumer, consumed
from relax_grad.cpu.kernel.matmul.matmul import Matmul
from relax_grad.cpu.target import CPU

from .memory import Place, Workspaces


def shapes_of(product: Matmul) -> list[tuple]:
    """Return the tensors of the consumer of :func:`consumer_of`: X and Y."""
    return [(name, [product.rows, product.columns], "float32") for name in "XY"]


def consumer_of(_product: Matmul) -> Callable[..., Consumer]:
    """Return a consumer that sets Y to the sum of the product and X."""

    def consumer(x, y) -> Consumer:
        return Consumer(lambda at, value: T.buffer_store(y, value + x[at], [at]), [x])

    return consumer


def main(target: str, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Print, for each size, the name of the kernel and what it does wrong."""
    chosen = tvm.target.Target(TARGETS[target])
    cpu = CPU.of(chosen)
    products = [Matmul(*size, transpose_a=True) for size in sizes]
    functions = {
        f"product{i}": consumed(product, cpu, shapes_of(product), consumer_of(product))
        for i, product in enumerate(products)
    }
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "products.so"))
        compile_kernels(functions, chosen).export_library(library)
        module, workspaces = tvm.runtime.load_module(library), Workspaces(library)
        places = [Place() for _ in range(4)]
        rng = np.random.default_rng(0)
        for name, product in zip(functions, products, strict=True):
            shapes = [*product.shapes()[:2], *(shape for _, shape, _ in shapes_of(product))]
            *inputs, result = shapes
            arrays = [rng.normal(size=shape).astype("float32") for shape in inputs]
            results, faults = [], []
            for at_end, fill in ((True, 0xFF), (False, 0x2A)):
                workspaces.at_end, workspaces.fill = at_end, fill
                start = np.full(result, np.nan, "float32")
                held = [
                    place.hold(array.tobytes(), array.shape, "float32", at_end, fill)
                    for place, array in zip(places, [*arrays, start], strict=True)
                ]
                module[name](*(buffer.tensor for buffer in held))
                results.append(held[-1].data())
                if not all(buffer.is_clean() for buffer in held):
                    faults.append("bytes next to a tensor were overwritten")
            faults += workspaces.faults
            if len(set(results)) > 1:
                faults.append("the results depend on the memory around")
            print("; ".join([name, *faults]))
