"""A policy and an exchange for longspan."""
