"""The checks of arguments that all parts share: integers, and patterns of names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from numbers import Integral

#: The number of names in an error, at most.
_SHOWN = 8


#: The length of a value in an error, at most.
_MOST_TEXT = 80


def described(value: object) -> str:
    """Return a value as text for an error: a class by its name, arrays and tensors by shape and
    dtype, modules and models by their class, and others cut to 80 characters.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad._validation import described
    >>> described(np.ones((2, 3)))
    'an array of shape (2, 3) and dtype float64'
    >>> described([np.ones(2)] * 2), described(int)
    ('a list with an array of shape (2,) and dtype float64', 'the class int')
    """
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        noun = "an array" if kind.__module__.partition(".")[0] == "numpy" else "a tensor"
        return f"{noun} of shape {tuple(shape)} and dtype {dtype}"
    if isinstance(value, list | tuple) and value:
        return f"a {kind.__name__} with {described(value[0])}"
    if isinstance(value, Mapping) and value:
        key, first = next(iter(value.items()))
        return f"a {kind.__name__} with {key!r}: {described(first)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_TEXT else f"a value of type {kind.__name__}"


def is_integer(value: object) -> bool:
    """Tell whether a value is an integer of Python or NumPy; ``True`` and ``False`` are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(
    argument: str,
    value: object,
    least: int | None = None,
    most: int | None = None,
    *,
    of: str = "",
    also: str = "",
) -> int:
    """Return an argument as an integer of Python, or raise an error that says what it must be.

    Parameters
    ----------
    argument : str
        The name of the argument.
    value : object
        Its value.
    least, most : int, optional
        The bounds, which are valid themselves.
    of : str
        The unit of a count, such as ``"bytes"``.
    also : str
        The other valid values, such as ``"None"``, for the error. The caller has handled them.

    Returns
    -------
    value : int
        The integer.

    Raises
    ------
    TypeError
        If the value is no integer.
    ValueError
        If it is out of bounds.
    """
    fits = is_integer(value)
    if isinstance(value, Integral) and fits:
        number = int(value)
        if (least is None or number >= least) and (most is None or number <= most):
            return number
    expected = f"a number of {of}" if of else "an integer"
    if fits and least == 1 and most is None:
        expected = f"a positive {expected.partition(' ')[2]}"
    elif fits and (most is not None or not of):
        expected += f" from {least}" if least is not None else ""
        expected += f" to {most}" if most is not None else ""
    expected += f" or {also}" if also else ""
    raise (ValueError if fits else TypeError)(f"{argument} must be {expected}, but it is {value!r}")


def check_call(argument: str, function: Callable, values: Collection[object], remedy: str) -> None:
    """Raise TypeError if a caller's function does not take so many arguments.

    Parameters
    ----------
    argument : str
        The name of the argument that has the function.
    function : Callable
        The function.
    values : Collection
        The arguments with which it is called.
    remedy : str
        A function that fits, as code.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*values)
    except TypeError as error:
        count = f"{len(values)} argument{'' if len(values) == 1 else 's'}"
        names = ", ".join(signature.parameters)
        raise TypeError(
            f"{argument} is called with {count}, but its function has ({names}): {error}; give a "
            f"function such as {remedy}"
        ) from None


def matches(name: str, pattern: str) -> bool:
    """Tell whether a name equals a pattern, or fits its ``*``, ``?`` and ``[...]``."""
    return name == pattern or fnmatchcase(name, pattern)


def matching(
    argument: str, pattern: str, names: Iterable[str], noun: str, reason: str = ""
) -> list[str]:
    """Return the names that a pattern matches.

    Parameters
    ----------
    argument : str
        The name of the argument, for the error.
    pattern : str
        A name or a pattern, as for :func:`matches`.
    names : Iterable[str]
        The names to choose from.
    noun : str
        The noun of a name, such as ``"parameter"``.
    reason : str
        A further reason for the error, such as ``"or all have an optimizer already"``.

    Returns
    -------
    found : list[str]
        At least one name, in the order of ``names``.

    Raises
    ------
    ValueError
        If there is none. The error has similar names.
    """
    names = list(names)
    selected = [name for name in names if matches(name, pattern)]
    if not selected:
        more = f", {reason}" if reason else ""
        raise ValueError(
            f"{argument}: no {noun} matches {pattern!r}{more}; {alternatives(pattern, names)}"
        )
    return selected


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that are similar to a name, the most similar first."""
    return get_close_matches(name, known, count, 0.5)


def alternatives(name: str, known: Collection[str]) -> str:
    """Return the end of an error for an unknown name: the similar ones, or else the first known
    ones.

    Examples
    --------
    >>> from relax_grad._validation import alternatives
    >>> alternatives("weigth", ["weight", "bias"])
    'did you mean weight?'
    >>> alternatives("z", ["weight", "bias"])
    'there are weight, bias'
    """
    near = near_names(name, known)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(list(known)[:_SHOWN]) or "none"
    return (
        f"there are {shown}" if len(known) <= _SHOWN else f"there are {len(known)}, such as {shown}"
    )


#: The first bytes of files that torch.save writes: an archive, or a pickle.
_OF_TORCH = (b"PK\x03\x04", b"\x80\x02")


def check_not_folder(path: str | os.PathLike, example: str) -> None:
    """Raise IsADirectoryError if a path is a folder.

    Parameters
    ----------
    path : str or os.PathLike
        The path.
    example : str
        The name of a file in it, for the error.
    """
    if os.path.isdir(path):
        file = os.path.join(os.fspath(path), example)
        raise IsADirectoryError(f"{os.fspath(path)} is a folder; give a file, such as {file!r}")


def is_of_torch(start: bytes) -> bool:
    """Tell whether these are the first bytes of a file that torch.save writes."""
    return start.startswith(_OF_TORCH)


def check_not_of_torch(path: str | os.PathLike, start: bytes) -> None:
    """Raise ValueError if torch.save has written a file."""
    if is_of_torch(start):
        raise ValueError(
            f"{path} must be a file of safetensors, but it is one of torch.save. Load its weights "
            "into the model before from_module: model.load_state_dict(torch.load(path))"
        )


def check_path(path: object) -> None:
    """Raise TypeError if the path of a file of weights or of a state is none."""
    if isinstance(path, str | os.PathLike):
        return
    remedy = ""
    if isinstance(path, Mapping):
        remedy = "; Trainer(step, values=values) takes values by their names"
    raise TypeError(
        f'path must be a path, such as "state.safetensors", but it is {described(path)}{remedy}'
    )
