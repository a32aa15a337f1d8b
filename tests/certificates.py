"""Certificates for tests: an authority, and what it signs, good and bad. Written as the PEM files that a user has."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ft_core.certificates import Tls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.x509.oid import ObjectIdentifier

LOCALHOST = ("127.0.0.1", "localhost")
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Signed:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, passphrase: bytes = b"") -> bytes:
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            how = serialization.BestAvailableEncryption(passphrase)
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


class Authority:
    """Signs certificates.

    Args:
        name: of the authority.
        days: from now on, for which it is valid; less than 0: it has expired.
    """

    def __init__(self, name: str = "the job's CA", days: float = 2) -> None:
        self.own = _make(name, None, (), days, ca=True)

    def sign(
        self, names: Sequence[str] = LOCALHOST, days: float = 2, begins: float = -1,
        usage: Sequence[ObjectIdentifier] = (),
    ) -> Signed:  # fmt: skip
        """A certificate for these names and addresses."""
        return _make("a replica", self.own, names, days, begins=begins, usage=usage)

    def files(self, folder: Path, names: Sequence[str] = LOCALHOST, days: float = 2) -> Tls:
        """A new certificate by this authority, in files."""
        signed = self.sign(names, days)
        return write(folder, signed.pem, signed.key_pem(), self.own.pem)


def alone(names: Sequence[str] = LOCALHOST, days: float = 2) -> Signed:
    """A certificate that has signed itself."""
    return _make("a job", None, names, days)


def write(folder: Path, cert: bytes, key: bytes, ca: bytes = b"") -> Tls:
    """Put them into the files of `folder`, each at once, as a careful administrator does."""
    folder.mkdir(exist_ok=True)
    for name, data in (("cert.pem", cert), ("key.pem", key), ("ca.pem", ca)):
        partial = folder / f"{name}.new"
        partial.write_bytes(data)
        os.replace(partial, folder / name)
    return Tls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if ca else "")


def environment(tls: Tls) -> dict[str, str]:
    """FT_TLS_* that name these files."""
    named = {"FT_TLS_CERT": tls.cert, "FT_TLS_KEY": tls.key, "FT_TLS_CA": tls.ca}
    return {name: path for name, path in named.items() if path}


def _make(
    name: str, signer: Signed | None, names: Sequence[str], days: float, *, begins: float = -1, ca: bool = False,
    usage: Sequence[ObjectIdentifier] = (),
) -> Signed:  # fmt: skip
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + min(begins, days - 1) * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        # As openssl does: of two CAs of one name, the right one is found by them.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key((signer.key if signer else key).public_key()),
            critical=False,
        )
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(one) for one in names]), critical=False)
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(usage)), critical=False)
    return Signed(builder.sign(key if signer is None else signer.key, hashes.SHA256()), key)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)
