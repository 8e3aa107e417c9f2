"""The trainer's side of vLLM's weight transfer, as vLLM's documents describe it, without vLLM.

    server = VLLMServer("http://inference-0:8000") if dist.get_rank() == 0 else None
    source = weight_source(model, rename, dtype=torch.bfloat16)
    transfer = VLLMTransfer(source, server, ("trainer-0", 29800), join)
    transfer.send("step 100")  # on every rank; and server.pause() before it, server.resume() afterwards

Commands are HTTP requests with JSON; weights are broadcast, packed, in a group of the trainer (rank 0) and
all workers. A vLLM server (`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend":
"nccl"}'`) makes its end of that group from its own `StatelessProcessGroup` and NCCL, which torch's groups
cannot meet. So give as `join` what makes the other end, such as vLLM's `stateless_init_process_group` with
rank 0. `GlooGroup` is the same over gloo.

The routes, their JSON and the order of packed bytes follow vLLM's documents (docs.vllm.ai, "Weight Transfer",
version 0.32). It was tried against a server of our own that follows them too, and not against vLLM's.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_wrap.weights import WeightSource


class Group(Protocol):
    """The trainer and all workers, as vLLM's communicator shows them."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> object:
        """Sends a tensor from one rank to all others."""


class GlooGroup:
    """A group over gloo that meets at an address, beside all others of a process."""

    def __init__(self, host: str, port: int, size: int, rank: int = 0, timeout: float = 60.0) -> None:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(host, port, size, rank == 0, limit, wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(store, rank, size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._group.broadcast(tensor, src).wait()


class VLLMServer:
    """The HTTP routes of a vLLM server for weights; an answer that is no success raises `RuntimeError`."""

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def world_size(self) -> int:
        """How many workers there are."""
        return int(self._ask("GET", "get_world_size")["world_size"])

    def pause(self, mode: str = "keep") -> None:
        """Stops generating; requests are kept for `resume`, or "abort"ed, or "wait"ed for."""
        self._ask("POST", f"pause?mode={mode}")

    def resume(self) -> None:
        self._ask("POST", "resume")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._ask("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._ask("POST", "finish_weight_update", body)

    def _ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{route}", data, kind, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return dict(json.loads(answer.read() or b"{}"))
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")
            raise RuntimeError(f"{self._url}/{route} answers {error.code}: {told}") from error
        except OSError as error:
            raise RuntimeError(f"{self._url}/{route} cannot be reached: {error}") from error


class VLLMTransfer:
    """Sends weights to all workers of a server. Every rank makes one, with the same source.

    Args:
        source: Tensors under the names that the engine's `load_weights` takes.
        server: On the first rank; None on all others.
        address: Host and port at which trainer and workers meet.
        join: Makes the trainer's end of their group, of host, port and size.
        buffer: A broadcast ends with the tensor that exceeds so many bytes.
    """

    def __init__(
        self,
        source: WeightSource,
        server: VLLMServer | None,
        address: tuple[str, int],
        join: Callable[[str, int, int], Group] = GlooGroup,
        buffer: int = 1 << 28,
    ) -> None:
        self._source, self._server, self._buffer = source, server, buffer
        self._aside = ThreadPoolExecutor(1, "vllm_wire")
        if server is None:
            return
        size = 1 + server.world_size()
        place = {"master_address": address[0], "master_port": address[1], "rank_offset": 1}
        packing = {"packed": True, "packed_buffer_size_bytes": buffer, "packed_num_buffers": 1}
        info = {**place, "world_size": size, **packing}
        met = self._aside.submit(server.init_weight_transfer_engine, info)
        self._group = join(*address, size)
        met.result()

    def send(self, weight_version: str | None = None) -> None:
        """Sends all weights, which get this version; collective.

        Raises:
            RuntimeError: On the first rank, when all ranks have come to the end: training can go on.
        """
        update = None if self._server is None else self._begun(self._server)
        for _, tensor in self._source:
            if update is not None:
                update.add(tensor)
        if update is not None and self._server is not None:
            update.finish()
            self._server.finish_weight_update(weight_version)

    def _begun(self, server: VLLMServer) -> _Update:
        tensors = self._source.metadata()
        info = {
            "names": [tensor.name for tensor in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }

        def told() -> None:
            server.start_weight_update()
            server.update_weights(info)

        return _Update(self._group, self._aside.submit(told), self._buffer)


class _Update:
    """Packs tensors and broadcasts them; after a failure it takes what comes, and sends nothing."""

    def __init__(self, group: Group, told: Future[None], buffer: int) -> None:
        self._group, self._told, self._buffer = group, told, buffer
        self._packed: list[torch.Tensor] = []
        self._failure: RuntimeError | None = None

    def add(self, tensor: torch.Tensor) -> None:
        self._packed.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, self._packed)) > self._buffer:
            self._broadcast()

    def finish(self) -> None:
        self._broadcast()
        if self._failure is None or self._told.done():
            self._told.result()
        if self._failure is not None:
            raise self._failure

    def _broadcast(self) -> None:
        packed, self._packed = self._packed, []
        if packed and self._failure is None:
            try:
                self._group.broadcast(torch.cat(packed), 0)
            except RuntimeError as error:
                self._failure = error
