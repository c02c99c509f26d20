"""Work that threads take from each other.

Other programs, or other virtual machines on the same cores, slow threads down for milliseconds at a
time, and not equally. Threads with equal parts of a product then wait for the slowest one. Here a
thread that has finished its part takes work from the others (Blumofe and Leiserson, "Scheduling
Multithreaded Computations by Work Stealing", 1999), so that all finish at about the same time.
Which thread computes an item has no influence on its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tvm.tirx.script.builder as T
from tvm import tirx

from . import builder as b
from .builder import Extent, bind, computed, const, quotient
from .extents import LINE

#: Functions of atomic counters: LLVM has instructions for them, and TVM has none.
_LLVM = """
define linkonce_odr hidden i32 @relax_grad_take(ptr %counter) alwaysinline nounwind {
  %old = atomicrmw add ptr %counter, i32 1 monotonic
  ret i32 %old
}
define linkonce_odr hidden i32 @relax_grad_taken(ptr %counter) alwaysinline nounwind {
  %old = load atomic i32, ptr %counter monotonic, align 4
  ret i32 %old
}
define linkonce_odr hidden i32 @relax_grad_finish(ptr %counter, i32 %rounds) alwaysinline nounwind {
  store atomic i32 %rounds, ptr %counter release, align 4
  ret i32 0
}
define linkonce_odr hidden i32 @relax_grad_await(ptr %counter, i32 %rounds) noinline nounwind {
entry:
  br label %again
again:
  %finished = load atomic i32, ptr %counter acquire, align 4
  %is_over = icmp sge i32 %finished, %rounds
  br i1 %is_over, label %end, label %again
end:
  ret i32 0
}
"""


#: The least iterations of a loop for each thread of which threads take some from each other, and
#: the parts that these are divided into, at least.
_LEAST, _PARTS = 2, 16


def range_of(task: Extent, tasks: Extent, number: Extent) -> tuple:
    """Return the first of the strips or panels of a task, and the one after its last one.

    Tasks have the same number of them, but the last ones have one more, if there are not as many
    for each: the last strip or panel of a product may be partial.

    Parameters
    ----------
    task : int or tirx.PrimExpr
        The number of the task.
    tasks : int or tirx.PrimExpr
        The number of tasks.
    number : int or tirx.PrimExpr
        All strips or panels.
    """
    each = quotient(number, tasks)
    equal = tasks - (number - each * tasks)
    if isinstance(task, int):
        first, stop = (at * each + max(0, at - equal) for at in (task, task + 1))
        return first, stop
    # No product of task and number: it could exceed 2**31.
    first, stop = (at * each + tirx.max(const(0), at - equal) for at in (task, task + 1))
    return computed(first), computed(stop)


class Stealing:
    """Rounds of the same items of work, which threads share.

    Each thread has a part of the items, takes them in order, and then steals items of others. An
    item begins after the same one of the round before.

    The threads need not run at the same time: a thread waits only for an item that another one has
    taken, and that one does not wait for items of later rounds.

    Parameters
    ----------
    rounds : int
        The number of rounds.
    items : int
        The number of items of a round.
    threads : int
        The number of threads.
    """

    def __init__(self, rounds: int, items: int, threads: int):
        self._items, self._threads = items, threads
        # The number of items that are taken from each part in each round, with a cache line for
        # each, and the number of rounds in which each item was finished.
        size = rounds * threads * LINE
        self._taken = b.scratch(size, "int32")
        self._finished = b.scratch(items, "int32")
        b.clear(self._taken, const(0), size)
        b.clear(self._finished, const(0), items)

    @contextmanager
    def threads(self) -> Iterator[tirx.Var]:
        """Emit what each thread does, given its number."""
        with (
            T.attr(0, "pragma_import_llvm", _LLVM),
            b.parallel(0, self._threads) as thread,
        ):
            yield thread

    def round(self, number: Extent, thread: tirx.Var, prepare: Callable, work: Callable) -> None:
        """Emit a round of a thread.

        Parameters
        ----------
        number : int or tirx.PrimExpr
            The number of the round.
        thread : tirx.Var
            The number of the thread.
        prepare : Callable
            Emits what the thread does before its first item of the round, and returns something for
            them. A thread does nothing in a round if others have stolen all items of its part.
        work : Callable
            ``work(prepared, item, begin, end)`` emits an item, given the items of its part.
        """
        own = b.scratch(1, "int32")

        def take(part: tirx.PrimExpr) -> None:
            _take(own, self._taken, number * self._threads + part)

        first, last = range_of(thread, self._threads, self._items)
        take(thread)
        with b.when(own[0] < last - first):
            prepared = prepare()
            with b.serial(0, self._threads) as other:
                part = b.computed((thread + other) % self._threads)
                begin, end = range_of(part, self._threads, self._items)
                with b.when(other > 0):
                    take(part)
                with b.serial(0, bind(end - begin)) as i, b.when(tirx.EQ(own[0], i)):
                    item = bind(begin + i)
                    finished = tirx.address_of(self._finished[item])
                    _call("relax_grad_await", finished, number)
                    work(prepared, item, begin, end)
                    _call("relax_grad_finish", finished, number + 1)
                    take(part)


@contextmanager
def shared(items: Extent, threads: int) -> Iterator[tirx.PrimExpr]:
    """Emit a loop whose iterations are divided among threads, like :func:`.builder.parallel`, but
    each thread takes some of the others when it has finished its own.

    Parameters
    ----------
    items : int or tirx.PrimExpr
        The number of iterations, each of some microseconds at least.
    threads : int
        The number of threads.
    """
    if b.is_in_one_thread() or threads < 2 or (isinstance(items, int) and items < _LEAST * threads):
        with b.parallel(0, items) as item:
            yield item
        return
    # A program may run with more threads than it is compiled for.
    parts = max(threads, min(items, _PARTS) if isinstance(items, int) else _PARTS)
    taken = b.scratch(parts * LINE, "int32")
    b.clear(taken, const(0), parts * LINE)
    with (
        T.attr(0, "pragma_import_llvm", _LLVM),
        b.parallel(0, parts) as first,
    ):
        own = b.scratch(1, "int32")
        with b.serial(0, parts) as other:
            part = b.computed((first + other) % parts)
            begin, end = range_of(part, parts, items)
            before = tirx.call_extern("int32", "relax_grad_taken", _counter(taken, part))
            with b.when(bind(before) < end - begin):
                _take(own, taken, part)
                with b.serial(0, bind(end - begin)) as i, b.when(tirx.EQ(own[0], i)):
                    yield bind(begin + i)
                    _take(own, taken, part)


def _take(own: tirx.Buffer, counters: tirx.Buffer, number: tirx.PrimExpr) -> None:
    """Emit a thread's claim of the next item that a counter counts."""
    counter = _counter(counters, number)
    b.store(own, const(0), tirx.call_extern("int32", "relax_grad_take", counter))


def _counter(counters: tirx.Buffer, number: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the address of a counter; each has its own cache line."""
    return tirx.address_of(counters[number * LINE])


def _call(name: str, *arguments: tirx.PrimExpr) -> None:
    T.evaluate(tirx.call_extern("int32", name, *arguments))
