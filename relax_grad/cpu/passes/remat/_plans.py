"""The choice of the calls of a forward pass that the backward pass repeats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import accumulate

from ._min_cut import UNBOUNDED, Network
from ._residuals import Residuals

#: Bytes of traffic of repeated calls that are worth a byte that is not kept.
_WORTH = 64

#: The weights of time for a light cut, as such numbers of bytes.
_LIGHT_WEIGHTS = (16, 8, 4, 2)

#: The most time that a light cut repeats, as a share of the step's.
_LIGHT = 0.016

#: The time of a step relative to its forward pass: each product has two in the backward pass.
_STEP = 3

#: The weights of time for plans within a budget, as such numbers of bytes; the last allows any
#: time.
_WEIGHTS = (4, 16, 64, 256, 1024, 4096)

#: The numbers of segments for plans within a budget.
_SEGMENTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

#: The part of a segment in which its end is searched: where the fewest bytes are live.
_SLACK = 0.25


def smallest_cut(
    residuals: Residuals, allowed: Collection[int], worth: float = _WORTH
) -> frozenset[int]:
    """Return the calls to repeat by a minimum cut between the forward and the backward pass.

    The cut minimizes the bytes that are kept between the passes, plus the time of the repeated
    calls. A call can be repeated only if its operands are kept or repeated too. This is the model
    of AOTAutograd's partitioner ("min-cut"), in which tensors are nodes with their bytes as
    capacity. Here calls are nodes too, and their capacity is their time.

    Parameters
    ----------
    residuals : Residuals
        The function.
    allowed : Collection[int]
        The calls that may be repeated.
    worth : float
        The bytes of memory traffic that one byte of kept memory is worth.
    """
    tensors, end = residuals.tensors, residuals.end
    made = [t for i in range(end) for t in tensors.makes[i]]
    source, sink = 0, 1
    call = {i: 2 + i for i in range(end)}
    enters = {t: 2 + end + 2 * n for n, t in enumerate(made)}
    network = Network(2 + end + 2 * len(made))
    for i in range(end):
        if tensors.only_names[i]:
            continue
        time = UNBOUNDED
        if i in allowed:
            time = max(int(residuals.costs[i].time / worth), 1)
        network.connect(source, call[i], time)
        for t in tensors.makes[i]:
            network.connect(call[i], enters[t], UNBOUNDED)
        for t in tensors.takes[i]:
            network.connect(enters[t] + 1, call[i], UNBOUNDED)
    for t in made:
        # A tensor that the function returns is live in any case.
        size = 0 if t in tensors.kept else max(tensors.sizes[t], 1)
        network.connect(enters[t], enters[t] + 1, size)
    for t in residuals.wanted:
        network.connect(enters[t] + 1, sink, UNBOUNDED)
    on_sink_side = network.sink_side(source, sink)
    return frozenset(i for i in allowed if on_sink_side[call[i]])


def cheap(residuals: Residuals) -> set[int]:
    """Return the calls that compute few operations for each byte."""
    return {i for i, cost in residuals.costs.items() if cost.is_cheap}


def automatic(residuals: Residuals) -> frozenset[int]:
    """Return the smallest cut with cheap calls; no calls if it does not lower the planned peak."""
    cut = smallest_cut(residuals, cheap(residuals))
    return cut if residuals.peak(cut) < residuals.peak(()) else frozenset()


def light(residuals: Residuals) -> frozenset[int]:
    """Return a cut with cheap calls that take a small share of the step's time; no calls if it does
    not lower the planned peak.

    The share bounds the time of the first cut by which time has a low enough weight. If the next
    one takes too long, its first calls are a candidate too.
    """
    most = _LIGHT * _STEP * sum(cost.time for cost in residuals.costs.values())
    allowed = cheap(residuals)
    candidates: list[frozenset[int]] = [frozenset()]
    longer: frozenset[int] = frozenset()
    for worth in _LIGHT_WEIGHTS:
        cut = smallest_cut(residuals, allowed, worth)
        if sum(residuals.costs[i].time for i in cut) <= most:
            candidates.append(cut)
            break
        longer = cut
    if longer:
        times = accumulate(residuals.costs[i].time for i in sorted(longer))
        first = {i for i, time in zip(sorted(longer), times, strict=True) if time <= most}
        candidates.append(smallest_cut(residuals, first))
    peaks = {cut: residuals.peak(cut) for cut in candidates}
    return min(peaks, key=lambda cut: (peaks[cut], len(cut)))


def by_policy(residuals: Residuals, is_saveable: Callable[[int], bool]) -> frozenset[int]:
    """Return all calls that the backward pass needs, and whose results may not be kept."""
    calls: set[int] = set()
    pending = list(residuals.wanted)
    while pending:
        i = residuals.maker[pending.pop()]
        if i in calls or i not in residuals.costs or is_saveable(i):
            continue
        calls.add(i)
        pending += residuals.tensors.takes[i] - residuals.tensors.kept
    return frozenset(calls)


def named_policy(residuals: Residuals, name: str) -> frozenset[int]:
    """Return the calls to repeat by a policy of ``jax.checkpoint_policies``."""
    if name == "everything_saveable":
        return frozenset()
    with_batch = name == "dots_saveable"

    def is_saveable(i: int) -> bool:
        cost = residuals.costs[i]
        is_dot = cost.is_product and (with_batch or not cost.has_batch)
        return name != "nothing_saveable" and is_dot

    return by_policy(residuals, is_saveable)


def within(
    residuals: Residuals, budget: int, planned: Callable[[frozenset[int]], int]
) -> frozenset[int]:
    """Return calls to repeat so that the planned peak is within a budget in bytes.

    The candidates are cuts with several weights of time, at first with cheap calls only, and then
    divisions of the forward pass into segments, between which tensors are kept, while all other
    calls are repeated. The first candidate by time that is within the budget is returned: by the
    peak of its tensors, and then by the plan of the rest of the pipeline, in which some results may
    have other places. Otherwise it is one that is within the budget by this plan alone, because
    results take the memory of operands.

    Parameters
    ----------
    residuals : Residuals
        The function.
    budget : int
        The bytes.
    planned : Callable
        Returns the bytes that the pipeline plans with repeated calls.

    Raises
    ------
    ValueError
        If there is none. The message has the least peak.
    """
    plans = {frozenset(), *_candidates(residuals)}
    estimates = {plan: residuals.peak(plan) for plan in plans}
    peaks: dict[frozenset[int], int] = {}

    def peak(plan: frozenset[int]) -> int:
        if plan not in peaks:
            peaks[plan] = planned(plan)
        return peaks[plan]

    def time(plan: frozenset[int]) -> float:
        return sum(residuals.costs[i].time for i in plan)

    for plan in sorted(plans, key=lambda plan: (time(plan), sorted(plan))):
        if estimates[plan] <= budget and peak(plan) <= budget:
            return plan
    least = None
    for plan in sorted(plans, key=lambda plan: (estimates[plan], sorted(plan))):
        if least is None or estimates[plan] < least:
            # Results in the memory of operands may take less than the estimate.
            if peak(plan) <= budget:
                return plan
            least = peak(plan) if least is None else min(least, peak(plan))
    raise ValueError(
        f"remat: the intermediate and the new tensors of the step take at least {least} bytes, "
        f"but the budget is {budget}"
    )


def _candidates(residuals: Residuals) -> Iterator[frozenset[int]]:
    few, every = cheap(residuals), set(residuals.costs)
    for worth in _WEIGHTS:
        yield smallest_cut(residuals, few, worth)
    for worth in _WEIGHTS:
        yield smallest_cut(residuals, every, worth)
    for count in _SEGMENTS:
        kept = _between_segments(residuals, count)
        for worth in _WEIGHTS[2:]:
            yield smallest_cut(residuals, every - kept, worth)


def _between_segments(residuals: Residuals, count: int) -> set[int]:
    """Return the calls whose results are live at the ends of segments with about equal bytes of
    results."""
    tensors, end = residuals.tensors, residuals.end
    made = [sum(tensors.sizes[t] for t in tensors.makes[i]) for i in range(end)]
    last = {t: i for i in range(end) for t in tensors.takes[i]}
    live: set[int] = set()
    before, sizes, alive = 0, [], []
    for i in range(end):
        live |= set(tensors.makes[i])
        live -= {t for t in tensors.takes[i] if last[t] <= i}
        live -= {t for t in tensors.makes[i] if t not in last}
        before += made[i]
        sizes.append(before)
        alive.append((sum(tensors.sizes[t] for t in live), frozenset(live)))
    total = sizes[-1] if sizes else 0
    calls: set[int] = set()
    for part in range(1, count):
        ends = [
            i
            for i, size in enumerate(sizes)
            if abs(size * count / max(total, 1) - part) <= _SLACK and not tensors.only_names[i]
        ]
        if ends:
            calls |= {residuals.maker[t] for t in min(alive[i] for i in ends)[1]}
    return calls
