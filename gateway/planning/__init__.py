"""How many tokens a round drafts, learnt from measured rounds."""
