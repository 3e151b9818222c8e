"""Load, sample and score models behind small protocols."""
