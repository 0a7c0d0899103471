"""Drafters that need no model: tables of what followed what."""
