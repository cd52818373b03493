"""A search that several processes and machines share: its ledger as an Optuna study in a storage.

A trial is a candidate; :class:`~autopar.planner.studies.study.Study` is the ledger of branch and bound, in SQLite, PostgreSQL or a
journal file. :mod:`~autopar.planner.studies.workers` starts further processes. A killed worker leaves a claim, which others take
over; the plan is that of one search alone.
"""
