"""Stand-in for the kubelets of a few nodes, which cannot run here; the rest is real (tests/support/kube.py).

A pod is a process of this machine with a folder of its own, which goes with it; its image is not looked at. It beats
for its nodes, runs, stops and reports pods as a kubelet does (grace period, activeDeadlineSeconds, folder of the
container gone with the pod), and answers what the API server hands on: exec over WebSocket (v4.channel.k8s.io) and the
log. Like containerd it ends the input of a command whose connection broke, and does not kill it.

    python -m tests.standins.kubelet CONFIG

CONFIG is a JSON file (`Settings`). Faults come as lines on standard input, each answered by a line:

    kill NODE      its processes are gone, it beats no more, connections break
    revive NODE    it is back; after `kill`, its pods have failed
    evict POD      as under memory pressure
    cut POD        the connections of exec break
    freeze POD     the connections of exec carry nothing any more
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from kubernetes import client, watch

BEAT_S = 1.0
RETRY_S = 0.3
NOT_YET = (401, 403, 429)
"""Refusals of an API server that has just started, and not read its roles yet."""
MARK = "STANDIN_POD"
"""Variable in the environment of every process of a pod: its uid."""
POD_ENV = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "HOME")
"""Variables that pods have of this process."""


@dataclass(frozen=True)
class Settings:
    server: str
    ca: str
    token: str
    certificate: str
    """Certificate and key of the nodes, for 127.0.0.1."""
    folder: str
    nodes: dict[str, int]
    """Name -> port."""
    gpus: int
    resource: str = "amd.com/gpu"


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(eq=False)
class Node:
    name: str
    port: int
    down: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Pod:
    """A pod bound to one of the nodes."""

    spec: dict[str, Any]
    node: Node
    folder: Path
    process: asyncio.subprocess.Process | None = None
    gpus: list[int] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    fault: tuple[str, str, str] | None = None
    """Reason and message of the pod, reason of the container."""
    connections: set[asyncio.Transport] = field(default_factory=set)
    frozen: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.spec["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.spec["metadata"]["uid"])

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.spec["metadata"]

    @property
    def container(self) -> dict[str, Any]:
        return dict(self.spec["spec"]["containers"][0])

    @property
    def grace_s(self) -> float:
        given = self.spec["metadata"].get("deletionGracePeriodSeconds")
        return float(given if given is not None else self.spec["spec"].get("terminationGracePeriodSeconds", 30))


def kill_all(uid: str) -> None:
    """SIGKILL to every process of a pod, until there is none."""
    mark = f"{MARK}={uid}".encode()
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if (
                    mark in (entry / "environ").read_bytes().split(b"\0")
                    and b") Z " not in (entry / "stat").read_bytes()
                ):
                    found.append(int(entry.name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Kubelets:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        configuration = client.Configuration()
        configuration.host, configuration.ssl_ca_cert = settings.server, settings.ca
        configuration.api_key["BearerToken"] = f"Bearer {settings.token}"
        self.api = client.ApiClient(configuration)
        self.core, self.coordination = client.CoreV1Api(self.api), client.CoordinationV1Api(self.api)
        self.nodes = {name: Node(name, port) for name, port in settings.nodes.items()}
        self.pods: dict[str, Pod] = {}
        """By uid."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.watch, args=(loop,), daemon=True).start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.settings.certificate)
        # only the API server may come in: it has a certificate of the cluster's authority
        context.load_verify_locations(self.settings.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        async with contextlib.AsyncExitStack() as stack:
            for node in self.nodes.values():
                await stack.enter_async_context(self.server(node, context))
                self.start(self.beat(node))
            print("ready", flush=True)
            commands = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
            while line := await commands.readline():
                verb, _, what = line.decode().strip().partition(" ")
                print(await self.fault(verb, what), flush=True)
            for pod in list(self.pods.values()):
                await asyncio.to_thread(kill_all, pod.uid)
            os._exit(0)  # nothing here needs to be put in order

    def start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # --- the API ---------------------------------------------------------------------------------------------------

    async def insist(self, call: Any, *args: Any, **options: Any) -> Any:
        """Result of a call of the API, tried again while the server is away or NOT_YET; None where it refuses."""
        while True:
            try:
                return await asyncio.to_thread(call, *args, **options, _request_timeout=10)
            except client.ApiException as e:
                if e.status and e.status < 500 and e.status not in NOT_YET:
                    return None
            except Exception:  # noqa: BLE001  whatever is wrong with the connection
                pass
            await asyncio.sleep(RETRY_S)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with contextlib.suppress(Exception):
                found = self.core.list_pod_for_all_namespaces(_request_timeout=10)
                pods = [self.api.sanitize_for_serialization(p) for p in found.items]
                loop.call_soon_threadsafe(self.relisted, pods)
                stream = watch.Watch().stream(
                    self.core.list_pod_for_all_namespaces,
                    resource_version=found.metadata.resource_version,
                    timeout_seconds=30,
                    _request_timeout=(5, 35),
                )
                for event in stream:
                    loop.call_soon_threadsafe(self.saw, event["raw_object"], event["type"] == "DELETED")
            time.sleep(RETRY_S)

    def relisted(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            self.saw(pod, False)
        for uid in set(self.pods) - {p["metadata"]["uid"] for p in pods}:
            self.saw(self.pods[uid].spec, True)

    def saw(self, spec: dict[str, Any], gone: bool) -> None:
        uid, node = spec["metadata"]["uid"], self.nodes.get(spec["spec"].get("nodeName", ""))
        pod = self.pods.get(uid)
        if gone and pod is not None:
            del self.pods[uid]
            self.start(self.bury(pod))
        elif gone or node is None:
            return
        elif pod is not None:
            pod.spec = spec
            pod.changed.set()
        elif spec.get("status", {}).get("phase") == "Pending" or "deletionTimestamp" in spec["metadata"]:
            pod = self.pods[uid] = Pod(spec, node, Path(self.settings.folder) / f"{spec['metadata']['name']}.{uid[:8]}")
            self.start(self.live(pod))

    async def beat(self, node: Node) -> None:
        registered = False
        while True:
            if not node.down:
                if not registered:
                    await self.insist(self.core.create_node, {"metadata": {
                        "name": node.name, "labels": {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux"}
                    }})  # fmt: skip
                    registered = True
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self.beat_once, node)
            node.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.changed.wait(), BEAT_S)

    def beat_once(self, node: Node) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a stand-in"}
        amount = {"cpu": "64", "memory": "64Gi", "pods": "110", self.settings.resource: str(self.settings.gpus)}
        self.core.patch_node_status(node.name, {"status": {
            "capacity": amount, "allocatable": amount,
            "conditions": [{**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": node.port}},
        }}, _request_timeout=5)  # fmt: skip
        held = {"holderIdentity": node.name, "leaseDurationSeconds": 8,
                "renewTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}  # fmt: skip
        body = {"metadata": {"name": node.name}, "spec": held}
        leases = self.coordination
        try:
            leases.patch_namespaced_lease(node.name, "kube-node-lease", body, _request_timeout=5)
        except client.ApiException:
            leases.create_namespaced_lease("kube-node-lease", body, _request_timeout=5)

    async def report(self, pod: Pod, phase: str, state: dict[str, Any], reason: str = "", message: str = "") -> None:
        running = "True" if phase == "Running" else "False"
        conditions = [{"type": t, "status": running} for t in ("Ready", "ContainersReady")]
        status: dict[str, Any] = {
            "phase": phase, "reason": reason or None, "message": message or None, "hostIP": "127.0.0.1",
            "podIP": "127.0.0.1", "conditions": [*conditions, {"type": "Initialized", "status": "True"}],
            "containerStatuses": [{
                "name": pod.container["name"], "image": pod.container["image"], "imageID": "", "restartCount": 0,
                "ready": phase == "Running", "started": phase == "Running", "state": state,
            }],
        }  # fmt: skip
        if phase == "Running":
            status["startTime"] = now()
        await self.insist(self.core.patch_namespaced_pod_status, pod.name, pod.namespace, {"status": status})

    # --- pods ------------------------------------------------------------------------------------------------------

    async def live(self, pod: Pod) -> None:
        """A pod from its binding to its removal."""
        if not pod.deleting:
            await self.contain(pod)
        while not pod.deleting or pod.node.down:
            await self.change(pod)
        await self.end(pod)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        await self.insist(self.core.delete_namespaced_pod, pod.name, pod.namespace, body=options)

    async def contain(self, pod: Pod) -> None:
        """Run its container until that ends or must end."""
        await self.launch(pod)
        process = pod.process
        assert process is not None
        ended = asyncio.create_task(process.wait())
        limit = pod.spec["spec"].get("activeDeadlineSeconds")
        until = time.monotonic() + (limit if limit is not None else 1e9)
        await self.report(pod, "Running", {"running": {"startedAt": now()}})
        while not (ended.done() or pod.deleting or pod.fault) or pod.node.down:
            await self.change(pod, min(until - time.monotonic(), 1e6), ended)
            if time.monotonic() >= until and not pod.fault:
                text = "Pod was active on the node longer than the specified deadline"
                pod.fault = ("DeadlineExceeded", text, "Error")
        await self.end(pod)
        code = process.returncode or 0
        phase = "Failed" if pod.fault or code else "Succeeded"
        reason, message, of_container = pod.fault or ("", "", "Error" if code else "Completed")
        killed = code if code >= 0 else 128 - code
        state = {"exitCode": killed, "reason": of_container, "finishedAt": now()}
        await self.report(pod, phase, {"terminated": state}, reason, message)

    async def launch(self, pod: Pod) -> None:
        taken = {g for p in self.pods.values() if p.node is pod.node and p is not pod for g in p.gpus}
        wanted = int(pod.container.get("resources", {}).get("limits", {}).get(self.settings.resource, 0))
        pod.gpus = [g for g in range(self.settings.gpus) if g not in taken][:wanted]
        (pod.folder / "tmp").mkdir(parents=True)
        pod.env = {
            **{name: os.environ[name] for name in POD_ENV if name in os.environ},
            "TMPDIR": str(pod.folder / "tmp"),
            "NODE_NAME": pod.node.name,
            "STANDIN_GPUS": ",".join(map(str, pod.gpus)),
            MARK: pod.uid,
            **{e["name"]: e.get("value", "") for e in pod.container.get("env", ())},
        }
        with (pod.folder / "log").open("ab") as log:
            pod.process = await asyncio.create_subprocess_exec(
                *pod.container.get("command", ()), *pod.container.get("args", ()),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=pod.env, cwd=pod.folder, start_new_session=True,
            )  # fmt: skip

    async def change(self, pod: Pod, timeout: float | None = None, *tasks: asyncio.Task[Any]) -> None:
        """Return at the next change of a pod, or when a task or the time ends."""
        pod.changed.clear()
        waiting = asyncio.create_task(pod.changed.wait())
        await asyncio.wait((waiting, *tasks), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def end(self, pod: Pod) -> None:
        """End its processes: the first gets SIGTERM and the grace period."""
        process = pod.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), pod.grace_s)
        await asyncio.to_thread(kill_all, pod.uid)
        if process is not None:
            await process.wait()
        for connection in list(pod.connections):
            connection.abort()
        pod.gpus = []

    async def bury(self, pod: Pod) -> None:
        await asyncio.to_thread(kill_all, pod.uid)
        shutil.rmtree(pod.folder, ignore_errors=True)

    # --- faults ----------------------------------------------------------------------------------------------------

    async def fault(self, verb: str, name: str) -> str:
        if verb in ("kill", "revive") and name in self.nodes:
            await self.node_fault(verb, self.nodes[name])
            return "ok"
        pod = next((p for p in self.pods.values() if p.name == name), None)
        if pod is None:
            return f"there is no {name}"
        if verb == "evict":
            pod.fault = ("Evicted", "The node was low on resource: memory. ", "Error")
        elif verb == "cut":
            for connection in list(pod.connections):
                connection.abort()
        elif verb == "freeze":
            pod.frozen = True
            for connection in pod.connections:
                if not connection.is_closing():
                    connection.pause_reading()
        else:
            return f"{verb} is unknown"
        pod.changed.set()
        return "ok"

    async def node_fault(self, verb: str, node: Node) -> None:
        pods = [p for p in self.pods.values() if p.node is node]
        node.down = verb != "revive"
        for pod in pods:
            pod.frozen = False
            if verb == "kill":
                for connection in list(pod.connections):
                    connection.abort()
                pod.fault = ("", "", "Error")
                await asyncio.to_thread(kill_all, pod.uid)
            pod.changed.set()
        node.changed.set()

    # --- what the API server hands on --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def server(self, node: Node, context: ssl.SSLContext) -> AsyncIterator[None]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self.answer(node, request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", node.port, ssl_context=context).start()
            yield
        finally:
            await runner.cleanup()

    def find(self, node: Node, path: str) -> Pod | None:
        """The pod of `/VERB/NAMESPACE/POD/CONTAINER`."""
        parts = path.split("/")
        pods = (p for p in self.pods.values() if p.node is node and not node.down)
        return next((p for p in pods if len(parts) > 3 and [p.namespace, p.name] == parts[2:4]), None)

    async def answer(self, node: Node, request: web.Request) -> web.StreamResponse:
        pod = self.find(node, request.path)
        if pod is None:
            return web.Response(status=404, text="there is no such pod\n")
        if request.path.startswith("/containerLogs/"):
            return web.Response(body=(pod.folder / "log").read_bytes())
        if pod.process is None or pod.process.returncode is not None or pod.fault:
            return web.Response(status=500, text="container is not running\n")
        connection = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=0, compress=False)
        await connection.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        pod.connections.add(transport)
        try:
            await self.command(pod, connection, request.query.getall("command"), request.query.get("input") == "1")
        except ConnectionError:
            pass
        finally:
            pod.connections.discard(transport)
        return connection

    async def command(self, pod: Pod, connection: web.WebSocketResponse, argv: list[str], with_input: bool) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe if with_input else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                env=pod.env, cwd=pod.folder, start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            words = f'exec failed: unable to start container process: exec: "{argv[0]}": {e.strerror}'
            await self.status(connection, 126, words)
            return

        async def output(stream: asyncio.StreamReader | None, channel: bytes) -> None:
            assert stream is not None
            while data := await stream.read(32768):
                while pod.frozen:
                    await asyncio.sleep(BEAT_S)
                await connection.send_bytes(channel + data)

        async def take() -> None:
            with contextlib.suppress(ConnectionError):
                async for message in connection:
                    if message.type is WSMsgType.BINARY and message.data[:1] == b"\0" and process.stdin is not None:
                        process.stdin.write(message.data[1:])
                        await process.stdin.drain()
            if process.stdin is not None:
                process.stdin.close()

        taking = asyncio.create_task(take())
        try:
            await asyncio.gather(output(process.stdout, b"\1"), output(process.stderr, b"\2"))
        finally:
            self.start(self.reap(process, taking))
        await self.status(connection, await process.wait())

    async def reap(self, process: asyncio.subprocess.Process, taking: asyncio.Task[None]) -> None:
        await process.wait()
        taking.cancel()

    async def status(self, connection: web.WebSocketResponse, code: int, words: str = "") -> None:
        if code == 0:
            status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        elif words:
            status = {"metadata": {}, "status": "Failure", "reason": "InternalError", "message": words, "code": 500}
        else:
            number = code if code > 0 else 128 - code
            words = f"command terminated with non-zero exit code: exit status {number}"
            causes = [{"reason": "ExitCode", "message": str(number)}]
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": words}
            status["details"] = {"causes": causes}
        await connection.send_bytes(b"\3" + json.dumps(status).encode())
        await connection.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(Kubelets(Settings(**json.loads(Path(sys.argv[1]).read_text()))).run())
