"""Build tiny worlds like the one of `lweave demo`, and test the claims of the paper on them."""
