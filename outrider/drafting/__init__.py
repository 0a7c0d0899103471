"""Drafters that need no model: counts of what followed what, and copies of what was there before. No torch."""
