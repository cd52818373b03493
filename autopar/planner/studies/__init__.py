"""Searches that several processes and machines share: the ledger of branch and bound as an Optuna study in a storage.

A trial is a candidate. :class:`~autopar.planner.studies.study.StudyLedger` is the ledger, in SQLite, PostgreSQL or a journal file;
:mod:`~autopar.planner.studies.workers` starts further processes. A killed worker leaves a claim, which others take over. The plan is the
one that a single search finds.
"""
