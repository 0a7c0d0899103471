"""What is known of a model without torch: its name, files, tokenizer and fingerprint."""
