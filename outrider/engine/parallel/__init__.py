"""Tensor parallelism: the target's weights split over processes of one machine.

Rank 0 is the worker. The other ranks hold the other parts of the weights and repeat its forwards; they run
`outrider.engine.loading.rank_process`. Start at `team.py`, rank 0's part: it starts the other ranks and sends each forward to
them. `meeting` has the connections, `rank_messages` encodes the commands, `group` has torch's own collectives, and
`checks` refuses models that cannot be split. Imports `attention`, `architectures` and the modules below them.
"""
