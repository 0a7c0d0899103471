"""`outrider up`: starts and watches the processes of a system on this machine. Start at `up.py`."""
