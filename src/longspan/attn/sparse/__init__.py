"""Attention that drops unimportant distant tokens (CSPS §3.2.4), shared by the sparse forms of exchanges.

Each member attends its own partition locally, with all heads. Distant partitions are attended as in `alltoall`, level
by level. Heads are spread over the members of a segment, and each member gets the tokens that the level keeps. A
destination receives everything once, the most important tokens first, so the tokens of any level are a prefix. Then
every member receives partial outputs with their log-sum-exps, and merges them (Eq. 5).

A token is rated by the attention that it got in the layer before. Members send a sample of their queries, with their
log-sum-exps, to the members that hold keys. Each member rates its own keys, dropped ones included, so ratings are not
sent. The first and the last layer of a model, and the first layer of a pipeline stage, drop nothing.
"""
