"""Answers of a Kubernetes API server, and failures to reach it, as errors with the way out."""

from __future__ import annotations

import contextlib
import json
import re
import ssl

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError


def refusal(node: str, status: int, words: str) -> TransportError:
    """Error for an answer of the API server; `words`: its message, or the JSON that holds it."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        words = str(json.loads(words)["message"])
    words = words.strip()[-1000:] or "it gave no reason"
    if status == 401:
        return LoginError(node, f"the API server does not know this user ({words}): log in again, or see `context:`")
    if status == 404:
        return UnreachableError(node, words, transient=False)
    if 400 <= status < 429:
        return TransportError(node, words)
    return UnreachableError(node, f"the API server answered {status}: {words}")


def unreached(node: str, server: str, e: BaseException) -> TransportError:
    """Error for a connection to the API server that did not come about."""
    at: BaseException | None = e
    words = re.sub(r"^\w+\(host=[^)]*\): ", "", str(e))
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            why = getattr(at, "verify_message", "") or str(at)
            way = "see `certificate-authority` in your kubeconfig"
            return HostKeyError(node, f"the certificate of the API server {server} is not trusted ({why}): {way}")
        words = getattr(at, "strerror", None) or words
        reason = getattr(at, "reason", None)  # urllib3's
        at = reason if isinstance(reason, BaseException) else at.__cause__ or at.__context__
    return UnreachableError(node, f"the API server {server} cannot be reached ({words})")


def no_credentials(node: str, e: BaseException) -> TransportError:
    """Error for a kubeconfig whose credentials the client cannot get."""
    return LoginError(node, f"the kubeconfig's credentials cannot be had ({e})")
