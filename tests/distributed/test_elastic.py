"""Programs that start again after the failure of a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_models import assert_close, assert_same_bits, linear, tensors
from sessions import START, assert_ended, free_port

from relax_grad.distributed import Session, WorkerError, data_parallel, run
from relax_grad.training import AdamW

SECRET = "a secret of 32 characters, or so"


class Program:
    """Training that saves every second step, and whose workers are ended after some steps.

    Parameters
    ----------
    path : pathlib.Path
        The checkpoint.
    ends : list[Callable]
        For each session the function that ends workers in its fourth step, or None.
    """

    def __init__(self, path, *ends, **options):
        self.step, self.values, self.data = linear(AdamW(lr=0.1))
        self.path, self.ends, self.options = path, list(ends), options
        self.sessions: list[Session] = []
        self.first_steps: list[int] = []

    def __call__(self, workers):
        self.sessions.append(workers)
        trainer = data_parallel(self.step, workers, values=self.values, **self.options)
        if self.path.exists():
            trainer.load(self.path)
        self.first_steps.append(trainer.steps)
        end = self.ends.pop(0) if self.ends else None
        begin = trainer.steps

        def after_step(trainer):
            if trainer.steps % 2 == 0:
                trainer.save(self.path)
            if end is not None and trainer.steps == begin + 3:
                end(workers)

        trainer.fit(self.data, epochs=1, callbacks=[after_step], progress=False)
        return tensors(trainer)


def kill_worker(workers):
    os.kill(workers.pids[1], signal.SIGKILL)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


OPTIONS = {"threads": 1, "timeout": 30.0, "start_timeout": START}


def test_training_goes_on_with_the_same_bits(pair, tmp_path):
    """Two workers, of which one is killed."""
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    wanted = Program(tmp_path / "whole", shard_optimizer=True)(pair)
    program = Program(tmp_path / "state", kill_worker, shard_optimizer=True)
    result = run(program, 2, max_restarts=1, log=tmp_path / "log", **OPTIONS)
    assert_same_bits(result, wanted)
    assert program.first_steps == [0, 2]
    for workers in program.sessions:
        assert_ended(workers.pids.values())
    start, failure, again, end = events(tmp_path / "log")
    assert [line["event"] for line in (start, again, end)] == ["start", "start", "end"]
    assert [line["restarts"] for line in (start, failure, again, end)] == [0, 0, 1, 1]
    assert start["workers"] == again["workers"] == 2
    assert (failure["event"], failure["rank"]) == ("failure", 1)
    assert failure["cause"] == "its process was ended by SIGKILL"
    assert all(line["seconds"] >= 0 and line["time"] for line in (start, failure, again, end))


class Fake(Session):
    """A session without workers."""

    def __init__(self):
        super().__init__(2, 1, "gloo", 1.0)
        self.hosts = ["here", "here"]


def test_failures_that_restart(monkeypatch, tmp_path):
    """Those of workers do, as often as allowed. Other errors, and losses that are not finite, are
    raised at once, as is a first session that does not start."""
    opened, errors = [], []

    def open_session(options, *_):
        opened.append(options)
        if isinstance(errors[0], OSError):
            raise errors.pop(0)
        return Fake()

    def program(workers):
        error = errors.pop(0)
        if isinstance(error, RuntimeError) and not isinstance(error, WorkerError):
            workers._failure = WorkerError(1, "here", "found later")
        if error is not None:
            raise error
        return "done"

    class NonFinite(WorkerError, FloatingPointError):
        pass

    monkeypatch.setattr("relax_grad.distributed.elastic.open_session", open_session)
    late = WorkerError(1, "here", "late")

    def outcome(*planned, max_restarts=2):
        errors[:], opened[:] = planned, []
        try:
            result = run(program, 2, max_restarts=max_restarts, log=tmp_path / "log")
        except Exception as error:
            result = error
        assert not errors
        return result, len(opened)

    assert outcome(None) == ("done", 1)
    assert outcome(late, late, None) == ("done", 3)
    assert outcome(late, late, late) == (late, 3)
    assert outcome(RuntimeError("of Disco"), None) == ("done", 2)
    assert outcome(late, max_restarts=0) == (late, 1)
    for error in (ValueError("mine"), NonFinite(1, "here", "its loss is nan"), OSError("a port")):
        assert outcome(error) == (error, 1)
    causes = [line["cause"] for line in events(tmp_path / "log") if line["event"] == "failure"]
    assert causes == [*["late"] * 5, "found later", "late"]


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="program must be a function of a session"):
        run(None, 2)
    with pytest.raises(ValueError, match="nodes must be the least and the greatest number"):
        run(print, 2, nodes=(3, 2))
    with pytest.raises(ValueError, match="nodes must be a number of machines, or the least"):
        run(print, 2, nodes=(1, 2, 3))
    with pytest.raises(
        TypeError, match="run has no option 'num_workers'; it takes the options of session"
    ):
        run(print, 2, num_workers=2)
    with pytest.raises(ValueError, match="mpiexec ends all processes"):
        run(print, 2, backend="mpi")
    with pytest.raises(ValueError, match="max_restarts must be"):
        run(print, 2, max_restarts=-1)
    with pytest.raises(ValueError, match="last_call_timeout must be a positive number"):
        run(print, 2, last_call_timeout=0)
    with pytest.raises(ValueError, match="at least 16 characters"):
        run(print, 1, nodes=(1, 2), secret="abc")
    with pytest.raises(FileNotFoundError):
        run(print, 2, log=tmp_path / "nowhere" / "log")


class Machines:
    """Other machines, which are processes of this one."""

    def __init__(self, port):
        command = [sys.executable, "-m", "relax_grad", "worker", "--timeout", str(START)]
        self._command = [*command, "--controller", f"127.0.0.1:{port}"]
        self.processes = []

    def start(self):
        env = {**os.environ, "RELAX_GRAD_SECRET": SECRET}
        self.processes.append(subprocess.Popen(self._command, env=env))

    def kill_one_with_workers(self, workers):
        """Kill the machine of worker 2, as if its power were cut."""
        status = Path(f"/proc/{workers.pids[2]}/stat").read_text()
        parent = int(status.rpartition(")")[2].split()[1])
        assert parent in [process.pid for process in self.processes]
        os.kill(parent, signal.SIGKILL)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines():
    """Return machines that this one waits for, and the options of their programs."""
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    port = free_port()
    machines = Machines(port)
    yield machines, {**OPTIONS, "nodes": (1, 2), "listen": f"127.0.0.1:{port}", "secret": SECRET}
    machines.kill()


def causes(path):
    return [line["cause"] for line in events(path) if line["event"] == "failure"]


@pytest.mark.slow
def test_a_machine_goes_on_alone(pair, machines, tmp_path):
    """Two machines have two workers each. One is killed, and none takes its place."""
    others, options = machines
    wanted = Program(tmp_path / "whole")(pair)
    others.start()
    program = Program(tmp_path / "fewer", others.kill_one_with_workers, check_every=2)
    options["last_call_timeout"] = 25.0  # one comes at first, and none after it
    result = run(program, 2, log=tmp_path / "log", **options)
    assert [workers.num_workers for workers in program.sessions] == [4, 2]
    assert program.first_steps == [0, 2]
    assert_close(result, wanted)
    assert causes(tmp_path / "log") == ["the connection to its machine has ended"]


@pytest.mark.slow
def test_a_machine_takes_the_place_of_another_one(machines, tmp_path):
    """The bits are the same."""
    others, options = machines
    options["last_call_timeout"] = START  # both machines come
    others.start()
    wanted = run(Program(tmp_path / "whole"), 2, **options)
    assert others.processes[0].wait(60) == 0  # the program has ended

    others.start()
    others.start()  # one of the two is not needed at first
    program = Program(tmp_path / "state", others.kill_one_with_workers)
    result = run(program, 2, log=tmp_path / "log", **options)
    assert_same_bits(result, wanted)
    assert [workers.num_workers for workers in program.sessions] == [4, 4]
    assert program.first_steps == [0, 2]
