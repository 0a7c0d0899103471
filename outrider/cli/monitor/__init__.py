"""`outrider top`: draws a running system on one screen.

`top.py` scrapes the gateway and its workers, `series.py` parses and compares scrapes, `top_screen.py` draws them.
"""
