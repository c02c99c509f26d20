"""Random functions of TIR, called by Relax functions, compiled by the pipeline and compared with NumPy.

A program is a description (:mod:`.language`). :mod:`.programs` draws it, with the functions of :mod:`.functions`, the
loops of :mod:`.nests` and the expressions of :mod:`.expressions`; :mod:`.build` makes it a module of TVM, and
:mod:`.interpret` its values by NumPy; :mod:`.checks` compares, :mod:`.shrink` makes a failing program smaller, and
:mod:`.report` writes it as a script. :mod:`.subject` hands all that to the session.
"""
