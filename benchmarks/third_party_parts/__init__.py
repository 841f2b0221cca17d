"""What `benchmarks/third_party.py` runs: networks of other packages, settings, and one cell of the two."""
