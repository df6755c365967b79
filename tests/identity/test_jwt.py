"""Tokens of an issuer: which are taken, and with which reason the others are refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time

import pytest

from omni_grpc.config import IdentityConfig
from omni_grpc.identity import authenticator
from omni_grpc.identity.jwks import AddressKeys, parse_keys
from omni_grpc.identity.jwt import TokenVerifier
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import ConfigError, OmniError, Unauthenticated, Unavailable

from .keys import AUDIENCE, ISSUER, MAKE, Key, jwks, key, pair, publishing

ONE = key()


def config(keys: object, **changes: object) -> IdentityConfig:
    return IdentityConfig(jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks=str(keys), **changes)


@pytest.fixture
def known(tmp_path):
    """An authenticator that knows the key ONE."""
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE))
    return authenticator(config(path))


async def ask(known, token: str) -> Caller:
    return await known.caller(authorization=f"Bearer {token}", certificate=None, peer="ipv4:10.0.0.1:5")


async def refused(known, token: str) -> OmniError:
    with pytest.raises(OmniError) as caught:
        await ask(known, token)
    assert token[:40] not in str(caught.value)
    return caught.value


def encoded(content: object) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(data: bytes) -> str:
    """A token whose claims are these bytes, with a good signature."""
    import jwt

    return jwt.api_jws.encode(data, ONE.private, ONE.algorithm, headers={"kid": ONE.kid})


async def test_claims_become_a_caller(known):
    assert await ask(known, ONE.token()) == Caller(
        tenant="studio",
        subject="render-farm",
        scopes=frozenset({Scope.GENERATE, Scope.READ}),
        peer="ipv4:10.0.0.1:5",
    )


@pytest.mark.parametrize("algorithm", MAKE)
async def test_each_kind_of_key_is_taken(tmp_path, algorithm):
    token, path = pair(tmp_path, algorithm)
    assert (await ask(authenticator(config(path)), token)).tenant == "studio"


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": "read admin profile"}, {"read", "admin"}),
        ({"scope": None, "scopes": ["generate", "x", 5]}, {"generate"}),
        ({"scope": None, "scopes": "read generate"}, {"generate", "read"}),
        ({"scope": "read", "scopes": ["admin"]}, {"read", "admin"}),
        ({"scope": "Read,admin"}, set()),
        ({"scope": None}, set()),
        ({"scope": 7, "scopes": {"admin": True}}, set()),
    ],
)
async def test_scopes_of_ours_alone_count(known, claims, scopes):
    assert (await ask(known, ONE.token(**claims))).scopes == scopes


async def test_the_tenant_comes_from_the_claim_that_is_set(tmp_path):
    _, path = pair(tmp_path)
    path.write_bytes(jwks(ONE))
    known = authenticator(config(path, jwt_tenant_claim="org"))
    assert (await ask(known, ONE.token(org="acme"))).tenant == "acme"
    assert "claim org" in str(await refused(known, ONE.token()))


NOW = time.time()


@pytest.mark.parametrize(
    ("claims", "reason", "says"),
    [
        ({"exp": NOW - 90}, "TOKEN_EXPIRED", "expired"),
        ({"nbf": NOW + 900}, "TOKEN_NOT_YET_VALID", "clocks"),
        ({"iat": NOW + 900}, "TOKEN_NOT_YET_VALID", "clocks"),
        ({"exp": None}, "TOKEN_INVALID", "no claim exp"),
        ({"sub": None}, "TOKEN_INVALID", "no claim sub"),
        ({"aud": None}, "TOKEN_INVALID", "no claim aud"),
        ({"iss": None}, "TOKEN_INVALID", "no claim iss"),
        ({"aud": "other"}, "TOKEN_INVALID", "another audience"),
        ({"iss": ISSUER + "/"}, "TOKEN_INVALID", "another issuer"),
        ({"tenant": None}, "TOKEN_INVALID", "claim tenant"),
        ({"tenant": ""}, "TOKEN_INVALID", "claim tenant"),
        ({"tenant": ["studio"]}, "TOKEN_INVALID", "claim tenant"),
        ({"tenant": "studio\nadmin logged in"}, "TOKEN_INVALID", "claim tenant"),
        ({"tenant": "s" * 257}, "TOKEN_INVALID", "claim tenant"),
        ({"sub": 5}, "TOKEN_INVALID", "malformed"),
        ({"exp": "soon"}, "TOKEN_INVALID", "malformed"),
    ],
    # the same in every process: without the times
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
async def test_a_claim_that_is_wrong_is_a_reason(known, claims, reason, says):
    import jwt

    try:
        token = ONE.token(**claims)
    except TypeError:  # PyJWT signs no such claim, but others would
        content = jwt.decode(ONE.token(), options={"verify_signature": False}) | claims
        token = signed(json.dumps(content).encode())
    error = await refused(known, token)
    assert isinstance(error, Unauthenticated)
    assert error.reason == reason
    assert says in str(error)


@pytest.mark.parametrize(("skew", "valid"), [(30, True), (59, True), (70, False)])
async def test_clocks_may_differ_by_the_leeway(known, skew, valid):
    now = time.time()
    late, early = ONE.token(exp=now - skew + 2), ONE.token(nbf=now + skew - 2)
    for token in (late, early):
        if valid:
            assert (await ask(known, token)).subject == "render-farm"
        else:
            await refused(known, token)


async def test_without_leeway_a_second_is_too_late(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE))
    known = authenticator(config(path, jwt_leeway=0.0))
    assert (await refused(known, ONE.token(exp=time.time() - 1))).reason == "TOKEN_EXPIRED"


def with_header(**header: object) -> str:
    """A valid token with another header, which its signature does not cover."""
    _, claims, signature = ONE.token().split(".")
    return f"{encoded({'alg': 'ES256', 'kid': 'one'} | header)}.{claims}.{signature}"


async def test_an_unsigned_token_is_refused(known):
    for algorithm in ("none", "None", "NONE", "", None, ["none"], {"a": 1}):
        for token in (with_header(alg=algorithm), with_header(alg=algorithm).rpartition(".")[0] + "."):
            assert (await refused(known, token)).reason == "TOKEN_INVALID"


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
async def test_a_public_key_is_no_shared_secret(tmp_path, algorithm):
    """Whoever has the public key could sign with it, if the token decided on the algorithm."""
    rsa = key(algorithm="RS256")
    for published in (jwks(rsa), json.dumps({"keys": [rsa.jwk(alg=None)]}).encode()):
        path = tmp_path / "jwks.json"
        path.write_bytes(published)
        known = authenticator(config(path))
        head = encoded({"alg": algorithm, "kid": "one"}) + "." + rsa.token().split(".")[1]
        for secret in (rsa.pem(), rsa.pem().strip(), published, b""):
            name = algorithm.replace("HS", "sha")
            signature = hmac.new(secret, head.encode(), getattr(hashlib, name)).digest()
            assert (await refused(known, f"{head}.{encoded(signature)}")).reason == "TOKEN_INVALID"


async def test_another_algorithm_than_that_of_the_key_is_refused(known):
    for algorithm in ("RS256", "ES384", "EdDSA", "ES256K"):
        assert (await refused(known, with_header(alg=algorithm))).reason in ("TOKEN_INVALID", "TOKEN_KEY_UNKNOWN")


async def test_a_key_that_a_token_brings_along_is_not_used(known):
    """`jwk`, `jku` and `x5u` would let a token say who signed it."""
    other = key("two")
    with publishing(other) as published:
        for headers in ({"jwk": other.jwk()}, {"jku": published.address}, {"x5u": published.address}):
            assert (await refused(known, other.token(headers=headers))).reason == "TOKEN_KEY_UNKNOWN"
            mine = Key("one", other.algorithm, other.private)
            assert "signature" in str(await refused(known, mine.token(headers=headers)))
        assert published.asked == 0


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b.c",
        "..",
        encoded(b"[" * 9000) + ".e30.eA",
        encoded({"alg": "ES256", "kid": 5}) + ".e30.eA",
        encoded([1]) + ".e30.eA",
        with_header(crit=["exp"]),
        with_header(crit=["b64"], b64=False),
        with_header(crit=[]),
        ONE.token()[:-4] + "AAAA",
        signed(b"[]"),
        signed(b"not JSON"),
        signed(b'{"exp": 1e999, "iss": 1, "aud": 1, "sub": 1}'),
        signed(b"[" * 9000),
        signed(b'{"a":' * 2000 + b"1" + b"}" * 2000),
    ],
    ids=[str(number) for number in range(15)],
)
async def test_what_is_malformed_is_refused(known, token):
    error = await refused(known, token)
    assert (error.code, error.reason) == ("UNAUTHENTICATED", "TOKEN_INVALID")


# --- tokens that come again -------------------------------------------------------------------------------------------


async def test_a_token_that_comes_again_is_not_checked_twice(known, monkeypatch):
    token = ONE.token()
    first = await ask(known, token)
    monkeypatch.setattr("jwt.decode", lambda *_, **__: pytest.fail("checked twice"))
    again = await known.caller(authorization=f"Bearer {token}", certificate=None, peer="another")
    assert (again.subject, again.scopes, again.peer) == (first.subject, first.scopes, "another")
    assert token not in repr(vars(known._verifier))


async def test_a_token_expires_although_it_was_good_before(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE))
    known, token = authenticator(config(path, jwt_leeway=0.0)), ONE.token(exp=int(time.time()) + 1)
    assert (await ask(known, token)).subject == "render-farm"
    await asyncio.sleep(1.05)
    assert (await refused(known, token)).reason == "TOKEN_EXPIRED"


async def test_a_token_is_refused_once_its_key_is_withdrawn(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE, key("two")))
    known, token = authenticator(config(path)), ONE.token()
    known._verifier._keys._file._look_every = 0.0
    await ask(known, token)
    path.write_bytes(jwks(key("two")))
    assert (await refused(known, token)).reason == "TOKEN_KEY_UNKNOWN"


async def test_only_so_many_tokens_are_remembered(known, monkeypatch):
    monkeypatch.setattr("omni_grpc.identity.jwt.REMEMBERED", 3)
    for number in range(5):
        await ask(known, ONE.token(sub=f"s{number}"))
        await refused(known, ONE.token(aud=f"other{number}"))
    assert [each.caller.subject for each in known._verifier._checked.values()] == ["s2", "s3", "s4"]


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_a_jwks_file_is_read_again_for_a_new_key(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE))
    known, two = authenticator(config(path)), key("two")
    assert (await refused(known, two.token())).reason == "TOKEN_KEY_UNKNOWN"
    path.write_bytes(jwks(two))
    assert (await ask(known, two.token())).subject == "render-farm"
    assert (await refused(known, ONE.token())).reason == "TOKEN_KEY_UNKNOWN"


async def test_a_broken_jwks_file_leaves_the_keys(tmp_path, caplog):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE))
    known = authenticator(config(path))
    path.write_text("{")
    assert (await refused(known, key("two").token())).reason == "TOKEN_KEY_UNKNOWN"
    assert "no JWKS" in caplog.text
    assert (await ask(known, ONE.token())).subject == "render-farm"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no JWKS"),
        ("[]", "no JWKS"),
        ('{"keys": 5}', "no JWKS"),
        ("[" * 100_000, "no JWKS"),
        ('{"keys": []}', "it is empty"),
        ('{"keys": [5]}', r"keys\[0\] is no object"),
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}]}), "oct HS256.*not accepted"),
        (json.dumps({"keys": [ONE.jwk(use="enc")]}), "not for signatures"),
        (json.dumps({"keys": [ONE.jwk(key_ops=["sign"])]}), "not for signatures"),
        (json.dumps({"keys": [ONE.jwk(alg="none")]}), "not accepted"),
        (json.dumps({"keys": [ONE.jwk(alg="HS256")]}), "not accepted"),
        (json.dumps({"keys": [ONE.jwk(crv="secp256k1", alg=None)]}), "not accepted"),
        (json.dumps({"keys": [ONE.jwk(x="AAAA")]}), "not a valid key"),
        (json.dumps({"keys": [ONE.jwk(kid=5)]}), "kid"),
    ],
)
def test_keys_that_verify_nothing_are_refused(tmp_path, content, says):
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        authenticator(config(path))
    assert caught.value.violations[0].field == "jwt_jwks"


def test_a_jwks_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--jwt-jwks .*No such file"):
        authenticator(config(tmp_path / "none.json"))


def test_a_weak_key_is_refused():
    from cryptography.hazmat.primitives.asymmetric import rsa

    weak = Key("weak", "RS256", rsa.generate_private_key(public_exponent=65537, key_size=1024))
    with pytest.raises(ConfigError, match="1024 bits"):
        parse_keys(jwks(weak), "here")


def test_a_private_key_that_was_published_is_not_kept():
    import jwt

    secret = jwt.get_algorithm_by_name("ES256").to_jwk(ONE.private, as_dict=True) | {"kid": "one"}
    assert "d" in secret
    found = parse_keys(json.dumps({"keys": [secret]}).encode(), "here").find("one", "ES256")
    assert not hasattr(found.key, "private_numbers")


async def test_a_token_without_a_kid_has_the_only_key_for_it(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(ONE, key("two", "EdDSA")))
    bare = ONE.token(headers={"kid": None})
    assert (await ask(authenticator(config(path)), bare)).subject == "render-farm"
    path.write_bytes(jwks(ONE, key("two")))
    assert (await refused(authenticator(config(path)), bare)).reason == "TOKEN_KEY_UNKNOWN"


def verifier(published, **changes: float) -> TokenVerifier:
    source = AddressKeys(published.address, **changes)
    return TokenVerifier(source, issuer=ISSUER, audience=AUDIENCE, tenant_claim="tenant", leeway=60)


async def test_rotated_keys_are_fetched_for_a_new_kid():
    two = key("two")
    with publishing(ONE) as published:
        known = verifier(published, fetch_again=0)
        assert (await known.caller(ONE.token(), "")).subject == "render-farm"
        published.body = jwks(two)
        assert (await known.caller(two.token(), "")).subject == "render-farm"
        with pytest.raises(Unauthenticated):
            await known.caller(ONE.token(), "")


async def test_unknown_keys_do_not_hammer_the_issuer():
    with publishing(ONE) as published:
        known = verifier(published)
        for number in range(50):
            with pytest.raises(Unauthenticated):
                await known.caller(key(f"made-up-{number}").token(), "")
        assert (await known.caller(ONE.token(), "")).subject == "render-farm"
        assert published.asked == 1


async def test_calls_at_once_share_one_fetch_and_the_loop_goes_on():
    with publishing(ONE) as published:
        known, token = verifier(published), ONE.token()
        published.gate.clear()
        calls = [asyncio.create_task(known.caller(token, "")) for _ in range(20)]
        for _ in range(10):
            await asyncio.sleep(0.01)  # the loop is free while the issuer does not answer
        assert not any(call.done() for call in calls)
        published.gate.set()
        assert {caller.subject for caller in await asyncio.gather(*calls)} == {"render-farm"}
        assert published.asked == 1


async def test_a_call_that_is_cancelled_does_not_end_the_fetch_of_others():
    with publishing(ONE) as published:
        known, token = verifier(published), ONE.token()
        published.gate.clear()
        first, second = (asyncio.create_task(known.caller(token, "")) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        published.gate.set()
        assert (await second).subject == "render-farm"


@pytest.mark.parametrize("broken", ["status", "body", "large", "redirect"])
async def test_without_keys_a_call_may_be_tried_again(broken, caplog):
    with publishing(ONE) as published:
        published.status = {"status": 503, "redirect": 302}.get(broken, 200)
        published.body = {"body": b"<html>", "large": b" " * (2 << 20)}.get(broken, published.body)
        published.headers = {"Location": "http://169.254.169.254/keys"} if broken == "redirect" else {}
        with pytest.raises(Unavailable) as caught:
            await verifier(published).caller(ONE.token(), "")
        assert caught.value.reason == "JWKS_UNAVAILABLE"
        assert caught.value.failure.retry_after == 10
        assert "cannot fetch the keys" in caplog.text


async def test_keys_stay_where_the_issuer_is_gone():
    with publishing(ONE) as published:
        known = verifier(published, refresh_every=0.01, fetch_again=0)
        await known.caller(ONE.token(), "")
    for _ in range(3):
        await asyncio.sleep(0.03)
        assert (await known.caller(ONE.token(), "")).subject == "render-farm"


async def test_a_key_that_was_withdrawn_is_not_good_after_a_pause():
    with publishing(ONE) as published:
        known = verifier(published, refresh_every=0.05, fetch_again=0)
        await known.caller(ONE.token(), "")
        published.body = jwks(key("two"))
        await asyncio.sleep(0.2)
        with pytest.raises(Unauthenticated):
            await known.caller(ONE.token(), "")


async def test_keys_are_renewed_beside_the_calls():
    with publishing(ONE) as published:
        known = verifier(published, refresh_every=0.2, fetch_again=0)
        await known.caller(ONE.token(), "")
        await asyncio.sleep(0.22)
        published.gate.clear()  # a call does not wait for the second fetch
        async with asyncio.timeout(1):
            await known.caller(ONE.token(), "")
        published.gate.set()


async def test_the_keys_can_be_fetched_before_the_first_call(caplog):
    with publishing(ONE) as published:
        known = authenticator(config(published.address))
        await known.prepare()
        assert published.asked == 1
        await ask(known, ONE.token())
        assert published.asked == 1
    await authenticator(config(published.address)).prepare()
    assert "cannot fetch the keys" in caplog.text


# --- secrets ----------------------------------------------------------------------------------------------------------


async def test_no_failure_shows_the_token(known, caplog):
    caplog.set_level(logging.DEBUG)
    tokens = [
        ONE.token(exp=NOW - 900),
        ONE.token(nbf=NOW + 900),
        ONE.token(aud="other"),
        ONE.token(iss="other"),
        ONE.token(sub=None),
        ONE.token(tenant="a\nb"),
        key("two").token(),
        Key("one", "ES256", key().private).token(),
        with_header(alg="none"),
        ONE.token() + "x" * 20_000,
        "secret-that-is-no-token",
    ]
    for token in tokens:
        error = await refused(known, token)
        logging.getLogger("test").exception("refused", exc_info=error)
        shown = caplog.text + repr(error) + repr(error.failure) + repr(known)
        for part in token.split("."):
            assert part[:60] not in shown
