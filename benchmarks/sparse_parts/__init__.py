"""What `benchmarks/sparse.py` measures, part by part."""
