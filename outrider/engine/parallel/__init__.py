"""Tensor parallelism: the target's weights split over processes of one machine.

Rank 0 is the worker; followers hold the other shares and repeat its forwards. `meeting` is how they find, command and
miss each other, `messages` what is said, `group` torch's own collectives, `team` rank 0's side, `follower` the others'.
"""
