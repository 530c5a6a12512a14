"""The JSON that MOONCAKE_CONFIG_PATH names, read before anything heavy is: is it one, and do its servers
answer? Standard library only. What else is in it is Mooncake's and vLLM's to judge."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from singleflight.files import shown, strict

GIVE = "give the JSON that MOONCAKE_CONFIG_PATH names"
ANSWER_S = 3.0
"""How long a server may take to accept a connection."""
TEXTS = ("metadata_server", "master_server_address", "protocol", "device_name")


class MooncakeJsonError(ValueError):
    """It cannot be used; one sentence."""


@dataclass(frozen=True)
class MooncakeJson:
    """Attributes: the file's `path`; `master` and `metadata`, the addresses in it as they stand there."""

    path: Path
    master: str
    metadata: str

    def silent(self) -> str | None:
        """Which of its servers does not answer, and where, a sentence without a final stop; None if all do.

        Addresses of other services (etcd, redis) are not asked, nor is P2PHANDSHAKE, which is none.
        """
        where = shown.path(self.path)
        if "://" not in self.master and (why := _refused(self.master)) is not None:
            return (
                f"no Mooncake master answers at {shown.text(self.master)} ({why}), which {where} names;"
                " start mooncake_master there, or correct master_server_address"
            )
        if self.metadata.startswith(("http://", "https://")):
            split = urlsplit(self.metadata)
            if (why := _refused(split.netloc, 443 if split.scheme == "https" else 80)) is not None:
                return (
                    f"no metadata server answers at {shown.text(self.metadata)} ({why}), which {where} names;"
                    " start mooncake_master with --enable_http_metadata_server=true, or correct the address"
                )
        return None


def read(path: Path) -> MooncakeJson:
    """Read the file.

    Raises:
        MooncakeJsonError: it is no JSON object, or an address in it is missing or none.
    """
    try:
        document = strict.document_in(path)
    except strict.Refused as fault:
        raise MooncakeJsonError(f"{str(fault).rpartition('; give ')[0]}; {GIVE}") from None
    where = shown.path(path)
    for key in TEXTS:
        value = document.get(key, "")
        if type(value) is not str or not strict.is_unicode(value):
            raise MooncakeJsonError(f"{where}: {key}: {shown.as_json(value)} is not accepted; give a text")
    master, metadata = document.get("master_server_address", ""), document.get("metadata_server", "")
    if not master:
        raise MooncakeJsonError(
            f"{where}: master_server_address: is missing; give HOST:PORT of mooncake_master"
        )
    try:
        wrong = "://" not in master and _host_port(master) is None
    except ValueError:
        wrong = True
    if wrong:
        raise MooncakeJsonError(
            f"{where}: master_server_address: {shown.as_json(master)} is not accepted; give HOST:PORT"
        )
    try:
        urlsplit(metadata).port  # noqa: B018 - a property that may raise
    except ValueError:
        raise MooncakeJsonError(
            f"{where}: metadata_server: {shown.as_json(metadata)} is not accepted; give a URL or P2PHANDSHAKE"
        ) from None
    return MooncakeJson(path, master, metadata)


def _host_port(address: str, default: int | None = None) -> tuple[str, int] | None:
    split = urlsplit(f"//{address}")
    port = split.port or default
    return (split.hostname, port) if split.hostname and port else None


def _refused(address: str, default: int | None = None) -> str | None:
    """Why nobody can be reached there; None if somebody can."""
    try:
        found = _host_port(address, default)
        if found is None:
            return "no host and port"
        socket.create_connection(found, ANSWER_S).close()
    except TimeoutError:
        return f"not within {ANSWER_S:g} s"
    except (OSError, ValueError) as fault:  # ValueError: a name that IDNA cannot encode
        return shown.text(getattr(fault, "strerror", None) or fault, 100)
    return None
