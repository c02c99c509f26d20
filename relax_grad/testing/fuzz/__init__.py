"""Differential fuzzing: random programs, differentiated, compiled, and compared with other ways to their gradients.

``python -m relax_grad fuzz`` runs it. :mod:`.programs` draws programs of :mod:`.operators` and :mod:`.sampled`,
:mod:`.script` writes them, :mod:`.checks` compares, :mod:`.shrink` makes a failing one smaller, and
:mod:`.session` keeps all of it going in processes of their own. :mod:`.tir` holds programs of another kind: functions of
TIR that the pipeline schedules.
"""
