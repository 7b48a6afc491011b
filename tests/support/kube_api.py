"""As much of the API of Kubernetes as a kubelet and the tests need."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

_PATHS = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs", "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Pod": "/api/v1/namespaces/{}/pods", "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services", "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1beta1/namespaces/{}/poddisruptionbudgets",
    "Node": "/api/v1/nodes", "Namespace": "/api/v1/namespaces",
}  # fmt: skip


class ApiError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """At *port* of this machine, with the *token* of an administrator. Each call has a connection of its own."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE  # it has made its own

    def __call__(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer. Raises `ApiError`, and OSError if there is none."""
        line = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=10)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
            line.request(method, path, None if body is None else json.dumps(body), headers)
            answer = line.getresponse()
            text = answer.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(str(error)) from None
        finally:
            line.close()
        if answer.status >= 400:
            raise ApiError(answer.status, text[:2000])
        try:
            return json.loads(text)
        except ValueError:
            return text

    def patch_status(self, path: str, status: dict[str, Any]) -> None:
        self("PATCH", f"{path}/status", {"status": status}, "application/strategic-merge-patch+json")


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Of one object, or of all of a kind."""
    return _PATHS[kind].format(namespace) + (f"/{name}" if name else "")
