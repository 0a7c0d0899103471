"""`outrider up`: starts and watches the processes of a system on this machine.

Start at `up.py`, the command, and `supervisor.py`, which runs the processes. It starts the services as modules and
imports none.
"""
