"""The likely causes of failures of several workers."""

from __future__ import annotations

from collections.abc import Mapping


def likely_cause(
    num_workers: int, answers: Mapping[int, Mapping], ends: Mapping[int, str], silent: str
) -> tuple[int, str]:
    """Return the worker that is the likely cause of a failure, and the cause.

    An end of a process comes before an error, an error of a worker's own before one in a
    collective, and a worker that gives no answer before those that wait for it.

    Parameters
    ----------
    num_workers : int
        The number of workers.
    answers : Mapping[int, Mapping]
        The reports of workers by their ranks: reports of failures have an ``error``, and tell by
        ``collective`` whether it is one of a collective.
    ends : Mapping[int, str]
        How the processes of workers have ended.
    silent : str
        The cause if a worker gives no answer.
    """
    failed = [rank for rank, answer in answers.items() if "error" in answer]
    own = [rank for rank in failed if not answers[rank].get("collective")]
    missing = [rank for rank in range(num_workers) if rank not in answers]
    if ends:
        return min(ends.items())
    if own:
        return min(own), answers[min(own)]["error"]
    if failed and missing:
        first = min(failed)
        return missing[0], f"{silent}, while worker {first} waited in {answers[first]['error']}"
    if failed:
        return min(failed), answers[min(failed)]["error"]
    # Worker 0 may wait for one of the others.
    return missing[1] if missing[:1] == [0] and len(missing) > 1 else missing[0], silent
