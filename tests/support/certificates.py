"""Tests make certificates with openssl: of an authority, a server and a client."""

import subprocess
from pathlib import Path

from support.programs import system_program
from support.waiting import PATIENCE_S

__all__ = ["Authority", "key_store"]


class Authority:
    """Signs certificates for one day; needs openssl."""

    def __init__(self, directory: Path, name: str) -> None:
        system_program("openssl", "openssl")
        self._directory = directory
        self.certificate = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        self._openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
            # Python 3.13 refuses an authority without a stated use of its key.
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def sign(self, name: str, alternative_names: str) -> tuple[Path, Path]:
        """Sign a certificate for ``name``; return the files of the certificate and of its private key."""
        request, key, certificate, extensions = (
            self._directory / f"{name}.{suffix}" for suffix in ("csr", "key", "pem", "ext")
        )
        self._openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", str(key), "-out", str(request)),
        )
        extensions.write_text(
            f"subjectAltName={alternative_names}\n"
            "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\nkeyUsage=critical,digitalSignature\n"
        )
        self._openssl(
            *("x509", "-req", "-days", "1", "-in", str(request), "-out", str(certificate)),
            *("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-extfile", str(extensions)),
        )
        return certificate, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], check=True, capture_output=True, cwd=self._directory, timeout=PATIENCE_S
        )


def key_store(directory: Path, certificate: Path, key: Path) -> Path:
    """Write the certificate and the key to one file, as a Kafka broker expects."""
    store = directory / f"{certificate.stem}-store.pem"
    store.write_text(key.read_text() + certificate.read_text())
    return store
