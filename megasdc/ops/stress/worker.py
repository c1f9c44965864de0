"""Worker process of a host: reads tasks, a message each (``megasdc.common.wire``), and answers each with one.

Started as ``python -m megasdc.ops.stress.worker NUMBER`` by ``megasdc.ops.stress.host``; one process for each device,
and on a CPU at least two, so that a host can run collectives among its own processes.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from megasdc.common.imports import frozen_imports
from megasdc.common.wire import encode_message, messages_of, own_address_towards
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.sections import DeterminismSection
from megasdc.ops.launch.host_process import ANSWER_BYTES
from megasdc.ops.stress.pair_links import LinkEnd


class WorkerSlot:
    """The work of one process of a host; the first has number 0."""

    def __init__(self, number: int) -> None:
        with frozen_imports():
            import torch

            from megasdc.determinism import set_deterministic
            from megasdc.ops.stress.drill import SlotDrill
            from megasdc.ops.stress.products import Products, device_of_slot

        set_deterministic(DeterminismSection(enabled=True))
        torch.set_num_threads(1)
        self._device = device_of_slot(number)
        self._drill = SlotDrill([])
        self._products = Products(self._device)
        self._run: Any = None
        self._store: Any = None
        self._meeting: Any = None
        self._timeout_s = 0.0
        self._link_end = LinkEnd(self._timeout_s)

    def hello(self, task: dict[str, Any]) -> dict[str, Any]:
        """Configures all tasks: ``timeout_s``, ``faults``; returns the key on which results depend."""
        from megasdc.ops.stress.drill import SlotDrill
        from megasdc.ops.stress.products import Products
        from megasdc.sdc.golden import machine_key

        self._timeout_s = task["timeout_s"]
        self._link_end = LinkEnd(self._timeout_s / 2)
        self._drill = SlotDrill(task["faults"])
        self._products = Products(self._device, self._drill.injector_of)
        on_accelerator = self._device.type == "cuda"
        key = {**machine_key(), "algorithm": self._products.algorithm}
        return {"key": key, "on_accelerator": on_accelerator}

    def gemm(self, task: dict[str, Any]) -> dict[str, Any]:
        """A ``round`` of matrix products; ``expected`` checksums, where given, are used from then on."""
        if task.get("expected") is not None:
            self._products.expect(task["expected"], task["against"])
        return self._products.run_round(task["round"])

    def training(self, task: dict[str, Any]) -> dict[str, Any]:
        """A ``round`` of the small run; ``config``, ``expected`` trace and its ``key`` are used in the first one."""
        from megasdc.ops.stress.training import SmallRun, small_run, trace_to_values

        differences: dict[str, Any] = {}
        if self._run is None:
            config = task["config"] or small_run(self._device.type == "cuda")
            self._hidden = int(config["megasdc"]["model"]["hidden_size"])
            self._run = SmallRun(config, self._timeout_s, self._drill.faults)
            if task.get("expected") is not None:
                differences = self._run.expect(task["expected"], task["key"])
        said = self._run.run_round(task["round"], self._drill.watch(self._hidden))
        self._drill.collect_tallies(said.pop("injectors"))
        trace = trace_to_values(said.pop("trace"))
        return {**said, "key": self._run.key, "differences": differences, "trace": trace if task["whole"] else None}

    def open(self, task: dict[str, Any]) -> dict[str, Any]:
        """Creates the store of a group of which this process is rank 0.

        It is a folder for processes of this host; with one on the host ``towards``, it listens on the route to that,
        and its values are signed with a secret, which travels as tasks and answers do.
        """
        from megasdc.parallel.local_ranks import LocalMeeting
        from megasdc.parallel.rendezvous import new_secret, serve_store

        if task["towards"] is None:
            self._meeting = LocalMeeting()
            return {"folder": str(self._meeting.folder)}
        address = own_address_towards(task["towards"])
        self._store = serve_store(address, 0)
        return {"host": address, "port": self._store.port, "secret": new_secret()}

    def collectives(self, task: dict[str, Any]) -> dict[str, Any]:
        """A ``round`` of collectives as a ``rank`` of ``ranks`` that meet in ``folder`` or at ``host`` and ``port``."""
        from megasdc.ops.stress.collectives import Group, check_group
        from megasdc.parallel.rendezvous import signed_store, unsigned_store

        # Kept until the end: the others use what rank 0 holds.
        own, self._store = (self._store if task["rank"] == 0 else None), None
        held, self._meeting = self._meeting, None
        try:
            store, is_first = own or self._join(task), task["rank"] == 0
            if "secret" in task:
                store = signed_store(store, bytes.fromhex(task["secret"]))
            of_group = unsigned_store(store, is_first) if self._device.type == "cuda" else store
            group = Group(of_group, task["rank"], task["ranks"], self._device, self._timeout_s / 2)
            said = check_group(group, task["round"], self._drill.injector_of(0))
            group.close()
        except RuntimeError as error:  # of the backend: another rank did not answer
            return {"compared": 0, "wrong": 0, "findings": [], "failed": str(error).partition("\n")[0] or repr(error)}
        finally:
            if held is not None:
                held.close()
        return {**said, "failed": None}

    def _join(self, task: dict[str, Any]) -> Any:
        """The store of a group of which this process is not the first, or all processes of this host."""
        import torch.distributed as dist

        from megasdc.parallel.rendezvous import folder_store

        limit = datetime.timedelta(seconds=self._timeout_s / 2)
        if "folder" in task:
            store = folder_store(Path(task["folder"]))
            store.set_timeout(limit)
            return store
        return dist.TCPStore(task["host"], task["port"], is_master=False, wait_for_workers=False, timeout=limit)

    def open_link(self, task: dict[str, Any]) -> dict[str, Any]:
        """Listens for the other end of a link, which is on the host ``towards``."""
        return self._link_end.open(task)

    def link(self, task: dict[str, Any]) -> dict[str, Any]:
        """Measures a link: leads it, or follows where this process listens."""
        return self._link_end.measure(task)

    def drill(self, _task: dict[str, Any]) -> dict[str, Any]:
        """Effects of the faults."""
        return self._drill.summary()


def main(number: int, answers: BinaryIO) -> None:
    """Processes tasks until standard input ends."""
    set_deterministic_environment(DeterminismSection(enabled=True), os.environ)
    slot = WorkerSlot(number)
    for task in messages_of(sys.stdin.buffer, ANSWER_BYTES):
        try:
            answer = {"id": task["id"], "ok": getattr(slot, task["do"])(task)}
        except Exception as error:  # reported to the caller, which records the host as lost
            answer = {"id": task["id"], "error": f"{type(error).__name__}: {error}"}
        answers.write(encode_message(answer, ANSWER_BYTES))
        answers.flush()


if __name__ == "__main__":
    # Libraries print to standard output, so answers use a descriptor of their own.
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(int(sys.argv[1]), own)
