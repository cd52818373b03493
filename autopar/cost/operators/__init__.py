"""Seconds and bytes of one operator on one device.

``work.work`` counts the :class:`~autopar.cost.operators.work_record.Work` of an operator: products, other bytes, launches, and what
backward keeps. ``matmul`` has the operators that multiply matrices. ``operator_times.op_time`` turns work into seconds by a roofline, the
longer of computing and moving (Williams, Waterman, Patterson 2009, "Roofline", CACM 52(4)); the rate of products depends on their smallest
dim as the profile measured it. ``Measured`` replaces the roofline where a device's operators were timed.
"""
