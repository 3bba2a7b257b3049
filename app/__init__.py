"""Consignee: a receiving server for what agents send."""

__version__ = "0.1.0"
