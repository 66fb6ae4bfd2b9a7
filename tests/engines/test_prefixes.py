import torch

from nextstate.engines.packed import KVCache
from nextstate.engines.prefixes import PrefixCache, common_prefix


def cache_of(tokens: int) -> KVCache:
    cache = KVCache()
    cache.append(0, torch.zeros(1, tokens, 2), torch.zeros(1, tokens, 2))
    cache.length = tokens
    return cache


def test_a_prompt_reuses_the_longest_beginning_computed_under_its_version():
    prefixes = PrefixCache(1000)
    prefixes.put(3, list(range(40)), cache_of(40))
    assert prefixes.take(3, [*range(30), 99, 98], most=31).length == 30
    assert prefixes.take(3, list(range(40)), most=39).length == 39  # the last token must be computed for its logits


def test_another_versions_cache_is_never_used():
    prefixes = PrefixCache(1000)
    prefixes.put(3, list(range(40)), cache_of(40))
    assert prefixes.take(4, list(range(40)), most=39).length == 0


def test_a_conversation_that_goes_on_replaces_its_own_beginning():
    prefixes = PrefixCache(100)
    prefixes.put(1, list(range(40)), cache_of(40))
    prefixes.put(1, [500, *range(39)], cache_of(40))
    prefixes.put(1, list(range(50)), cache_of(50))  # 90 in all: the other conversation stays
    assert prefixes.take(1, [500, *range(39)], most=39).length == 39
    assert prefixes.take(1, list(range(50)), most=49).length == 49


def test_the_least_recently_used_goes_when_room_runs_out():
    prefixes = PrefixCache(100)
    prefixes.put(1, [1] * 40, cache_of(40))
    prefixes.put(1, [2] * 40, cache_of(40))
    prefixes.take(1, [1] * 40, most=39)
    prefixes.put(1, [3] * 40, cache_of(40))
    assert prefixes.take(1, [1] * 40, most=39).length == 39
    assert prefixes.take(1, [2] * 40, most=39).length == 0


def test_versions_that_are_gone_are_forgotten():
    prefixes = PrefixCache(100)
    prefixes.put(1, [1] * 40, cache_of(40))
    prefixes.keep_only({0, 2})
    assert prefixes.take(1, [1] * 40, most=39).length == 0


def test_a_common_prefix_ends_at_the_first_difference_or_the_shorter_end():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
