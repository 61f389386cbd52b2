"""Attention that drops unimportant tokens far away (CSPS §3.2.4): the parts that the sparse forms of exchanges share.

Each member attends its own partition to itself, all heads, where it is. What lies farther apart meets as in `alltoall`,
level by level: heads are spread over the members of a segment, and each gets the tokens that are kept there. Each
destination is sent everything once, the most important tokens first, so that any level's tokens are a beginning of
those; then every member gets partial outputs with their log-sum-exps, and merges them (Eq. 5).

A token is rated by the attention that it got in the layer before. Members send a sample of their queries, with the
log-sum-exps that are known by then, to those who hold keys; so each rates its own keys, dropped ones too, and no rating
travels. The first and the last layer of a model, and the first of a pipeline stage, drop nothing.
"""
