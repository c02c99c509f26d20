"""Minimum cuts of networks, by Dinic's algorithm."""

from __future__ import annotations

from collections import deque

#: The capacity of an edge that no minimum cut contains.
UNBOUNDED = 1 << 62


class Network:
    """A directed graph with integer capacities.

    Dinic's algorithm sends flow along shortest paths, phase by phase. It needs no recursion, so
    that long paths are within Python's limits.

    Parameters
    ----------
    nodes : int
        The number of nodes; they are numbered from 0.
    """

    def __init__(self, nodes: int):
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        # An edge and its reverse have the numbers 2 * i and 2 * i + 1.
        self._ends: list[int] = []
        self._left: list[int] = []

    def connect(self, start: int, end: int, capacity: int) -> None:
        """Add an edge."""
        for node, other, size in ((start, end, capacity), (end, start, 0)):
            self._edges[node].append(len(self._ends))
            self._ends.append(other)
            self._left.append(size)

    def sink_side(self, source: int, sink: int) -> list[bool]:
        """Return for each node whether it is on the side of the sink in a minimum cut.

        Among the minimum cuts it is the one with the fewest nodes on this side. The method uses up
        the capacities.
        """
        distances = self._distances(source, sink)
        while distances[sink] >= 0:
            self._block(source, sink, distances)
            distances = self._distances(source, sink)
        return self._reaching(sink)

    def _distances(self, source: int, sink: int) -> list[int]:
        """Return the number of edges with free capacity from the source to each node, or -1, up to
        the sink."""
        edges, ends, left = self._edges, self._ends, self._left
        distances = [-1] * len(edges)
        distances[source] = 0
        pending = deque([source])
        while pending and distances[sink] < 0:
            node = pending.popleft()
            for edge in edges[node]:
                end = ends[edge]
                if left[edge] and distances[end] < 0:
                    distances[end] = distances[node] + 1
                    pending.append(end)
        return distances

    def _block(self, source: int, sink: int, distances: list[int]) -> None:
        """Send flow along shortest paths until each of them has an edge without free capacity."""
        edges, ends, left = self._edges, self._ends, self._left
        following = [0] * len(edges)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= flow
                    left[edge ^ 1] += flow
                # The walk goes on from the first edge that has become full.
                full = next(i for i, edge in enumerate(path) if not left[edge])
                node = ends[path[full] ^ 1]
                del path[full:]
                continue
            while following[node] < len(edges[node]):
                edge = edges[node][following[node]]
                if left[edge] and distances[ends[edge]] == distances[node] + 1:
                    break
                following[node] += 1
            else:
                if not path:
                    return
                node = ends[path.pop() ^ 1]
                following[node] += 1
                continue
            path.append(edge)
            node = ends[edge]

    def _reaching(self, sink: int) -> list[bool]:
        """Return for each node whether a path with free capacity leads from it to the sink."""
        reaching = [False] * len(self._edges)
        reaching[sink] = True
        pending = [sink]
        while pending:
            for edge in self._edges[pending.pop()]:
                start = self._ends[edge]
                if self._left[edge ^ 1] and not reaching[start]:
                    reaching[start] = True
                    pending.append(start)
        return reaching
