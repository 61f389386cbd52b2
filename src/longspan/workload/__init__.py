"""Workloads: request lengths, arrival times, and traces of real services."""
