from __future__ import annotations

import gzip

import pytest

from kvlens.dashboard.ingest.body import BodyError, decompress

PLAIN = b"spans" * 1000


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_plain(encoding: str) -> None:
    assert decompress(PLAIN, encoding, 1) is PLAIN


@pytest.mark.parametrize("members", [1, 3])
def test_gzip(members: int) -> None:
    assert decompress(gzip.compress(PLAIN, mtime=0) * members, "gzip", 15_000) == PLAIN * members


def test_the_limit_is_exact() -> None:
    body = gzip.compress(PLAIN, mtime=0)
    assert decompress(body, "gzip", len(PLAIN)) == PLAIN
    with pytest.raises(BodyError, match=r"4,999 bytes after .*MAX_DECOMPRESSED_BYTES") as caught:
        decompress(body, "gzip", len(PLAIN) - 1)
    assert caught.value.status == 413


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(200_000_000), 1)
    with pytest.raises(BodyError, match="larger than"):
        decompress(bomb, "gzip", 1 << 20)


def test_members_count_together() -> None:
    with pytest.raises(BodyError) as caught:
        decompress(gzip.compress(PLAIN, mtime=0) * 2, "gzip", 9_999)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (gzip.compress(b"", mtime=0) * 65, "over 64 members"),
        (b"plain text", "not gzip"),
        (gzip.compress(PLAIN, mtime=0)[:-1], "cut off"),
        (gzip.compress(PLAIN, mtime=0)[:20], "cut off"),
        (gzip.compress(PLAIN, mtime=0) + b"rest", "not gzip"),
    ],
)
def test_broken_gzip(body: bytes, message: str) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        decompress(body, "gzip", 1 << 20)
    assert caught.value.status == 400


def test_other_encodings() -> None:
    with pytest.raises(BodyError, match="'br' is not supported: use gzip") as caught:
        decompress(b"", "br", 10)
    assert caught.value.status == 415
