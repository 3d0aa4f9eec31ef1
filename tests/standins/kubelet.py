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
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from kubernetes import client

BEAT_S, LOOK_S, RETRY_S = 1.0, 0.1, 0.3
NOT_YET = (401, 403, 429)
"""Refusals of an API server that has just started, and not read its roles yet."""
MARK = "STANDIN_POD"
"""Variable in the environment of every process of a pod: its uid."""
POD_ENV = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "HOME")
"""Variables that pods have of this process."""
Json = dict[str, Any]


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


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(eq=False)
class Pod:
    """A pod bound to one of the nodes; `fault`: reason and message of its end."""

    spec: Json
    node: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    fault: tuple[str, str] | None = None
    connections: set[asyncio.Transport] = field(default_factory=set)
    frozen: bool = False

    def __post_init__(self) -> None:
        metadata = self.spec["metadata"]
        self.name, self.uid, self.container = metadata["name"], metadata["uid"], self.spec["spec"]["containers"][0]
        self.of = (self.name, metadata["namespace"])

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.spec["metadata"]

    def cut(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def kill(self) -> None:
        """SIGKILL to every process of it, until there is none."""
        mark, found = f"{MARK}={self.uid}".encode(), [0]
        while found:
            found = []
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    ours = mark in (entry / "environ").read_bytes().split(b"\0")
                    if ours and b") Z " not in (entry / "stat").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)
                        found.append(int(entry.name))
            time.sleep(0.02)


class Kubelets:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        configuration = client.Configuration()
        configuration.host, configuration.ssl_ca_cert = settings.server, settings.ca
        configuration.api_key["BearerToken"] = f"Bearer {settings.token}"
        self.api = client.ApiClient(configuration)
        self.core, self.leases = client.CoreV1Api(self.api), client.CoordinationV1Api(self.api)
        self.down: set[str] = set()
        """Nodes that are dead."""
        self.pods: dict[str, Pod] = {}
        """By uid."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.settings.certificate)
        # only the API server may come in: it has a certificate of the cluster's authority
        context.load_verify_locations(self.settings.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        for node, port in self.settings.nodes.items():
            app = web.Application()
            app["node"] = node
            app.router.add_route("*", "/{path:.*}", self.answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
            self.start(self.beat(node, port))
        self.start(self.look())
        print("ready", flush=True)
        commands = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while line := await commands.readline():
            verb, _, what = line.decode().strip().partition(" ")
            print(await self.fault(verb, what), flush=True)
        for pod in self.pods.values():
            pod.kill()
        os._exit(0)  # nothing here needs to be put in order

    def start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

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

    async def look(self) -> None:
        """Take on pods that are bound to our nodes, and bury those that are gone."""
        while True:
            found = await self.insist(self.core.list_pod_for_all_namespaces)
            there = {pod.metadata.uid: self.api.sanitize_for_serialization(pod) for pod in found.items}
            for uid, spec in there.items():
                node = spec["spec"].get("nodeName", "")
                if uid in self.pods:
                    self.pods[uid].spec = spec
                elif node in self.settings.nodes and spec["status"].get("phase") == "Pending":
                    folder = Path(self.settings.folder) / f"{spec['metadata']['name']}.{uid[:8]}"
                    self.pods[uid] = Pod(spec, node, folder)
                    self.start(self.live(self.pods[uid]))
            for uid in self.pods.keys() - there.keys():
                pod = self.pods.pop(uid)
                await asyncio.to_thread(pod.kill)
                shutil.rmtree(pod.folder, ignore_errors=True)
            await asyncio.sleep(LOOK_S)

    async def beat(self, node: str, port: int) -> None:
        labels = {"kubernetes.io/hostname": node, "kubernetes.io/os": "linux"}
        await self.insist(self.core.create_node, {"metadata": {"name": node, "labels": labels}})
        amount = {"cpu": "64", "memory": "64Gi", "pods": "110", "amd.com/gpu": str(self.settings.gpus)}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a stand-in"}
        while True:
            if node not in self.down:
                held = {"holderIdentity": node, "leaseDurationSeconds": 8, "renewTime": now()}
                status = {
                    "capacity": amount, "allocatable": amount,
                    "conditions": [{**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}],
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                }  # fmt: skip
                lease = {"metadata": {"name": node}, "spec": held}
                await self.insist(self.core.patch_node_status, node, {"status": status})
                if not await self.insist(self.leases.patch_namespaced_lease, node, "kube-node-lease", lease):
                    await self.insist(self.leases.create_namespaced_lease, "kube-node-lease", lease)
            await asyncio.sleep(BEAT_S)

    async def report(self, pod: Pod, phase: str, state: Json, reason: str = "", message: str = "") -> None:
        running = phase == "Running"
        kinds = {"Ready": running, "ContainersReady": running, "Initialized": True}
        status: Json = {
            "phase": phase, "reason": reason or None, "message": message or None, "hostIP": "127.0.0.1",
            "podIP": "127.0.0.1", "conditions": [{"type": t, "status": str(is_so)} for t, is_so in kinds.items()],
            "containerStatuses": [{
                "name": pod.container["name"], "image": pod.container["image"], "imageID": "", "restartCount": 0,
                "ready": running, "started": running, "state": state,
            }],
            **({"startTime": now()} if running else {}),
        }  # fmt: skip
        await self.insist(self.core.patch_namespaced_pod_status, *pod.of, {"status": status})

    async def live(self, pod: Pod) -> None:
        """A pod from its binding to its removal."""
        if not pod.deleting:
            await self.contain(pod)
        while not pod.deleting or pod.node in self.down:
            await asyncio.sleep(LOOK_S)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        await self.insist(self.core.delete_namespaced_pod, *pod.of, body=options)

    async def contain(self, pod: Pod) -> None:
        """Run its container until that ends or must end."""
        (pod.folder / "tmp").mkdir(parents=True)
        pod.env = {name: os.environ[name] for name in POD_ENV if name in os.environ}
        pod.env |= {"TMPDIR": str(pod.folder / "tmp"), MARK: pod.uid}
        pod.env |= {e["name"]: e.get("value", "") for e in pod.container.get("env", ())}
        with (pod.folder / "log").open("ab") as log:
            pod.process = process = await asyncio.create_subprocess_exec(
                *pod.container["command"], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=pod.env, cwd=pod.folder, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + pod.spec["spec"].get("activeDeadlineSeconds", 1e9)
        await self.report(pod, "Running", {"running": {"startedAt": now()}})
        while not (process.returncode is not None or pod.deleting or pod.fault) or pod.node in self.down:
            if time.monotonic() >= until and not pod.fault:
                pod.fault = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            await asyncio.sleep(LOOK_S)
        # the first process gets SIGTERM and the grace period
        if process.returncode is None:
            process.terminate()
            grace = pod.spec["metadata"].get("deletionGracePeriodSeconds")
            with contextlib.suppress(TimeoutError):
                default = pod.spec["spec"].get("terminationGracePeriodSeconds", 30)
                await asyncio.wait_for(process.wait(), default if grace is None else grace)
        await asyncio.to_thread(pod.kill)
        code = await process.wait()
        pod.cut()
        reason, message = pod.fault or ("", "")
        bad = bool(pod.fault or code)
        state = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if bad else "Completed"}
        ended = {"terminated": {**state, "finishedAt": now()}}
        await self.report(pod, "Failed" if bad else "Succeeded", ended, reason, message)

    async def fault(self, verb: str, name: str) -> str:
        if verb == "revive":
            self.down.discard(name)
            for pod in self.pods.values():
                pod.frozen = pod.frozen and pod.node != name
            return "ok"
        if verb == "kill":
            self.down.add(name)
            for pod in self.pods.values():
                if pod.node == name:
                    pod.fault = ("", "")
                    pod.cut()
                    await asyncio.to_thread(pod.kill)
            return "ok"
        pod = next(p for p in self.pods.values() if p.name == name)
        if verb == "evict":
            pod.fault = ("Evicted", "The node was low on resource: memory. ")
        elif verb == "cut":
            pod.cut()
        elif verb == "freeze":
            pod.frozen = True
            for connection in pod.connections:
                if not connection.is_closing():
                    connection.pause_reading()
        return "ok"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """`/VERB/NAMESPACE/POD/CONTAINER`, of exec or containerLogs."""
        verb, namespace, name = request.path.split("/")[1:4]
        node = request.app["node"]
        pods = (p for p in self.pods.values() if p.of == (name, namespace) and p.node == node)
        pod = next(pods, None)
        if pod is None or node in self.down:
            return web.Response(status=404, text="there is no such pod\n")
        if verb == "containerLogs":
            return web.Response(body=(pod.folder / "log").read_bytes())
        if pod.process is None or pod.process.returncode is not None or pod.fault:
            return web.Response(status=500, text="container is not running\n")
        connection = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=0, compress=False)
        await connection.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        pod.connections.add(transport)
        try:
            await self.command(pod, connection, request.query.getall("command"))
        except ConnectionError:
            pass
        finally:
            pod.connections.discard(transport)
        return connection

    async def command(self, pod: Pod, connection: web.WebSocketResponse, argv: list[str]) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=pod.env, cwd=pod.folder, start_new_session=True
        )
        stdin, streams = process.stdin, {b"\1": process.stdout, b"\2": process.stderr}
        assert stdin is not None

        async def output(channel: bytes) -> None:
            stream = streams[channel]
            while stream is not None and (data := await stream.read(32768)):
                while pod.frozen:
                    await asyncio.sleep(BEAT_S)
                await connection.send_bytes(channel + data)

        async def take() -> None:
            with contextlib.suppress(ConnectionError):
                async for message in connection:
                    if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
                        stdin.write(message.data[1:])
                        await stdin.drain()
            stdin.close()
            await process.wait()

        self.start(take())
        await asyncio.gather(*map(output, streams))
        code = await process.wait()
        status: Json = {"metadata": {}, "status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}]
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        await connection.send_bytes(b"\3" + json.dumps(status).encode())
        await connection.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(Kubelets(Settings(**json.loads(Path(sys.argv[1]).read_text()))).run())
