"""The target worker: verifies proposals in one forward and decides what is committed.

`worker.py` assembles it, `servicer.py` translates its RPCs. Start at `step/step.py`, the round itself. `step` uses
`drafting` (the choice of draft tokens), `features` (hidden states for heads) and `leases` (draft buffers, deliveries).
It imports `outrider` and no other service.
"""
