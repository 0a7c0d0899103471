"""Train draft heads and draft models on text that their target generates, for `outrider train-head`.

May import the engine and `outrider.lab.models`. Start at `train_head.py`, the process that the command line starts. Its
steps: in `written.py` the target generates text; `teacher.py` computes the target's logits and hidden states along this
text; a student (`student.py`, `eagle3_student.py`, `medusa_student.py`, `pass_embeddings.py`) computes its own;
`losses.py` compares them; and `run.py` updates the weights. The recipes of the demo models use `optimizing.py` as well.
"""
