"""The error of a worker."""

from __future__ import annotations


class WorkerError(RuntimeError):
    """The failure of a worker, which ends the session.

    Attributes
    ----------
    rank : int or None
        The worker, if it is known.
    host : str
        The name of its machine.
    cause : str
        The reason.
    """

    def __init__(self, rank: int | None, host: str, cause: str):
        self.rank, self.host, self.cause = rank, host, cause
        worker = "a worker" if rank is None else f"worker {rank} on {host}"
        super().__init__(f"{worker}: {cause}")
