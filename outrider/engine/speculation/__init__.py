"""Speculation: draft trees, candidates and their order, acceptance probabilities, and the cost of rows.

Both workers use it. It may import `outrider.engine.sampling` and `outrider.engine.worker`, and no model; the services
import it. Start at `draft_tree.py`. The target uses `candidates.py`, `ranks.py`, `row_budget.py` and
`target_drafter.py`; the draft worker uses `node_drafter.py`, `growth.py`, `growing_tree.py` (with `plan.py`) and
`drawing.py`. `nodes.py` is what travels between them, and `beam.py` and `beam_tree.py` are beam search.
"""
