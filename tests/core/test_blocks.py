"""Block accounting: blocks in = blocks out, and a prefix key never leads to other tokens."""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile

import hypothesis.stateful as sf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.core.blocks import BlockRef, chain_key
from longspan.core.kv.account import KvAccount
from longspan.core.kv.pool import BlockPool
from longspan.core.request import ROOT, Request, RequestMetrics
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Content, Sampled

SIZE = 3


def new_request(prompt: tuple[int, ...], *, rope_length: int = 0, number: int = 0, size: int = SIZE) -> Request:
    request = Request(
        id=number,
        prompt=prompt,
        params=SamplingParams(),
        seed=0,
        block_size=size,
        max_tokens=100,
        metrics=RequestMetrics(arrival_s=0.0),
    )
    request.pin_rope_length(rope_length)
    return request


class Accounting(sf.RuleBasedStateMachine):
    """Admits, computes, extends and frees requests. `slots` models the content of each slot of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks, self.instances = 5, (0, 1)
        self.account = KvAccount([self.num_blocks] * 2, block_size=SIZE)
        self.live: list[Request] = []
        self.slots: dict[tuple[BlockRef, int], tuple[int, tuple[int, ...]]] = {}
        self.num_requests = 0

    @sf.rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE).map(tuple),
        rope_length=st.sampled_from([0, 8, 9]),
        group=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    def admit(self, prompt: tuple[int, ...], rope_length: int, group: tuple[int, ...]) -> None:
        self.num_requests += 1
        request = new_request(prompt, rope_length=rope_length, number=self.num_requests)
        hit = self.account.match(request, group)
        assert 0 <= hit.num_tokens < request.num_tokens
        assert len(hit.refs) == request.blocks_for(hit.num_tokens)
        assert {ref.instance for ref in hit.refs} <= set(group)
        assert (hit.adopts_last or hit.copies_last) == bool(hit.num_tokens % SIZE)
        if hit.adopts_last:
            assert self.pool_of(hit.refs[-1]).references(hit.refs[-1].block) == 0, "a block in use is never adopted"
        free = {i: self.account.pool(i).num_free for i in group}
        cost = self.account.hit_cost(hit, frozenset())
        self.account.take(request, hit)
        self.account.copy_last(request, hit)
        for new, old in request.copying.items():
            for offset in range(hit.num_tokens % SIZE):
                self.slots[new, offset] = self.slots[old, offset]
        assert {i: free[i] - cost[i] for i in group} == {i: self.account.pool(i).num_free for i in group}
        request.group, request.num_computed = group, hit.num_tokens
        self.live.append(request)
        self.check_kv(request)

    @sf.precondition(lambda self: self.live)
    @sf.rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.complete_copies(request)
        if request.num_computed == request.num_tokens:
            request.take_token(Sampled(request_id=request.id, token=data.draw(st.integers(0, 1))), ())
        start = request.num_computed
        stop = data.draw(st.integers(start + 1, request.num_tokens))
        block_owners = data.draw(
            st.lists(st.sampled_from(request.group), min_size=len(request.table), max_size=len(request.table) + 4)
        )[len(request.table) :]
        block_owners = (block_owners + [request.group[0]] * 4)[: request.blocks_for(stop) - len(request.table)]
        if any(self.account.pool(i).num_free < number for i, number in Counter(block_owners).items()):
            return
        held = {ref for other in self.live for ref in other.table}
        self.account.extend(request, block_owners)
        assert held.isdisjoint(request.table[len(request.table) - len(block_owners) :]), (
            "a block in use is never evicted"
        )
        for position in range(start, stop):
            ref = request.table[position // SIZE]
            assert sum(ref in other.table for other in self.live) == 1, "a block that is written is not shared"
            self.slots[ref, position % SIZE] = self.name(request, position)
        request.num_computed = stop
        self.account.publish(request, start)

    @sf.precondition(lambda self: self.live)
    @sf.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.complete_copies(request)
        free = Counter({i: self.account.pool(i).num_free for i in self.instances})
        gain = self.account.reclaimable(request)
        self.account.free(request)
        assert request.table == []
        assert free + gain == Counter({i: self.account.pool(i).num_free for i in self.instances})

    @sf.invariant()
    def blocks_in_are_blocks_out(self) -> None:
        held = Counter(ref for request in self.live for ref in (*request.table, *request.copying.values()))
        for instance in self.instances:
            pool = self.account.pool(instance)
            for block in range(self.num_blocks):
                assert pool.references(block) == held[BlockRef(instance, block)]
            in_use = sum(ref.instance == instance for ref in held)
            assert pool.num_free + in_use == self.num_blocks

    @sf.invariant()
    def everybody_keeps_its_kv(self) -> None:
        for request in self.live:
            self.check_kv(request)

    def teardown(self) -> None:
        for request in self.live:
            self.complete_copies(request)
            self.account.free(request)
        for instance in self.instances:
            pool = self.account.pool(instance)
            assert pool.num_free == self.num_blocks
            assert sorted(pool.allocate(self.num_blocks)) == list(range(self.num_blocks))

    def complete_copies(self, request: Request) -> None:
        self.account.complete_copies(request, [(old, new) for new, old in request.copying.items()])

    def check_kv(self, request: Request) -> None:
        for position in range(request.num_computed):
            slot = (request.table[position // SIZE], position % SIZE)
            assert self.slots[slot] == self.name(request, position), "the slot holds KV of other tokens"

    def name(self, request: Request, position: int) -> tuple[int, tuple[int, ...]]:
        return request.rope_length, request.tokens(0, position + 1)

    def pool_of(self, ref: BlockRef) -> BlockPool:
        return self.account.pool(ref.instance)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def full(*tokens: int, parent: bytes = ROOT) -> Content:
    assert len(tokens) == SIZE
    return Content(parent, tokens)


def new_pool(num_blocks: int = 4) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=SIZE)


def test_blank_blocks_go_lowest_first() -> None:
    pool = new_pool()
    assert pool.allocate(4) == [0, 1, 2, 3]
    for block in (2, 0, 3):
        pool.release(block)
    assert pool.allocate(3) == [0, 2, 3]
    with pytest.raises(AssertionError, match="beyond the free blocks"):
        pool.allocate(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30), st.randoms(use_true_random=False))
def test_any_number_of_blocks_comes_and_goes_at_once(actions: list[tuple[bool, int]], draw: random.Random) -> None:
    pool, blank, used = new_pool(20), set(range(20)), list[int]()
    for takes, number in actions:
        if takes and number <= len(blank):
            expected = sorted(blank)[:number]
            assert pool.allocate(number) == expected
            blank.difference_update(expected)
            used += expected
        elif not takes:
            begin = draw.randint(0, len(used))
            left = [used.pop(begin) for _ in range(min(number, len(used) - begin))]
            pool.release(*left)
            blank.update(left)
        assert pool.num_free == len(blank)


@given(st.permutations(range(6)), st.integers(0, 6), st.lists(st.integers(0, 5), max_size=8))
def test_eviction_is_least_recently_used_first(order: list[int], num_blank: int, used: list[int]) -> None:
    pool = new_pool(6)
    keys = {}
    for block in pool.allocate(6):
        if block >= num_blank:
            pool.publish(block, full(block, 0, 0))
            keys[block] = chain_key(ROOT, (block, 0, 0))
    for block in order:
        pool.release(block)
    recency = [block for block in order if block >= num_blank]
    for block in used:
        if block in keys:
            pool.share(block)
            pool.release(block)
            recency.remove(block)
            recency.append(block)
    for expected in [*range(num_blank), *recency]:
        known = {block for block, key in keys.items() if pool.find(key) == block}
        assert pool.allocate(1) == [expected]
        assert {block for block, key in keys.items() if pool.find(key) == block} == known - {expected}


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = new_pool(1)
    [block] = pool.allocate(1)
    pool.publish(block, full(1, 2, 3))
    pool.share(block)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (1, 0)
    pool.release(block)
    assert pool.num_free == 1
    assert pool.find(chain_key(ROOT, (1, 2, 3))) == block
    with pytest.raises(AssertionError, match="once per reference"):
        pool.release(block)


def test_of_two_equal_blocks_the_first_is_offered() -> None:
    pool = new_pool()
    first, second = pool.allocate(2)
    pool.publish(first, full(1, 2, 3))
    pool.publish(second, full(1, 2, 3))
    assert pool.find(chain_key(ROOT, (1, 2, 3))) == first
    pool.release(second)
    pool.release(first)
    assert pool.allocate(1) == [second], "the copy is blank, not cached"


@given(st.permutations(range(4)), st.lists(st.sampled_from(["evict", "release"]), max_size=8))
def test_a_content_is_found_while_any_block_in_use_has_it(order: list[int], actions: list[str]) -> None:
    """Whichever of several copies is evicted, overwritten or released first."""
    pool = new_pool(6)
    copies, key = pool.allocate(4), chain_key(ROOT, (1, 2, 3))
    for place in order:
        pool.publish(copies[place], full(1, 2, 3))
    in_use = list(copies)
    for action in actions:
        if action == "release" and in_use:
            pool.release(in_use.pop(0))
        elif pool.num_free:
            pool.release(*pool.allocate(pool.num_free))
        assert not in_use or pool.find(key) in copies
    for block in in_use:
        pool.release(block)
    assert pool.num_free == 6 and sorted(pool.allocate(6)) == list(range(6))


def test_use_of_a_copy_keeps_the_offered_block() -> None:
    """A block in use that has the same content as a cached one is blank when released: the cached one was used."""
    pool = new_pool(4)
    first, second, other = pool.allocate(3)
    pool.publish(first, full(1, 2, 3))
    pool.publish(second, full(1, 2, 3))
    pool.publish(other, full(4, 5, 6))
    pool.release(first)
    pool.release(other)
    pool.release(second)
    assert pool.allocate(3) == [second, 3, other]
    assert pool.find(chain_key(ROOT, (1, 2, 3))) == first


def test_a_damaged_block_is_replaced_by_its_copy() -> None:
    pool = new_pool()
    first, second = pool.allocate(2)
    pool.publish(first, full(1, 2, 3))
    pool.publish(second, full(1, 2, 3))
    pool.forget(first)
    assert pool.find(chain_key(ROOT, (1, 2, 3))) == second
    assert pool.find_common_prefix(ROOT, (1, 2)) == (second, 2)


def test_blocks_in_use_are_neither_adopted_nor_evicted() -> None:
    pool = new_pool(2)
    [block] = pool.allocate(1)
    pool.publish(block, Content(ROOT, (1, 2)))
    assert not pool.is_adoptable(block, 2, num_lost=0)
    with pytest.raises(AssertionError, match="unreferenced"):
        pool.adopt(block)
    assert pool.allocate(1) != [block]
    with pytest.raises(AssertionError, match="beyond"):
        pool.allocate(1)
    pool.release(block)
    assert pool.is_adoptable(block, 2, num_lost=0) and pool.find_common_prefix(ROOT, (1, 2, 3)) == (block, 2)
    pool.adopt(block)
    pool.release(block)
    assert pool.find_common_prefix(ROOT, (1, 2, 3)) == (-1, 0), "an adopted block is not offered"


@pytest.mark.parametrize(
    ("begun", "tokens", "takes_over"),
    [
        ((1, 2), (1, 2, 3), True),
        ((1,), (1, 2), True),
        ((1, 2), (1,), False),
        ((1, 2), (1, 3), False),
        ((1, 2), (2,), False),
    ],
)
def test_a_content_takes_the_place_of_its_beginning(
    begun: tuple[int, ...], tokens: tuple[int, ...], takes_over: bool
) -> None:
    """Unless a request uses the block."""
    pool = new_pool()
    [block] = pool.allocate(1)
    pool.publish(block, Content(ROOT, begun))
    assert pool.place(Content(ROOT, tokens)) != block
    pool.release(block)
    assert (pool.place(Content(ROOT, tokens)) == block) == takes_over
    assert pool.references(block) == takes_over


_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(st.lists(_TOKENS, max_size=12), st.sets(st.integers(0, 11)), _TOKENS | st.just(()))
def test_the_longest_common_prefix_is_found(
    known: list[tuple[int, ...]], evicted: set[int], wanted: tuple[int, ...]
) -> None:
    pool = BlockPool(num_blocks=12, block_size=8)
    for block, tokens in zip(pool.allocate(len(known)), known, strict=True):
        pool.publish(block, Content(ROOT, tokens))
    for block in evicted.intersection(range(len(known))):
        pool.release(block)
        pool.adopt(block)
    left = [tokens for block, tokens in enumerate(known) if block not in evicted]
    pairs = [zip(tokens, wanted, strict=False) for tokens in left]
    longest = max([len(list(takewhile(lambda pair: pair[0] == pair[1], both))) for both in pairs], default=0)
    block, length = pool.find_common_prefix(ROOT, wanted)
    assert length == longest
    assert not length or (block not in evicted and known[block][:length] == wanted[:length])
    assert pool.find_common_prefix(b"other", wanted) == (-1, 0)


def turn(account: KvAccount, prompt: tuple[int, ...], num_output: int, group: tuple[int, ...] = (0,)) -> Request:
    """Run a request from admission to release. Its answer is always 7s."""
    request = new_request(prompt, size=account.block_size)
    hit = account.match(request, group)
    account.take(request, hit)
    account.copy_last(request, hit)
    account.complete_copies(request, [(old, new) for new, old in request.copying.items()])
    request.metrics.num_cached_tokens = request.num_computed = hit.num_tokens
    for _ in range(num_output):
        missing = request.blocks_for(request.num_tokens) - len(request.table)
        account.extend(request, [group[len(request.table) % len(group)]] * missing)
        start, request.num_computed = request.num_computed, request.num_tokens
        account.publish(request, start)
        request.take_token(Sampled(request_id=request.id, token=7), ())
    account.free(request)
    return request


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 9), st.sampled_from([1, 2, 3, 8, 16]))
def test_a_second_turn_computes_new_tokens_only(length: int, answer: int, new: int, size: int) -> None:
    account = KvAccount([64] * 2, block_size=size)
    first = turn(account, tuple(range(100, 100 + length)), answer, group=(0, 1))
    second = turn(account, first.tokens(0, first.num_tokens) + (8,) * new, 3, group=(1, 0))
    assert second.metrics.num_cached_tokens == first.num_tokens - 1
    third = turn(account, (*second.tokens(0, second.num_tokens), 9), 1, group=(0, 1))
    assert third.metrics.num_cached_tokens == second.num_tokens - 1


def test_a_stranger_that_begins_alike_does_not_take_a_conversation_away() -> None:
    account = KvAccount([64] * 1, block_size=16)
    first = turn(account, (1, *range(100, 140)), 4)
    turn(account, (1, *range(200, 240)), 4)
    again = turn(account, (*first.tokens(0, first.num_tokens), 5), 1)
    assert again.metrics.num_cached_tokens == first.num_tokens - 1


@pytest.mark.parametrize("size", [4, 16, 256])
def test_prompts_share_a_prefix_of_any_length(size: int) -> None:
    """A system prompt is no multiple of a block. Each conversation keeps its own tail, also while another one runs."""
    account, system = KvAccount([64], block_size=size), tuple(range(1, 159))
    first = turn(account, (*system, *range(200, 230)), 5)
    second = turn(account, (*system, *range(300, 340)), 5)
    assert second.metrics.num_cached_tokens == len(system)
    for one in (first, second):
        again = turn(account, (*one.tokens(0, one.num_tokens), 9), 1)
        assert again.metrics.num_cached_tokens == one.num_tokens - 1
    running = new_request((*range(500, 640), 1), size=size)
    account.extend(running, [0] * running.blocks_for(running.num_tokens))
    running.num_computed = running.num_tokens
    account.publish(running, 0)
    assert turn(account, (*range(500, 640), 2), 1).metrics.num_cached_tokens == 140


def test_no_block_is_copied_for_a_few_tokens_or_without_a_free_block() -> None:
    """A request that would have to wait for the block that is copied could wait for ever."""
    account = KvAccount([3], block_size=64)
    turn(account, tuple(range(40)), 1)
    assert account.match(new_request((*range(15), *range(50, 90)), size=64), (0,)).num_tokens == 0
    alike = account.match(new_request((*range(16), *range(50, 90)), size=64), (0,))
    assert (alike.num_tokens, alike.copies_last) == (16, True)
    without = account.match(new_request((*range(16), *range(50, 190)), size=64), (0,))
    assert without.num_tokens == 0
    adopted = account.match(new_request((*range(20), *range(50, 190)), size=64), (0,))
    assert (adopted.num_tokens, adopted.adopts_last) == (20, True), "half of it is used, so it is taken over"


def test_a_conversation_is_evicted_from_its_end() -> None:
    """The remaining blocks can still be used. Without its first block none could."""
    account = KvAccount([6] * 1, block_size=4)
    first = turn(account, tuple(range(16)), 1)
    turn(account, tuple(range(100, 112)), 1)
    again = turn(account, first.prompt, 1)
    assert again.metrics.num_cached_tokens == 12
    turn(account, tuple(range(200, 220)), 1)
    assert turn(account, first.prompt, 1).metrics.num_cached_tokens == 4


def test_without_prefix_caching_nothing_is_found() -> None:
    account = KvAccount([64] * 1, block_size=4, prefix_caching=False)
    for _ in range(2):
        assert turn(account, tuple(range(20)), 4).metrics.num_cached_tokens == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)), max_size=3), st.integers(0, 2))
def test_keys_name_all_tokens_and_the_rotary_length(blocks: list[tuple[int, int, int]], rope: int) -> None:
    tokens = tuple(token for block in blocks for token in block)
    key = new_request((*tokens, 5), rope_length=rope).parent_key(len(blocks))
    assert key == new_request((*tokens, 6, 7), rope_length=rope).parent_key(len(blocks)), "later tokens do not matter"
    assert key != new_request((*tokens, 5), rope_length=rope + 1).parent_key(len(blocks))
    for index in range(len(tokens)):
        changed = (*tokens[:index], tokens[index] + 1, *tokens[index + 1 :], 5)
        assert key != new_request(changed, rope_length=rope).parent_key(len(blocks))


def test_a_new_rotary_length_renames_keys_already_made() -> None:
    request = new_request(tuple(range(7)), rope_length=8)
    before = request.parent_key(2)
    request.pin_rope_length(9)
    assert request.parent_key(2) == new_request(tuple(range(7)), rope_length=9).parent_key(2) != before
