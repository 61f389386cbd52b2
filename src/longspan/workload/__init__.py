"""Requests before anybody serves them: their lengths, their times, and traces of real services."""
