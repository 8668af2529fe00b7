"""Hashes: what makes two blocks equal, and which block a hash names."""

from __future__ import annotations

import hashlib
import struct

import pytest

from octavo_router.prefix_cache import CachedBlock, PrefixCache, Tier, chained_hash, root_hash


def test_a_hash_is_blake2b_of_the_parent_and_the_tokens_as_little_endian_int32() -> None:
    parent = root_hash(model_digest="m", adapter="", cache_salt="")
    expected = hashlib.blake2b(parent + struct.pack("<3i", 1, 2, 70_000), digest_size=16).digest()
    assert chained_hash(parent, [1, 2, 70_000]) == expected
    assert len(parent) == 16


def test_no_two_identities_have_one_root() -> None:
    parts = [
        ("ab", "", ""),
        ("a", "b", ""),
        ("a", "", "b"),
        ("", "ab", ""),
        ("", "a", "b"),
        ("", "", "ab"),
        ("", "", ""),
    ]
    roots = {root_hash(model_digest=model, adapter=adapter, cache_salt=salt) for model, adapter, salt in parts}
    assert len(roots) == len(parts)


def test_a_chain_covers_everything_in_front() -> None:
    root = root_hash(model_digest="m", adapter="", cache_salt="")
    assert chained_hash(chained_hash(root, [1, 2]), [3, 4]) != chained_hash(chained_hash(root, [2, 1]), [3, 4])
    assert chained_hash(root, [1, 2]) != chained_hash(root, [2, 1])


def test_the_longest_chain_is_found_over_both_tiers() -> None:
    cache = PrefixCache()
    hashes = [bytes([index]) for index in range(5)]
    for index, tier, block_id in ((0, Tier.DEVICE, 7), (1, Tier.HOST, 7), (2, Tier.DEVICE, 3), (4, Tier.DEVICE, 4)):
        cache.name(hashes[index], tier, block_id)
    assert cache.match(hashes, 5) == [
        CachedBlock(Tier.DEVICE, 7),
        CachedBlock(Tier.HOST, 7),
        CachedBlock(Tier.DEVICE, 3),
    ]
    assert len(cache.match(hashes, 1)) == 1
    assert cache.forget(Tier.DEVICE, 7) == hashes[0]
    assert cache.match(hashes, 5) == []
    assert (len(cache), cache.hash_of(Tier.DEVICE, 3), cache.hash_of(Tier.HOST, 3)) == (3, hashes[2], None)
    cache.check_integrity()


def test_a_hash_names_one_block_and_a_block_has_one_hash() -> None:
    cache = PrefixCache()
    cache.name(b"a", Tier.DEVICE, 0)
    with pytest.raises(AssertionError, match="name two blocks"):
        cache.name(b"a", Tier.HOST, 1)
    with pytest.raises(AssertionError, match="device block 0 would have two hashes"):
        cache.name(b"b", Tier.DEVICE, 0)
