"""Train draft heads and draft models on text that their target generates, for `outrider train-head`.

May import the engine and `outrider.lab.models`. Start at `train_head.py`, the process that the command line starts. Its
steps: `written.py` has the target generate text, `teacher.py` computes the target's logits and hidden states along it,
a student (`student.py`, `eagle3.py`, `medusa.py`, `pass_embeddings.py`) computes its own, `losses.py` compares them,
and `run.py` updates the weights. The recipes of the demo models use `optimizing.py` as well.
"""
