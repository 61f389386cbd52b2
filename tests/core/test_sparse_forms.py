"""Sparse forms of exchanges: kinds of their own that policies schedule and users do not choose."""

from __future__ import annotations

import msgspec
import pytest

from longspan.core.exchange import (
    ALLTOALL,
    ALLTOALL_SPARSE,
    CHAIN,
    GATHER_HIDDEN,
    GATHER_HIDDEN_SPARSE,
    LOCAL,
    RING_KV,
    RING_Q,
    RING_Q_SPARSE,
    Exchange,
    decoding,
    exchange_of,
    exchanges,
    of_any_layout,
    shown_names,
    with_sparse_form,
)
from longspan.core.sparse import SparseSetting

SETTING = SparseSetting(partition=64, segments=(1, 2), drop=(((0.5, 0.75),),))
FORMS = {ALLTOALL: ALLTOALL_SPARSE, GATHER_HIDDEN: GATHER_HIDDEN_SPARSE}


def test_a_sparse_form_has_the_setting_and_its_own_name_and_leads_back_to_the_exact_form() -> None:
    assert with_sparse_form() == tuple(FORMS)
    for exact, form in FORMS.items():
        made = exact.sparse_form(SETTING)
        assert made == form._replace(sparse=SETTING)
        assert made.exact_form == exact
        assert made.is_layerwise == exact.is_layerwise and made.stores_after == exact.stores_after
        assert str(made) == made.shown == made.kind == f"{exact.kind}_sparse"
        assert made.shown in shown_names()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Exchange) == made


def test_exact_exchanges_take_no_setting() -> None:
    for one in (LOCAL, *exchanges()):
        assert "sparse" not in one.traits.parameters
        assert one.exact_form == one
    without = (LOCAL, RING_KV, RING_Q, CHAIN, ALLTOALL_SPARSE, GATHER_HIDDEN_SPARSE)
    assert not any(one.has_sparse_form for one in without)


def test_decodes_have_a_sparse_form_that_prompts_do_not_take() -> None:
    made = RING_Q.sparse_form(SETTING)
    assert made == RING_Q_SPARSE._replace(sparse=SETTING) and made.exact_form == RING_Q
    assert made.traits.decodes and not made.is_priced_by_share
    assert made.shown in shown_names()


@pytest.mark.parametrize("kind", [*(form.kind for form in FORMS.values()), RING_Q_SPARSE.kind])
def test_no_option_names_a_sparse_form(kind: str) -> None:
    chosen = {*exchanges(), *of_any_layout(), *decoding()}
    assert kind not in {one.kind for one in chosen}
    with pytest.raises(ValueError, match=r"is unknown: choose from local, ring_kv") as caught:
        exchange_of(kind)
    assert f", {kind}" not in str(caught.value)
