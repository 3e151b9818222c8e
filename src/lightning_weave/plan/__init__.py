"""Predict the cost of a recipe: work, bytes, memory and GPU hours from the architectures alone, without weights."""
