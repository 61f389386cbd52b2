"""The record of a block: the places of its fields, the shares of shards and stages, and possible ends of hits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.kv_record import KvRecord, LayerRecord

LAW = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def layers(draw: st.DrawFn) -> LayerRecord:
    num_kv_heads = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any))
    return LayerRecord(
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        key_bytes=sizes[0],
        value_bytes=sizes[1],
        state_bytes=sizes[2],
    )


RECORDS = st.lists(layers(), min_size=1, max_size=5).map(lambda found: KvRecord(layers=tuple(found)))


@LAW
@given(RECORDS)
def test_fields_follow_each_other_and_fill_the_record(record: KvRecord) -> None:
    places = [place for layer in record.places for place in layer.values()]
    assert [*itertools.chain(*places)] == [*range(record.block_bytes)]
    assert all(places.keys() == layer.fields.keys() for places, layer in zip(record.places, record.layers, strict=True))
    assert not any(size % record.word_bytes for layer in record.layers for size in layer.fields.values())


@LAW
@given(RECORDS, st.data())
def test_parts_of_a_record_have_its_words(record: KvRecord, data: st.DataObject) -> None:
    """So fields can be copied word by word between ranks with other layers and heads."""
    first = data.draw(st.integers(0, len(record.layers) - 1))
    tp = data.draw(st.integers(1, min(layer.num_heads for layer in record.layers)))
    for shard in range(tp):
        part = record.of_layers(range(first, len(record.layers))).of_shard(shard, tp)
        assert part.word_bytes == record.word_bytes
        wanted = [len(layer.kv_heads(tp)[shard]) * layer.head_bytes for layer in record.layers[first:]]
        assert [layer.block_bytes for layer in part.layers] == wanted


def test_a_layer_that_stores_nothing_is_refused() -> None:
    with pytest.raises(AssertionError):
        LayerRecord(num_heads=1, num_kv_heads=1)
