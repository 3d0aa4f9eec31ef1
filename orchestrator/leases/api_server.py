"""Calls of a Kubernetes API server by the official client, with time limits and errors of ours.

Server, certificates and credentials are read by that client alone (the extra `kubernetes`, imported when the first pool
of pods is made): the kubeconfig, or in a pod its service account.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError, TransportError, UnreachableError
from orchestrator.tables.faults import did_you_mean
from orchestrator.transport.exec.api_errors import no_credentials, refusal, unreached

CONNECT_S, CALL_S = 5.0, 20.0
KEEPALIVE = tuple(
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
)
"""Socket options: a connection on which nothing comes back is gone after some 10 s."""


def connect(context: str | None) -> tuple[Any, str]:
    """(the official client's ApiClient, namespace of the context). Raises InputError with the way out."""
    try:
        import urllib3
        import websockets  # noqa: F401  of exec
        from kubernetes import client, config
        from kubernetes.config import incluster_config
    except ImportError as e:
        way = "pip install 'gemmfleet[kubernetes]'"
        raise InputError(f"nodes with `lease: kubernetes` need the package kubernetes ({e}): {way}") from e
    settings = client.Configuration()
    settings.retries = False
    settings.socket_options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *KEEPALIVE,
    ]  # fmt: skip
    file = os.environ.get("KUBECONFIG") or None
    try:
        if context is None and file is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            place = Path(incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace")
            namespace = place.read_text().strip() if place.is_file() else ""
        else:
            contexts, active = config.list_kube_config_contexts(config_file=file)
            known = {c["name"]: c for c in contexts}
            if context is not None and context not in known:
                raise InputError(
                    f"the kubeconfig has no context {context}{did_you_mean(context, known)} "
                    f"(it has: {', '.join(sorted(known)) or 'none'}; `kubectl config get-contexts`)"
                )
            namespace = ((known[context] if context else active)["context"] or {}).get("namespace") or ""
            config.load_kube_config(file, context, settings, persist_config=False)
    except InputError:
        raise
    except Exception as e:  # the client raises many kinds for a file that is no kubeconfig
        where = file or "~/.kube/config"
        raise InputError(f"the kubeconfig {where} cannot be used ({e}): set KUBECONFIG, or `context:`") from e
    if not settings.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # `check` says so
    return client.ApiClient(settings), namespace or "default"


class ApiServer:
    """The API server of a context, called for a pool."""

    def __init__(self, pool: str, context: str | None) -> None:
        """Read the configuration; no request yet. Raises InputError."""
        self._pool = pool
        self.api, self.namespace = connect(context)

    def unreached(self, e: BaseException) -> TransportError:
        """Error for a call that did not get there."""
        return unreached(self._pool, self.api.configuration.host, e)

    def call(self, call: Callable[..., Any], *args: Any, seconds: float = CALL_S, **options: Any) -> Any:
        """The result of a call, of which twice is as good as once. Raises TransportError."""
        import urllib3
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException

        for last in (False, True):
            try:
                return call(*args, **options, _request_timeout=(CONNECT_S, seconds))
            except ApiException as e:
                if not e.status:  # the client's word for errors of TLS
                    raise self.unreached(e) from e
                raise refusal(self._pool, e.status, e.body or e.reason or "") from e
            except ConfigException as e:
                raise no_credentials(self._pool, e) from e
            except (urllib3.exceptions.HTTPError, OSError) as e:
                if last or isinstance(e, urllib3.exceptions.TimeoutError):
                    raise self.unreached(e) from e
            except (ValueError, TypeError) as e:  # of a proxy, say
                words = f"the answer is none of an API server ({type(e).__name__}: {str(e).partition(chr(10))[0]})"
                raise UnreachableError(self._pool, words) from e
        raise AssertionError


@contextlib.contextmanager
def tolerating(status: int) -> Iterator[None]:
    """Let the API server's answers of one status pass."""
    try:
        yield
    except TransportError as e:
        if status_of(e) != status:
            raise


def status_of(e: BaseException) -> int | None:
    """HTTP status of the answer that an error is made of."""
    return getattr(e.__cause__, "status", None)
