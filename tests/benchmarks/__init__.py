"""What the goals are measured with: `make bench`, or `python -m tests.benchmarks [NAME…]`.

Every figure stands beside its peers from the same run on the same machine; what counts are the
ratios and the medians. Nothing here is a test: a goal that is missed is printed as missed.
"""
