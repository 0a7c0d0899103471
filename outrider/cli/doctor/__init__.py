"""`outrider doctor`: checks this machine and a pair before anything is started.

`doctor.py` is the command, `machine.py` has the checks that need no torch; those of models run in a child process
(`outrider.engine.checkup`).
"""
