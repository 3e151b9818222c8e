"""Lightning Weave: compose what post-trained models have learned into one student."""

__version__ = "0.1.0"
