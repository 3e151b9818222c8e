"""What a recipe will cost: work, bytes, memory and GPU hours from architectures alone, before any weight is there."""
