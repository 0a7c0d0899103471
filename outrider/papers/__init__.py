"""Methods of papers, off by default: beam search drafts, CS Drafting, lookahead, PaSS, merged trees, count tables.

They implement the protocols of `outrider.engine.speculation` and `outrider.drafting`, which they may import. The table
of drafters, `outrider.engine.drafter_table`, is the only module that imports them: start there.
"""
