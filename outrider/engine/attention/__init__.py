"""The attention paths: how a forward stores and reads keys and values. `docs/glossary.md` lists their names.

Start at `forward_path.py`, the interface of a path. `fused.py`, `paged.py` and `dense.py` are the paths;
`paged_attention` and `varlen_attention` are two attention backends of the paged one. Imports `architectures`,
`quantization`, `memory`, `step_plan` and the modules below them, and from `native` the C++ forward; no loader and no
worker.
"""
