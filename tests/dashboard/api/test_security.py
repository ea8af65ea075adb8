from __future__ import annotations

import httpx
import pytest

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings, load_settings

READ = "read-token-0123456789"
INGEST = "ingest-token-0123456789"
JSON = {"Content-Type": "application/json"}
PAGES = ["/", "/requests", "/api/v1/engines", "/api/v1/stream", "/metrics", "/openapi.json"]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(settings: Settings) -> Settings:
    return load_settings(store=settings.store, port=0, read_token=READ, ingest_token=INGEST)


def test_reading_needs_the_read_token(guarded: Settings) -> None:
    with running(guarded) as url, httpx.Client(base_url=url) as client:
        for path in PAGES:
            for headers in ({}, bearer("wrong"), bearer(INGEST), {"Authorization": READ}):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401, path
        assert "Bearer <KVLENS_READ_TOKEN of the dashboard>" in answer.text
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert client.get("/api/v1/engines", headers=bearer(READ)).status_code == 200
        assert client.get("/api/v1/engines", auth=("anyone", READ)).status_code == 200
        assert client.get("/api/v1/engines", auth=(READ, "")).status_code == 401
        broken = {"Authorization": "Basic ???"}
        assert client.get("/api/v1/engines", headers=broken).status_code == 401
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_sending_needs_the_ingest_token(guarded: Settings) -> None:
    with running(guarded) as url, httpx.Client(base_url=url) as client:
        for headers in ({}, bearer("wrong"), bearer(READ)):
            answer = client.post("/v1/traces", content=b"{}", headers={**JSON, **headers})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        basic = client.post("/v1/traces", content=b"{}", headers=JSON, auth=("x", INGEST))
        assert basic.status_code == 401  # no browser sends OTLP
        sent = client.post("/v1/traces", content=b"{}", headers={**JSON, **bearer(INGEST)})
        assert sent.status_code == 200


def test_tokens_are_not_in_the_metrics_or_the_specification(guarded: Settings) -> None:
    with running(guarded) as url:
        text = "".join(
            httpx.get(url + path, headers=bearer(READ)).text
            for path in ("/metrics", "/openapi.json")
        )
    assert READ not in text
    assert INGEST not in text


@pytest.mark.parametrize("path", ["/", "/api/v1/engines", "/nowhere", "/healthz"])
def test_security_headers_on_everything(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_a_rebound_host_name_is_refused(settings: Settings) -> None:
    allowed = settings.model_copy(update={"allowed_hosts": ("kv.example",)})
    with running(allowed) as url:
        port = url.rpartition(":")[2]

        def status(host: str) -> int:
            return httpx.get(f"{url}/api/v1/engines", headers={"Host": host}).status_code

        assert status(f"evil.example:{port}") == 421
        assert [status(host) for host in ("localhost", f"[::1]:{port}", "KV.example")] == [200] * 3
        evil = httpx.get(url, headers={"Host": "evil.example"})
    assert "add it to KVLENS_ALLOWED_HOSTS" in evil.text


def test_what_came_from_outside_stays_text(client: httpx.Client) -> None:
    answer = client.get("/api/v1/requests/<script>alert(1)</script>")
    assert answer.headers["content-type"] == "application/json"
