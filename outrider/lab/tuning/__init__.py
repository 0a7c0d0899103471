"""`outrider tune`: runs, costs, expected speed and the choice of K, drafter and price. Start at `study.py`."""
