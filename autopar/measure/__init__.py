"""What measurements say of a machine: latency and bandwidth of links from timed collectives (``link_fit.py``).

The fit asks the cost model what a collective would take, so it stands above ``autopar.cost``; what only times and reads files stands
in ``autopar.profile``.
"""
