"""Differential fuzzing: random programs are differentiated, compiled, and compared with independent
references.

``python -m relax_grad fuzz`` runs it. :mod:`.programs` draws programs from :mod:`.operators` and
:mod:`.sampled`, :mod:`.script` writes them, :mod:`.checks` compares, :mod:`.shrink` shrinks a
failing program, and :mod:`.session` runs all of it in separate processes. :mod:`.tir` holds
programs of another kind: functions of TIR that the pipeline schedules.
"""
