"""Tokens of a file, certificates, and what both have in common."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from omni_grpc.cli import token as command
from omni_grpc.config import IdentityConfig
from omni_grpc.identity import authenticator, certificates, tokens
from omni_grpc.identity.files import Reloaded
from omni_grpc.identity.records import read_records
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import ConfigError, InvalidArgument, NotFound, Unauthenticated

from .keys import AUDIENCE, ISSUER, pair

NOW = datetime.datetime.now(datetime.UTC)
BOTH = frozenset({Scope.GENERATE, Scope.READ})
HASH = "0" * 64


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens.yaml"


@pytest.fixture
def token(file) -> str:
    """A token of the file."""
    return add(file)


def add(file, **changes) -> str:
    values = {"tenant": "studio", "subject": "farm", "scopes": BOTH, "expires": None, "now": NOW} | changes
    return tokens.add(file, **values)[0]


def known_by(file, **changes):
    return authenticator(IdentityConfig(token_file=str(file), **changes))


async def ask(known, token: str | None, certificate: str | None = None) -> Caller:
    authorization = None if token is None else f"Bearer {token}"
    return await known.caller(authorization=authorization, certificate=certificate, peer="unix:")


async def reason(known, token: str | None, certificate: str | None = None) -> str:
    with pytest.raises(Unauthenticated) as caught:
        await ask(known, token, certificate)
    return caught.value.reason


async def test_a_token_is_its_record(file, token):
    caller = await ask(known_by(file), token)
    assert caller == Caller(tenant="studio", subject="farm", scopes=BOTH, peer="unix:")


async def test_the_file_has_the_hash_alone(file, token):
    assert len(token) == 48
    assert token.startswith("omni_")
    text = file.read_text()
    assert token not in text
    assert hashlib.sha256(token.encode()).hexdigest() in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_without_identities_everybody_is_everybody():
    known = authenticator(IdentityConfig())
    assert not known.on
    assert await known.caller(authorization="Bearer x", certificate="y", peer="ipv4:1.2.3.4:5") == Caller(
        peer="ipv4:1.2.3.4:5"
    )


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (None, "TOKEN_MISSING"),
        ("", "TOKEN_INVALID"),
        ("Bearer", "TOKEN_INVALID"),
        ("Bearer ", "TOKEN_INVALID"),
        ("Basic dXNlcjpwYXNz", "TOKEN_INVALID"),
        ("Bearer omni_", "TOKEN_INVALID"),
        ("Bearer omni_" + "A" * 43, "TOKEN_INVALID"),
        ("Bearer omni_" + "A" * 43 + "\n", "TOKEN_INVALID"),
        ("Bearer omni_" + "\u00e9" * 43, "TOKEN_INVALID"),
        ("Bearer omni_a omni_b", "TOKEN_INVALID"),
        ("Bearer " + HASH, "TOKEN_INVALID"),
        ("Bearer " + "x" * 1_000_000, "TOKEN_INVALID"),
        ("x" * 1_000_000, "TOKEN_INVALID"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_header_that_names_nobody_has_a_reason(file, token, authorization, expected):
    with pytest.raises(Unauthenticated) as caught:
        await known_by(file).caller(authorization=authorization, certificate=None, peer="")
    assert caught.value.reason == expected
    assert len(str(caught.value)) < 200


async def test_a_long_token_is_not_looked_at(file, token, monkeypatch):
    known = known_by(file)
    monkeypatch.setattr(tokens, "find", lambda *_: pytest.fail("looked at"))
    assert await reason(known, "omni_" + "x" * (16 << 10)) == "TOKEN_INVALID"


async def test_the_scheme_may_have_any_case(file, token):
    for scheme in ("bearer", "BEARER", "Bearer "):
        caller = await known_by(file).caller(authorization=f"{scheme} {token}", certificate=None, peer="")
        assert caller.subject == "farm"


async def test_a_secret_that_is_no_token_of_ours_is_refused_even_with_its_hash(file):
    """So that nobody puts the hash of a password there, which can be guessed."""
    secret = "correct horse".replace(" ", "-")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    file.write_text(f"- name: a\n  tenant: t\n  scopes: [read]\n  sha256: {digest}\n")
    assert await reason(known_by(file), secret) == "TOKEN_INVALID"


async def test_an_expired_token_is_refused_by_name(file):
    past = add(file, expires=NOW - datetime.timedelta(seconds=1))
    soon = add(file, subject="soon", expires=NOW + datetime.timedelta(hours=1))
    with pytest.raises(Unauthenticated, match="'farm' expired") as caught:
        await ask(known_by(file), past)
    assert caught.value.reason == "TOKEN_EXPIRED"
    assert (await ask(known_by(file), soon)).subject == "soon"


# --- the file changes -------------------------------------------------------------------------------------------------


def at_once(file):
    """An authenticator that looks at its file at every call."""
    known = known_by(file)
    known._records._look_every = 0.0
    return known


async def test_a_change_of_the_file_is_seen(file, token):
    known = at_once(file)
    second = add(file, subject="other", scopes=frozenset({Scope.ADMIN}))
    assert (await ask(known, second)).admin
    tokens.remove(file, "farm")
    assert await reason(known, token) == "TOKEN_INVALID"
    assert (await ask(known, second)).subject == "other"


async def test_a_revoked_token_is_refused_to_all_that_come_after(file, token):
    """Also to those that come while the file is read again."""
    known = at_once(file)
    await ask(known, token)
    tokens.remove(file, "farm")
    assert set(await asyncio.gather(*(reason(known, token) for _ in range(20)))) == {"TOKEN_INVALID"}


async def test_no_call_is_lost_while_the_file_changes(file, token):
    known = at_once(file)
    with ThreadPoolExecutor() as threads:
        for number in range(5):
            making = [threads.submit(add, file, subject=f"{number}-{each}") for each in range(3)]
            while not all(made.done() for made in making):
                assert (await ask(known, token)).subject == "farm"
                await asyncio.sleep(0)
    assert len(read_records(file).all) == 16, "and no writer lost a record of another"


BROKEN = {
    "": "has no records",
    "a: [": "not valid YAML",
    "name: x": "expected a list of records",
    "- x": "tokens.yaml:1: expected a record",
    "- name: a\n  tenant: t\n  scopes: [reed]\n  sha256: " + HASH: "tokens.yaml:3: scopes: 'reed' is not one of",
    "- name: a\n  tenant: t\n  scopes: []\n  sha256: " + HASH: "tokens.yaml:3: scopes",
    "- name: a\n  tenant: t\n  scopes: [read]\n  sha256: omni_secret": "tokens.yaml:4: sha256: expected the 64",
    "- name: a\n  tenant: t\n  scopes: [read]\n  sha265: " + HASH: "tokens.yaml:4: sha265: .*did you mean sha256",
    "- name: a\n  tenant: t\n  scopes: [read]": "tokens.yaml:1: needs one of sha256 and certificate",
    "- name: a\n  scopes: [read]\n  sha256: " + HASH: "tokens.yaml:1: tenant: is required",
    "- name: a\n  name: b\n  tenant: t": "tokens.yaml:2: name: given twice",
    "- name: a\n  tenant:\n  scopes: [read]\n  sha256: " + HASH: "tokens.yaml:2: tenant: expected 1 to 256",
    "- name: [a]\n  tenant: t\n  scopes: [read]\n  sha256: " + HASH: "tokens.yaml:1: name: expected text",
    "- name: a\n  tenant: t\n  scopes: read\n  expires: soon\n  sha256: "
    + HASH: "tokens.yaml:4: expires: expected a date",
    f"- name: a\n  tenant: t\n  scopes: read\n  sha256: {HASH}\n" * 2: "tokens.yaml:5: name: the same",
    "".join(f"- name: {n}\n  tenant: t\n  scopes: read\n  sha256: {HASH}\n" for n in "ab"): "5: sha256: the same",
    "[" * 3000: "not valid YAML",
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: BROKEN[text])
async def test_a_broken_file_is_refused_at_the_start_and_passed_over_later(file, token, text, caplog):
    known = at_once(file)
    file.write_text(text)
    assert (await ask(known, token)).subject == "farm"
    assert (await ask(known, token)).subject == "farm"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1, "it is told once"
    with pytest.raises(ConfigError, match=BROKEN[text]) as caught:
        known_by(file)
    assert caught.value.violations[0].field == "token_file"
    assert str(caught.value) in caplog.text
    assert "omni_secret" not in caplog.text
    add_back = f"- name: b\n  tenant: t\n  scopes: read\n  sha256: {tokens.hash_of(token)}\n"
    file.write_text(add_back)
    assert (await ask(known, token)).subject == "b"


async def test_a_file_that_goes_leaves_the_tokens(file, token, caplog):
    known = at_once(file)
    file.unlink()
    assert (await ask(known, token)).subject == "farm"
    assert "No such file" in caplog.text
    with pytest.raises(ConfigError, match="omni-grpc token new"):
        known_by(file)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
async def test_a_file_that_others_may_write_is_refused(file, token, mode, caplog):
    known = at_once(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:o}.*chmod go-w"):
        known_by(file)
    assert (await ask(known, token)).subject == "farm"
    assert "chmod go-w" in caplog.text
    file.chmod(0o644)
    second = add(file, subject="other")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644, "the mode stays"
    assert (await ask(known, second)).subject == "other"


async def test_a_link_is_followed_and_stays(file, token, tmp_path):
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    known = at_once(link)
    second = add(link, subject="other")
    assert link.is_symlink()
    assert (await ask(known, second)).subject == "other"


async def test_a_second_look_waits_for_its_time(file, token):
    looked = Reloaded(file, read_records, look_every=3600)
    tokens.remove(file, "farm")
    assert len((await looked.current()).all) == 1
    assert len((await looked.current(look=True)).all) == 0


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    try:
        return command.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


NEW = ("new", "--tenant", "studio", "--subject", "farm", "--scopes", "generate,read")


async def test_the_command_prints_the_token_once(file, capsys):
    assert run(*NEW, "--expires", "30d", "--file", file) == 0
    shown = capsys.readouterr()
    token = shown.out.strip()
    assert shown.out == f"{token}\n"
    assert token not in shown.err
    assert "farm of tenant studio (generate, read) expires" in shown.err
    assert (await ask(known_by(file), token)).scopes == BOTH
    (record,) = read_records(file).all
    # not NOW, which is of when the file was read: a long suite comes here much later
    left = record.expires - datetime.datetime.now(datetime.UTC)
    assert abs(left - datetime.timedelta(days=30)) < datetime.timedelta(minutes=5)
    assert run("list", "--file", file) == 0
    listed = capsys.readouterr().out
    assert "farm" in listed
    assert token not in listed
    assert record.sha256 not in listed


def test_tokens_of_a_subject_are_numbered_and_revoked_by_name(file, capsys):
    for _ in range(3):
        assert run(*NEW, "--file", file) == 0
    assert [record.name for record in read_records(file).all] == ["farm", "farm-2", "farm-3"]
    assert run(*NEW, "--name", "farm-2", "--file", file) == 1
    assert "name: the same" in capsys.readouterr().err
    assert run("revoke", "farm-2", "--file", file) == 0
    assert [record.name for record in read_records(file).all] == ["farm", "farm-3"]
    assert run("revoke", "farm-2", "--file", file) == 1
    assert "no record 'farm-2'; it has farm, farm-3" in capsys.readouterr().err


def test_comments_and_other_records_stay(file):
    by_hand = (
        "# who may call\n"
        "- name: one # the first\n  tenant: t\n  scopes: [read]\n  sha256: " + HASH + "\n\n"
        "# of the gateway\n"
        "- {name: two, tenant: t, scopes: admin, certificate: 'DNS:gateway'}"
    )
    file.write_text(by_hand)
    file.chmod(0o600)
    add(file, subject="three")
    assert file.read_text().startswith(by_hand)
    tokens.remove(file, "one")
    assert file.read_text().startswith("# who may call\n\n# of the gateway\n- {name: two,")
    tokens.remove(file, "two")
    tokens.remove(file, "three")
    assert file.read_text() == "# who may call\n\n# of the gateway\n[]\n"
    add(file, subject="four")
    assert [record.name for record in read_records(file).all] == ["four"]


def test_a_file_in_another_form_is_left_as_it_is(file):
    first = f"{{name: a, tenant: t, scopes: read, sha256: '{HASH}'}}"
    text = f"[{first},\n{{name: b, tenant: t, scopes: read, certificate: x}}]"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="remove lines 1 to 1"):
        tokens.remove(file, "a")
    with pytest.raises(ConfigError, match="not valid YAML"):
        add(file)
    with pytest.raises(NotFound):
        tokens.remove(file, "c")
    assert file.read_text() == text
    assert os.listdir(file.parent) == [file.name], "nothing is left beside it"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scopes", "write"), "'write' is not one of generate, read, admin"),
        (("--scopes", ""), "is not one of"),
        (("--expires", "30"), "expected 30d"),
        (("--expires", "0d"), "expected 30d"),
        (("--expires", "9999999d"), "is not a time"),
        (("--expires", "2020-01-01"), "has passed"),
        (("--tenant", ""), "is not a name"),
        (("--subject", "a\nb"), "is not a name"),
    ],
)
def test_a_wrong_argument_makes_no_token(file, capsys, arguments, says):
    assert run(*NEW, "--file", file, *arguments) == 2
    assert says in capsys.readouterr().err
    assert not file.exists()


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert run(*NEW, "--file", tmp_path / "none" / "tokens.yaml") == 1
    assert "none: there is no such file or folder" in capsys.readouterr().err


# --- certificates -----------------------------------------------------------------------------------------------------

CA = trustme.CA()
CERTIFICATE = CA.issue_cert("gateway.studio", "ops@studio.example", "10.0.0.1", common_name="gateway")
PEM = CERTIFICATE.cert_chain_pems[0].bytes().decode()


def by_certificate(file, name: str, **more: str):
    lines = "".join(f"  {key}: {value}\n" for key, value in more.items())
    file.write_text(f"- name: gateway\n  tenant: studio\n  scopes: [generate]\n  certificate: '{name}'\n{lines}")
    return known_by(file)


def test_the_names_of_a_certificate(tmp_path, capsys):
    names = certificates.names(PEM)
    assert names[:3] == ("DNS:gateway.studio", "EMAIL:ops@studio.example", "IP:10.0.0.1")
    assert names[3].startswith("CN=gateway,OU=Testing cert")
    path = tmp_path / "gateway.pem"
    path.write_text(PEM)
    assert run("names", path) == 0
    assert capsys.readouterr().out.splitlines() == list(names)
    path.write_text("no certificate")
    assert run("names", path) == 1
    with pytest.raises(InvalidArgument):
        certificates.names("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize("number", range(4))
async def test_a_certificate_is_known_by_each_of_its_names(file, number):
    known = by_certificate(file, certificates.names(PEM)[number])
    caller = await ask(known, None, PEM)
    assert (caller.tenant, caller.subject, caller.scopes) == ("studio", "gateway", {Scope.GENERATE})


@pytest.mark.parametrize("name", ["gateway", "CN=gateway", "DNS:studio", "DNS:*.studio", "URI:gateway.studio"])
async def test_a_part_of_a_name_is_not_enough(file, name):
    assert await reason(by_certificate(file, name), None, PEM) == "CERTIFICATE_UNKNOWN"


async def test_a_bad_token_is_not_made_good_by_a_certificate(file):
    known = by_certificate(file, "DNS:gateway.studio")
    assert await reason(known, "omni_" + "A" * 43, PEM) == "TOKEN_INVALID"
    assert await reason(known, None, "no certificate") == "CERTIFICATE_UNKNOWN"
    assert await reason(known, None) == "TOKEN_MISSING"


async def test_a_certificate_can_expire_before_its_own_date(file):
    assert await reason(by_certificate(file, "DNS:gateway.studio", expires="2020-01-01"), None, PEM) == (
        "CERTIFICATE_EXPIRED"
    )


# --- both kinds of tokens ---------------------------------------------------------------------------------------------


async def test_tokens_of_a_file_and_of_an_issuer_work_side_by_side(file, token, tmp_path):
    signed, path = pair(tmp_path)
    known = known_by(file, jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks=str(path))
    assert (await ask(known, token)).subject == "farm"
    assert (await ask(known, signed)).subject == "render-farm"
    assert await reason(known, "omni_" + "A" * 43) == "TOKEN_INVALID"
    assert await reason(known, "x") == "TOKEN_INVALID"


async def test_no_failure_shows_the_token(file, token, caplog):
    caplog.set_level(logging.DEBUG)
    known = at_once(file)
    expired = add(file, subject="old", expires=NOW - datetime.timedelta(days=1))
    for given in (token[:-1], token + "A", "omni_" + "B" * 43, expired, f"{token} {token}", token + "\u00e9"):
        with pytest.raises(Unauthenticated) as caught:
            await ask(known, given)
        logging.getLogger("test").exception("refused", exc_info=caught.value)
        shown = caplog.text + repr(caught.value) + repr(caught.value.failure) + repr(known)
        assert given[:20] not in shown
    assert tokens.hash_of(token) not in repr(read_records(file))
