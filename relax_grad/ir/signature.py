"""The roles of the parameters of a function that returns a loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from tvm import relax

T = TypeVar("T")

#: The groups of tensors that a model has, in the order of the parameters of an import's functions.
MODEL_GROUPS = ("params", "frozen", "states")

#: The groups of tensors that a step takes after the batch, in their order. runtime/manifest.h has
#: them as well.
GROUPS = (*MODEL_GROUPS, "optimizer_state")


@dataclass(frozen=True)
class Signature:
    """The positions of the parameters of a function, by their roles.

    Attributes
    ----------
    seed : int or None
        The position of the seed, if the function has one.
    batch : dict[str, int]
        The positions of inputs and targets by their names.
    params, frozen, states : dict[str, int]
        The positions of the parameters to train, of the parameters that stay, and of the states.
    """

    seed: int | None
    batch: dict[str, int]
    params: dict[str, int]
    frozen: dict[str, int]
    states: dict[str, int]

    @classmethod
    def in_order(
        cls,
        batch: Iterable[str],
        params: Iterable[str],
        frozen: Iterable[str],
        states: Iterable[str],
        *,
        has_seed: bool,
    ) -> Signature:
        """Return the signature of an import's function: the seed, inputs, targets, parameters,
        frozen ones and states."""
        start, groups = int(has_seed), []
        for names in (batch, params, frozen, states):
            groups.append({name: start + i for i, name in enumerate(names)})
            start += len(groups[-1])
        return cls(0 if has_seed else None, *groups)

    @classmethod
    def of_import(
        cls,
        function: relax.Function,
        params: Iterable[str],
        frozen: Iterable[str],
        states: Iterable[str],
        *,
        has_seed: bool,
    ) -> Signature:
        """Return the signature of an import's function whose attribute ``num_input`` is the number
        of parameters before ``params``."""
        count = int(function.attrs["num_input"])
        batch = [param.name for param in function.params[int(has_seed) : count]]
        signature = cls.in_order(batch, params, frozen, states, has_seed=has_seed)
        if signature.num_params != len(function.params):
            raise ValueError(
                f"the function has {len(function.params)} parameters, but the import names "
                f"{signature.num_params}"
            )
        return signature

    @property
    def groups(self) -> dict[str, dict[str, int]]:
        """The positions of the model's tensors: ``params``, ``frozen`` and ``states``."""
        return {group: getattr(self, group) for group in MODEL_GROUPS}

    @property
    def num_inputs(self) -> int:
        """The number of the parameters that are no tensors of the model: the batch and the seed."""
        return len(self.batch) + (self.seed is not None)

    @property
    def num_params(self) -> int:
        """The number of all parameters."""
        return self.num_inputs + sum(map(len, self.groups.values()))

    @property
    def names(self) -> list[str]:
        """The names of the parameters in their order. That of the seed is ``seed``."""
        named = {
            at: name for group in (self.batch, *self.groups.values()) for name, at in group.items()
        }
        return [named.get(at, "seed") for at in range(self.num_params)]

    def training(self, names: Collection[str]) -> Signature:
        """Return the signature in which only the parameters of these names are trained; the others
        are frozen."""
        others = {name: at for name, at in self.params.items() if name not in names}
        params = {name: at for name, at in self.params.items() if name in names}
        return replace(self, params=params, frozen={**others, **self.frozen})

    def arguments(
        self, batch: Mapping[str, T], model: Mapping[str, T], seed: T | None = None
    ) -> list[T]:
        """Return arguments in the order of the parameters.

        Parameters
        ----------
        batch : Mapping[str, T]
            The values of the batch by their names.
        model : Mapping[str, T]
            The values of parameters, frozen parameters and states, which may have the names of a
            batch too.
        seed : T, optional
            The seed, if the function has one.
        """
        values = {at: batch[name] for name, at in self.batch.items()}
        for places in self.groups.values():
            values.update({at: model[name] for name, at in places.items()})
        if self.seed is not None:
            if seed is None:
                raise ValueError("the function takes a seed, but there is none")
            values[self.seed] = seed
        return [values[at] for at in range(self.num_params)]

    def types(self, function: relax.Function) -> dict[str, dict[str, relax.Type]]:
        """Return the types of the parameters by their groups, of which ``batch`` is one, and by
        their names."""
        groups = {"batch": self.batch, **self.groups}
        return {
            group: {name: function.params[at].ty for name, at in places.items()}
            for group, places in groups.items()
        }
