"""The half of the laboratory that imports torch: acceptance rates, widened models, reference answers."""
