"""Training steps without a runtime: a step as a static plan, and the plan as C.

A compiled step with known extents is a straight list of calls. A plan gives each of its tensors a
fixed place, so that a loop over a table runs the step: without an allocator, a virtual machine or a
dynamic loader.
"""
