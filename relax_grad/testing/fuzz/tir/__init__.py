"""Random functions of TIR, called by Relax functions, compiled by the pipeline and compared with
NumPy.

A program is a description (:mod:`.language`). :mod:`.programs` draws it, with the functions of
:mod:`.functions`, the loops of :mod:`.nests` and the expressions of :mod:`.expressions`.
:mod:`.build` converts it to a module of TVM, and :mod:`.interpret` computes its values by NumPy.
:mod:`.checks` compares, :mod:`.shrink` shrinks a failing program, and :mod:`.report` writes it as a
script. :mod:`.subject` presents all of this to the session.
"""
