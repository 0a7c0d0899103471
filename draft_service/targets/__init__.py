"""The targets that this worker drafts for: the pairing check, vocabularies, registration and deliveries.

Start at `registration.py`.
"""
