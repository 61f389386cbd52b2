"""CSPS: sequence parallelism with sparse attention. The price of sparse attention is in `cost`: `csa_price.py`."""
