"""Training by several workers in all ways, for the matrix of transports and numbers of workers.

``measured`` and ``resumed`` run in the process of a session's controller, which ``mpiexec`` may
have started, and return results that JSON holds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from parallel_models import GPT_SHARDS, char_gpt, convolutional, linear, tensors

from relax_grad.distributed import data_parallel, tensor_parallel
from relax_grad.training import AdamW, Trainer

#: The numbers of heads of attention: an odd one on each of 2 workers, and one on each of 3.
HEADS = {2: 6, 3: 3}


def _gpt(count: int, heads: int):
    step, batches = char_gpt(width=4 * heads, heads=heads, sizes=(4,) * 8)
    return step, None, batches


def _shares(step, workers, values, **options):
    return data_parallel(step, workers, values=values, check_every=2, bucket_bytes=200, **options)


def _parts(step, workers, values):
    return tensor_parallel(step, workers, shards=GPT_SHARDS, values=values, check_every=2)


#: For each way of training: the step, its values and batches for a number of workers, the trainer
#: of a session, and the largest error relative to one worker.
WAYS = {
    "shares": (lambda count: linear(AdamW(lr=0.1)), _shares, 1e-5),
    "shares, CNN": (lambda count: convolutional(), _shares, 1e-5),
    "ZeRO": (
        lambda count: linear(AdamW(lr=0.1)),
        lambda *given: _shares(*given, shard_optimizer=True),
        1e-5,
    ),
    "odd heads": (lambda count: _gpt(count, HEADS[count]), _parts, 5e-5),
    "6 heads": (lambda count: _gpt(count, 6), _parts, 5e-5),
}

#: The ways whose steps are the same for all numbers of workers.
COMMON = [way for way in WAYS if way != "odd heads"]


def error_of(actual, wanted) -> float:
    """Return the largest difference relative to the largest element of its tensor, without the
    biases of keys, whose gradients are rounding errors of 0."""
    errors = [0.0]
    for name, value in wanted.items():
        found = actual[name]
        if name.endswith("qkv.bias"):
            value, found = (np.concatenate(np.split(e, 3)[::2]) for e in (value, found))
        errors.append(np.abs(found - value).max() / max(np.abs(value).max(), 1e-6))
    return float(max(errors))


def _is_same(actual, wanted) -> bool:
    return all(actual[name].tobytes() == value.tobytes() for name, value in wanted.items())


def _trained(trainer, batches) -> dict[str, np.ndarray]:
    for batch in batches:
        trainer.step(*batch)
    return tensors(trainer)


def measured(workers, folder: Path) -> dict[str, dict]:
    """Train in all ways, and write a file after half of the steps and one after all.

    Returns
    -------
    results : dict[str, dict]
        For each way: the largest error relative to one worker, whether a second run and a resumed
        one have the same bits, and the error of one worker that goes on from the file.
    """
    results = {}
    for way, (model, make, _) in WAYS.items():
        step, values, batches = model(workers.num_workers)
        half = len(batches) // 2
        single, trainer = Trainer(step, values=values), make(step, workers, values)
        trainer.save(folder / "start")
        _trained(trainer, batches[:half])
        trainer.save(folder / f"{way} half")
        end = _trained(trainer, batches[half:])
        trainer.save(folder / f"{way} end")
        result = {"error": error_of(end, _trained(single, batches))}
        trainer.load(folder / "start")
        result["same again"] = _is_same(_trained(trainer, batches), end)
        trainer.load(folder / f"{way} half")
        result["same resumed"] = _is_same(_trained(trainer, batches[half:]), end)
        single.load(folder / f"{way} half")
        result["error resumed by one"] = error_of(_trained(single, batches[half:]), end)
        results[way] = result
    return results


def resumed(workers, folder: Path) -> dict[str, dict]:
    """Go on from the files of another number of workers; return the errors relative to them."""
    results = {}
    for way in COMMON:
        model, make, _ = WAYS[way]
        step, values, batches = model(workers.num_workers)
        single, trainer = Trainer(step, values=values), make(step, workers, values)
        trainer.load(folder / f"{way} half")
        end = _trained(trainer, batches[len(batches) // 2 :])
        single.load(folder / f"{way} end")
        results[way] = {"error": error_of(end, tensors(single))}
    return results
